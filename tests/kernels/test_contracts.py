"""What every sequence operation must do, for every entry of the table in operations.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.kernels.harness import POSITIONAL, call, error, make, run_jax, run_torch, split_documents, state_leaves, step, to_torch
from tests.kernels.operations import BACKEND, DTYPES, OPERATIONS, TOLERANCES

VARIANTS = [(name, option) for name, operation in OPERATIONS.items() for option in operation.options]
SIZES = {"one token": (2, 1, 2, 16, 16), "odd": (2, 37, 2, 16, 24), "48": (1, 70, 3, 48, 16), "chunks": (1, 131, 1, 16, 48)}
every_variant = pytest.mark.parametrize(("name", "option"), VARIANTS)
every_gated = pytest.mark.parametrize(
    "name", [name for name in OPERATIONS if name not in ("attention", "convolution", "sliding window", "delta_rule")]
)
every_operation = pytest.mark.parametrize("name", OPERATIONS)
SMALL = -60.0 if BACKEND == "pallas" else -80.0  # XLA takes what is below 1e-38, which e^-80 times a little is, as 0
both_frameworks = pytest.mark.skipif(BACKEND in ("triton", "pallas"), reason="a device's kernels take one framework's arrays")


def settings(name, option=None):
    operation = OPERATIONS[name]
    return operation, operation.options[next(iter(operation.options)) if option is None else option]


def gate_of(xs):
    return "log_a" if "log_a" in xs else "log_decay"


def compare(results, reference, tolerance):
    errors = {n: error(results[n], reference[n]) for n in reference}
    assert results.keys() == reference.keys() and max(errors.values()) <= tolerance, errors


@every_variant
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_parity_with_the_reference_in_float64(name, option, size, dtype):
    """Outputs, final states, every gradient; documents, padding, gates at 0 and 1, a state to start from."""
    operation, options = settings(name, option)
    xs, state = make(operation, SIZES[size])
    if dtype == "bfloat16":  # the reference on the inputs as rounded
        xs = {n: x if n in operation.float32 else torch.tensor(x).bfloat16().double().cpu().numpy() for n, x in xs.items()}
    segments = split_documents(*SIZES[size][:2])
    reference = run_torch(operation, xs, state, segments, "float64", "reference", **options)
    compare(run_torch(operation, xs, state, segments, dtype, operation.backend, **options), reference, TOLERANCES[dtype])


@every_variant
@pytest.mark.parametrize("started", [False, True])
def test_parity_without_documents(name, option, started):
    operation, options = settings(name, option)
    xs, state = make(operation, SIZES["odd"])
    runs = [
        run_torch(operation, xs, state if started else None, None, "float32" if b else "float64", b or "reference", **options)
        for b in (None, operation.backend)
    ]
    compare(runs[1], runs[0], TOLERANCES["float32"])


@both_frameworks
@every_variant
def test_torch_equals_jax(name, option):
    operation, options = settings(name, option)
    xs, state = make(operation, SIZES["odd"])
    segments = split_documents(*SIZES["odd"][:2])
    ours = run_torch(operation, xs, state, segments, "float32", operation.backend, **options)
    compare(run_jax(operation, xs, state, segments, operation.backend, **options), ours, TOLERANCES["same"])


@both_frameworks
@every_operation
def test_the_reference_runs_in_jax(name):
    operation, options = settings(name)
    xs, state = make(operation, SIZES["odd"])
    segments = split_documents(*SIZES["odd"][:2])
    ours = run_torch(operation, xs, state, segments, "float64", "reference", **options)
    compare(run_jax(operation, xs, state, segments, "reference", **options), ours, TOLERANCES["float32"])


@both_frameworks
def test_the_reference_runs_in_jax_in_float64():
    operation, options = settings("linear_attention")
    xs, state = make(operation, (1, 9, 1, 4, 4))
    ours = run_torch(operation, xs, state, None, "float64", "reference", **options)
    with jax.enable_x64(True):
        given = {n: jnp.asarray(x) for n, x in xs.items()}
        start = operation.state_type(jnp.asarray(state[0]), jnp.zeros(1, jnp.int32))
        o, end, _ = call(operation, given, start, None, backend="reference", **options)
        assert (
            o.dtype == jnp.float64
            and error(o, ours["o"]) <= TOLERANCES["float64"]
            and error(end[0], ours["end 0"]) <= TOLERANCES["float64"]
        )


@every_variant
@pytest.mark.parametrize("cut", [0, 1, 17, 37])
def test_steps_equal_the_forward_pass(name, option, cut):
    """A prefill of `cut` tokens, then token by token; outputs and the last state."""
    operation, options = settings(name, option)
    B, T = SIZES["odd"][:2]
    xs, state = make(operation, SIZES["odd"])
    segments = torch.tensor(split_documents(B, T))
    given, start = to_torch(operation, xs, state, "float32")
    whole, end, _ = call(operation, given, start, segments, **options)
    outputs, running = [], start
    if cut:
        first = {n: x if n in operation.fixed else x[:, :cut] for n, x in given.items()}
        o, running, _ = call(operation, first, start, segments[:, :cut], **options)
        outputs.extend(o.unbind(1))
    for t in range(cut, T):
        o, running = step(operation, given, t, running, segments, **options)
        outputs.append(o)
    assert error(torch.stack(outputs, 1), whole) <= TOLERANCES["same"]
    for x, y in zip(operation.comparable(running), operation.comparable(end), strict=True):
        assert error(x, y) <= TOLERANCES["same"]
    assert torch.equal(running[-1], end[-1])


@every_operation
def test_steps_from_nothing_without_documents(name):
    operation, options = settings(name)
    xs, _ = make(operation, SIZES["odd"])
    given, _ = to_torch(operation, xs, None, "float32")
    whole, end, _ = call(operation, given, None, None, **options)
    state, outputs = None, []
    for t in range(SIZES["odd"][1]):
        o, state = step(operation, given, t, state, None, **options)
        outputs.append(o)
    assert error(torch.stack(outputs, 1), whole) <= TOLERANCES["same"]
    assert torch.equal(state[-1], end[-1])


@every_variant
def test_a_document_never_moves_another(name, option):
    """Document 1 lies between documents 0 and 2. Other inputs there change nothing of 2, bit for bit, nor does 2's gradient reach it."""
    operation, options = settings(name, option)
    xs, state = make(operation, SIZES["odd"])
    other, _ = make(operation, SIZES["odd"], seed=5)
    B, T = SIZES["odd"][:2]
    ids = np.repeat(np.array([[0, 1, 2]], np.int32), [9, 12, 16], axis=1).repeat(B, 0)
    inside = {
        n: (
            x
            if n in operation.fixed
            else np.where((ids == 1).reshape(B, T, *[1] * (x.ndim - 2)), 3 * other[n] if n in "qkvx" else other[n], x)
        )
        for n, x in xs.items()
    }

    def run(xs):
        given, start = to_torch(operation, xs, state, "float32", gradient=True)
        o, end, _ = call(operation, given, start, torch.tensor(ids), **options)
        last = o[:, ids[0] == 2]
        leaves = {n: x for n, x in given.items() if n not in operation.without_gradient} | state_leaves(start, state)
        gradients = torch.autograd.grad(
            last.square().sum() + sum(x.square().sum() for x in operation.comparable(end)), list(leaves.values()), allow_unused=True
        )
        return o, last, end, dict(zip(leaves, gradients, strict=True))

    (o_a, last_a, end_a, grad_a), (o_b, last_b, end_b, grad_b) = run(xs), run(inside)
    assert not torch.equal(o_a[:, ids[0] == 1], o_b[:, ids[0] == 1])
    assert torch.equal(last_a, last_b) and torch.equal(o_a[:, ids[0] == 0], o_b[:, ids[0] == 0])
    assert all(torch.equal(x, y) for x, y in zip(end_a, end_b, strict=True))
    for n, g in grad_a.items():
        if g is None:
            continue
        if n.startswith("state"):
            assert (g == 0).all(), n
        elif n in operation.fixed:
            assert torch.equal(g, grad_b[n]), n
        else:
            assert (g[:, ids[0] != 2] == 0).all() and torch.equal(g[:, ids[0] == 2], grad_b[n][:, ids[0] == 2]), n
            assert g.abs().sum() > 0, n


@every_variant
@pytest.mark.parametrize("token", [1, 20, 36])
def test_causality(name, option, token):
    """Other inputs from a token on leave every earlier output as it was, bit for bit."""
    operation, options = settings(name, option)
    xs, _ = make(operation, SIZES["odd"])
    other, _ = make(operation, SIZES["odd"], seed=5)
    later = {n: x if n in operation.fixed else np.concatenate((x[:, :token], other[n][:, token:]), 1) for n, x in xs.items()}
    a, b = (call(operation, to_torch(operation, given, None, "float32")[0], None, None, **options)[0] for given in (xs, later))
    assert torch.equal(a[:, :token], b[:, :token]) and not torch.equal(a[:, token:], b[:, token:])


@every_operation
def test_strides_change_nothing(name):
    """Inputs and states with other strides: the same outputs, states and gradients."""
    operation, options = settings(name)
    xs, state = make(operation, SIZES["odd"])

    def restride(x):
        return x.transpose(0, 1).contiguous().transpose(0, 1) if x.ndim > 1 else x

    def run(laid_out):
        given, start = to_torch(operation, xs, state, "float32", gradient=True)
        leaves = [x for n, x in given.items() if n not in operation.without_gradient] + list(start[: len(state)])
        moved = {n: x if n in operation.fixed else laid_out(x) for n, x in given.items()}
        o, end, _ = call(operation, moved, type(start)(*(laid_out(x) for x in start[:-1]), start[-1]), None, **options)
        loss = (o * laid_out(torch.linspace(-1, 1, o.numel()).reshape(o.shape))).sum() + sum(
            x.square().sum() for x in operation.comparable(end)
        )
        return o, *end, *torch.autograd.grad(loss, leaves, allow_unused=True)

    for a, b in zip(run(lambda x: x), run(restride), strict=True):
        assert (a is None and b is None) or error(a, b) <= TOLERANCES["same"]


@every_operation
def test_padding_and_batch_change_nothing(name):
    """A row in a batch with padding anywhere, whatever the padding holds, is the row alone without it; its gradient there is 0."""
    operation, options = settings(name)
    sizes = (3, 37, 2, 16, 24)
    xs, state = make(operation, sizes)
    ids = np.where(np.random.default_rng(3).random(sizes[:2]) < 0.3, -1, 0).astype(np.int32)
    ids[2] = -1
    given, start = to_torch(operation, xs, state, "float32", gradient=True)
    o, end, _ = call(operation, given, start, torch.tensor(ids), **options)
    gradient = torch.autograd.grad(o.square().sum(), given["v" if "v" in given else "x"])[0]
    assert (gradient[torch.tensor(ids) < 0] == 0).all()
    for b in range(3):
        real = torch.tensor(ids[b] >= 0)
        assert (o[b, ~real] == 0).all()
        begin = type(start)(*(x[b : b + 1] for x in start))
        if not real.any():
            assert torch.equal(end[-1][b : b + 1], begin[-1])
            for x, y in zip(operation.comparable(end), operation.comparable(begin), strict=True):
                assert torch.equal(x[b : b + 1], y)
            continue
        row = {n: x if n in operation.fixed else x[b : b + 1, real] for n, x in given.items()}
        alone, alone_end, _ = call(operation, row, begin, None, **options)
        assert error(o[b : b + 1, real], alone) <= TOLERANCES["same"]
        for x, y in zip(operation.comparable(end), operation.comparable(alone_end), strict=True):
            assert error(x[b : b + 1], y) <= TOLERANCES["same"]


@every_operation
def test_a_state_goes_on_with_its_own_document_only(name):
    operation, options = settings(name)
    xs, state = make(operation, SIZES["odd"])
    ids = torch.full(SIZES["odd"][:2], 7, dtype=torch.int32)
    fresh = call(operation, to_torch(operation, xs, None, "float32")[0], None, ids, **options)[0]
    results = {}
    for own in (7, 3, -1):
        given, start = to_torch(operation, xs, state, "float32", ids=np.full(2, own))
        results[own], end, _ = call(operation, given, start, ids, **options)
        assert end[-1].tolist() == [7, 7]
    assert torch.equal(results[7], results[-1]) and error(results[7], fresh) > 1e-3
    if BACKEND == "pallas" and operation.name == "attention":  # over a cache, it is the library's
        assert error(results[3], fresh) <= TOLERANCES["same"]
    else:
        assert torch.equal(results[3], fresh)


@every_operation
@pytest.mark.parametrize("size", [1e-18, 1e-6, 1e3])
def test_tiny_and_huge_values(name, size):
    """v (or x) of any size: everything is linear in it, against float64."""
    operation, options = settings(name)
    xs, _ = make(operation, SIZES["odd"])
    xs["v" if "v" in xs else "x"] *= size
    reference = run_torch(operation, xs, None, None, "float64", "reference", **options)
    compare(run_torch(operation, xs, None, None, "float32", operation.backend, **options), reference, TOLERANCES["float32"])


@every_gated
@pytest.mark.parametrize("log_decay", [0.0, -1e-4, SMALL, -1e5, -np.inf])
def test_constant_gates_and_equal_keys(name, log_decay):
    """All tokens the same, the gate at an extreme: finite, and as float64 has it."""
    operation, options = settings(name)
    xs, state = make(operation, SIZES["odd"])
    for n, x in xs.items():
        if n not in operation.fixed:
            xs[n] = np.repeat(x[:, :1], x.shape[1], axis=1)
    gate = gate_of(xs)
    xs[gate] = np.full_like(xs[gate], log_decay)
    reference = run_torch(operation, xs, state, None, "float64", "reference", **options)
    ours = run_torch(operation, xs, state, None, "float32", operation.backend, **options)
    compare(ours, reference, 10 * TOLERANCES["float32"])


@every_gated
def test_large_decays_do_not_blur_small_ones(name):
    """A decay of e^-300 in one token leaves the decays behind it as exact as they were."""
    operation, options = settings(name)
    xs, _ = make(operation, (1, 64, 2, 16, 16))
    gate = gate_of(xs)
    xs[gate] = np.full_like(xs[gate], -1e-3)
    xs[gate][:, ::9] = -3e4
    reference = run_torch(operation, xs, None, None, "float64", "reference", **options)
    compare(run_torch(operation, xs, None, None, "float32", operation.backend, **options), reference, TOLERANCES["float32"])


@pytest.mark.skipif(BACKEND == "pallas", reason="Pallas' kernels take JAX arrays")
@every_operation
def test_torch_compile_takes_it_whole(name):
    operation, options = settings(name)
    xs, _ = make(operation, SIZES["odd"])
    ids = torch.tensor(split_documents(*SIZES["odd"][:2]))
    results = []
    torch.compiler.reset()
    for compiled in (False, True):
        given, _ = to_torch(operation, xs, None, "float32", gradient=True)
        f = lambda given: call(operation, given, None, ids, **options)[0].square().sum()  # noqa: E731
        if compiled:
            f = torch.compile(f, fullgraph=True, backend="aot_eager")
        loss = f(given)
        results.append((loss, torch.autograd.grad(loss, given["k" if "k" in given else "x"])[0]))
    assert error(results[1][0], results[0][0]) <= TOLERANCES["same"] and error(results[1][1], results[0][1]) <= TOLERANCES["same"]


@every_operation
def test_a_wrong_shape_is_one_sentence(name):
    operation, options = settings(name)
    xs, _ = make(operation, SIZES["odd"])
    given, _ = to_torch(operation, xs, None, "float32")
    *others, last = [n for n in given if n not in operation.fixed]
    short = given[last][:, 1:] if others else given[last][..., 1:]
    with pytest.raises(ValueError, match=f"{operation.name}: .* must"):
        call(operation, given | {last: short}, None, None, **options)
    if BACKEND == "pallas":
        return  # JAX has no int64 to refuse
    with pytest.raises(ValueError, match="segments is int64; document ids must be int32"):
        call(operation, given, None, torch.zeros(SIZES["odd"][:2], dtype=torch.int64), **options)
    with pytest.raises(ValueError, match="cannot run as pallas"):  # not by `call`, which would take them there
        named = {n: x for n, x in given.items() if n not in POSITIONAL}
        operation.call(*(x for n, x in given.items() if n in POSITIONAL), **named, backend="pallas", **options)
