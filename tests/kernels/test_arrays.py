"""The same operations over torch and JAX: the same values and the same gradients (float32, CPU)."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from kernels import arrays

TOLERANCE = 2e-6
random = np.random.default_rng(0).standard_normal
x_23, y_23, square = (random(s).astype(np.float32) for s in ((2, 3), (2, 3), (2, 5, 5)))
x_BTHK, x_BTD, bias_D = (random(s).astype(np.float32) for s in ((2, 7, 3, 8), (2, 7, 6), (6,)))
indices = np.array([[2, 0], [1, 1]], np.int32)


def combine(a, b):
    return a[0] * b[0], a[1] * b[0] + b[1]


def outer(a, b):
    return (a, a * b)


# name: (function of ops and float arrays, the arrays)
CASES = {
    **{n: (lambda o, x, n=n: getattr(o, n)(x), x_23) for n in "exp expm1 sin cos sigmoid log_sigmoid silu softplus tanh gelu absolute".split()},
    **{n: (lambda o, x, n=n: getattr(o, n)(o.exp(x)), x_23) for n in "log1p sqrt rsqrt".split()},
    "wide_matmul": (lambda o, x, y: o.wide_matmul(x, o.swapaxes(y, 0, 1)), x_23, y_23),
    "where": (lambda o, x, y: o.where(x > 0, x, y) + o.where(x > 0, y, 0.0), x_23, y_23),
    "maximum": (lambda o, x, y: o.maximum(x, y) + o.maximum(x, 0.1) * o.minimum(x, y) - o.minimum(y, 0.2), x_23, y_23),
    "cast": (lambda o, x: o.cast(o.cast(x, o.bfloat16), o.float32), x_23),
    "full": (lambda o, x: o.full((3,), 2.0, o.float32, x) * x + o.zeros((3,), o.float32, x) + o.ones((2, 3), o.float32, x), x_23),
    "array": (lambda o, x: o.array([1.0, 2.0, 3.0], o.float32, x) * x, x_23),
    "arange": (lambda o, x: o.cast(o.arange(3, x), o.float32) * x, x_23),
    "causal": (lambda o, x: o.where(o.causal(5, x), x, 0.0) - o.where(o.causal(5, x, strict=True), x * x, 0.0), square),
    "moveaxis": (lambda o, x: o.moveaxis(x, 1, 0) + o.swapaxes(x, 0, 1) + o.transpose(x, (1, 0)), x_23),
    "broadcast_to": (lambda o, x: o.broadcast_to(x[None], (4, 2, 3)), x_23),
    "flip": (lambda o, x: o.flip(x, 1), x_23),
    "pad": (lambda o, x: o.pad(x, 0, 1, 2, 0.5), x_23),
    "concatenate": (lambda o, x, y: o.concatenate((x, y), 1), x_23, y_23),
    "stack": (lambda o, x, y: o.stack((x, y), 1), x_23, y_23),
    "take": (lambda o, x: o.take(x, o.array(indices, o.int32, x), 1), x_23),
    "take embedding": (lambda o, x: o.take(x, o.array(indices, o.int32, x), 0), random((4, 3)).astype(np.float32)),
    "take_along": (lambda o, x: o.take_along(x, o.array(indices, o.int32, x), 1), x_23),
    "argsort": (lambda o, x: o.take_along(x, o.argsort(x), 1), x_23),
    "update": (lambda o, x, y: o.update(x, o.array([2, 0], o.int32, x), y), random((2, 4, 3)).astype(np.float32), y_23),
    "update many": (lambda o, x, y: o.update(x, o.array([[2, 0], [1, 3]], o.int32, x), o.stack((y, -y), 1)), random((2, 4, 3)).astype(np.float32), y_23),
    "sum": (lambda o, x: o.sum(x, -1) + o.sum(x, (0, 1)) + o.mean(x, 1) + o.max(x, 1), x_23),
    "sum keepdims": (lambda o, x: o.sum(x, 1, True) + o.mean(x, 0, True) + o.max(x, 1, True), x_23),
    "logsumexp": (lambda o, x: o.logsumexp(x, 1) + o.logsumexp(x, 1, True), x_23),
    "softmax": (lambda o, x: o.softmax(x, -1), x_23),
    "cumsum": (lambda o, x: o.cumsum(x, 1) + o.cumprod(x, 0) + o.cummax(x, 1), x_23),
    "matmul": (lambda o, x, y: o.matmul(x, o.swapaxes(y, 0, 1), precision="highest"), x_23, y_23),
    "einsum": (lambda o, x, y: o.einsum("ab,cb->ac", x, y, precision="highest"), x_23, y_23),
    "inverse_unit_lower": (lambda o, x: o.inverse_unit_lower(x), square),
    "solve": (lambda o, x: o.solve(_positive(o, x), x[..., 0]), square),
    "cholesky": (lambda o, x: o.cholesky(_positive(o, x)), square),
    "solve_lower": (lambda o, x: o.solve_lower(o.cholesky(_positive(o, x)), x), square),
    "scan": (lambda o, x, y: o.concatenate([z.reshape(1, -1) for z in _scan(o, x, y)], 1), x_23, y_23),
    "associative_scan": (lambda o, x, y: o.associative_scan(combine, (o.sigmoid(x), y), 1)[1], *random((2, 2, 7)).astype(np.float32)),
    "rematerialise": (lambda o, x: o.rematerialise(lambda z: o.sin(o.sin(z)))(x), x_23),
    "stop_gradient": (lambda o, x: x * o.stop_gradient(x), x_23),
    "rms_norm": (lambda o, x, w: o.rms_norm(x, w), x_BTD, bias_D),
    "l2_normalise": (lambda o, x: o.l2_normalise(x), x_BTD),
    "rope": (lambda o, x: o.rope(x, o.arange(7, x)) + o.rope(x, o.arange(7, x)[None] + 3, fraction=0.5, base=100.0), x_BTHK),
    "softmax_cross_entropy": (lambda o, x: o.softmax_cross_entropy(x, o.array(indices, o.int32, x)), square[:, :2]),
}  # fmt: skip


def _positive(o, x):
    return o.swapaxes(x, 1, 2) @ x + o.where(o.causal(5, x) & ~o.causal(5, x, strict=True), 9.0, 0.0 * x)


def _scan(o, x, y):
    carry, (a, b) = o.scan(lambda c, r: (c * r[0] + r[1], (c, c * r[0])), x[0], (x, y))
    carry2, c = o.scan(lambda c, r: (c + o.sin(c * r), c), y[0], x, reverse=True)
    return carry, a, b, carry2, c


def torch_value_and_gradients(function, inputs):
    ops = arrays.load("torch")
    tensors = [torch.tensor(x, requires_grad=True) for x in inputs]
    out = function(ops, *tensors)
    weights = np.random.default_rng(1).standard_normal(tuple(out.shape)).astype(np.float32)
    gradients = torch.autograd.grad((out * torch.tensor(weights)).sum(), tensors, allow_unused=True)
    return out.detach().numpy(), [None if g is None else g.numpy() for g in gradients], weights


@pytest.mark.parametrize("case", CASES)
def test_torch_equals_jax(case):
    function, *inputs = CASES[case]
    value, gradients, weights = torch_value_and_gradients(function, inputs)
    ops = arrays.load("jax")
    jax_value, pull_back = jax.vjp(jax.jit(lambda *xs: function(ops, *xs)), *map(jnp.asarray, inputs))
    jax_gradients = pull_back(jnp.asarray(weights))
    np.testing.assert_allclose(value, jax_value, rtol=TOLERANCE, atol=TOLERANCE)
    assert np.isfinite(value).all()
    for g, h in zip(gradients, jax_gradients, strict=True):
        np.testing.assert_allclose(0 if g is None else g, h, rtol=TOLERANCE, atol=4 * TOLERANCE)


def test_wide_products_are_exact_for_bfloat16_by_tensor_cores():
    """What a GPU computes, in float32 instead of its products of bfloat16: forward as exact as float32, gradients as bfloat16's."""
    from kernels.arrays import torch as ops

    x, weight, dy = torch.randn(300, 64).bfloat16(), torch.randn(64, 7), torch.randn(300, 7)
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    (y,) = ops._wide_product(*leaves)
    y.backward(dy)
    exact = x.double() @ weight.double(), dy.double() @ weight.double().T, x.double().T @ dy.double()
    found = y, leaves[0].grad, leaves[1].grad
    assert [g.dtype for g in found] == [torch.float32, torch.bfloat16, torch.float32]
    for g, e, bound in zip(found, exact, (3e-7, 5e-3, 1e-5), strict=True):
        assert (g - e).abs().max() <= bound * e.abs().max()


def test_both_have_the_same_names():
    names = [{n for n in dir(arrays.load(b)) if not n.startswith("_")} for b in ("torch", "jax")]
    used = {n for n in names[0] & names[1]}
    frameworks = {
        "torch",
        "F",
        "FakeTensor",
        "FakeTensorMode",
        "checkpoint",
        "ast",
        "contextlib",
        "jax",
        "jnp",
        "Iterator",
        "compiling_for",
        "parts",
    }  # what only one of them imports, compiles by, or makes weights for one token by
    assert names[0] ^ names[1] <= frameworks, names[0] ^ names[1]
    assert {"einsum", "rms_norm", "custom_gradient", "while_loop"} <= used


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_while_loop(backend):
    ops = arrays.load(backend)
    x = ops.array([1.0, 8.0], ops.float32, torch.zeros(1))
    (y,) = ops.while_loop(lambda c: ops.any(c[0] < 30), lambda c: (ops.where(c[0] < 30, c[0] * 2, c[0]),), (x,))
    assert np.asarray(y).tolist() == [32.0, 32.0]


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_products_refuse_mixed_dtypes_and_accumulate_as_told(backend):
    ops = arrays.load(backend)
    a = ops.array(np.full((1, 256), 1.0039), ops.bfloat16, torch.zeros(1))
    with pytest.raises(ValueError, match="cast them"):
        ops.matmul(a, ops.cast(ops.swapaxes(a, 0, 1), ops.float32))
    out = ops.matmul(a, ops.swapaxes(a, 0, 1), accumulate=ops.float32)
    exact = (np.asarray(ops.cast(a, ops.float32), np.float64) ** 2).sum()
    assert out.dtype == ops.float32 and abs(float(out[0, 0]) - exact) < 1e-4
    assert ops.matmul(a, ops.swapaxes(a, 0, 1)).dtype == ops.bfloat16
    with pytest.raises(ValueError, match="highest"):
        ops.einsum("ab,ab->a", a, a, precision="exact")


def double_forward(x, y, *, power):
    ops = arrays.of(x)
    out = x**power if y is None else x**power * y
    return (out, ops.cast(ops.sum(x > 0, -1), ops.int32)), (x * 1,)


def double_backward(inputs, residuals, gradients, *, power):
    x, y = inputs
    (kept,) = residuals
    g = gradients[0]
    d = 7.0 * power * kept ** (power - 1) * g  # 7: to see that this and not autograd is used
    return (d, None) if y is None else (d * y, g * kept**power)


double = arrays.custom_gradient(double_forward, double_backward, outputs=2)


@pytest.mark.parametrize("other", [True, False])
def test_custom_gradient(other):
    x, y = torch.tensor(x_23, requires_grad=True), torch.tensor(y_23, requires_grad=True)
    f = lambda x, y: double(x, y if other else None, power=3)[0].sin().sum()  # noqa: E731
    f(x, y).backward()
    f_jax = lambda x, y: jnp.sin(double(x, y if other else None, power=3)[0]).sum()  # noqa: E731
    jx, jy = jax.grad(f_jax, (0, 1))(*map(jnp.asarray, (x_23, y_23)))
    np.testing.assert_allclose(x.grad, jx, rtol=1e-5, atol=1e-5)
    scale = y_23 if other else 1.0
    np.testing.assert_allclose(x.grad, 21 * x_23**2 * scale * np.cos(x_23**3 * scale), rtol=1e-5, atol=1e-5)
    if other:
        np.testing.assert_allclose(y.grad, jy, rtol=1e-5, atol=1e-5)
    eager = x.grad.clone()
    x.grad = None
    torch.compile(f, fullgraph=True, backend="aot_eager")(x, y).backward()
    np.testing.assert_allclose(x.grad, eager, rtol=1e-6)
    assert np.isfinite(jax.jit(f_jax)(x_23, y_23))


def test_importing_kernels_imports_no_framework():
    code = "import sys, kernels, kernels.arrays, kernels.segmentation; assert not {'torch', 'jax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_of_names_what_it_found():
    with pytest.raises(ValueError, match="found ndarray"):
        arrays.of(np.zeros(3))
