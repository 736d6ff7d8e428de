"""The array operations over torch. `kernels/arrays/jax.py` has the same names with the same meaning.

No implicit promotion: operations on several arrays refuse mixed floating dtypes with a ValueError; use `cast`.
"""

import ast
import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import checkpoint

from kernels.arrays import declaration
from kernels.arrays.composed import l2_normalise, rms_norm, rope, softmax_cross_entropy
from kernels.arrays.composed import rotation as _rotation_table

__all__ = ["l2_normalise", "rms_norm", "rope", "softmax_cross_entropy"]

Array = torch.Tensor
name = "torch"
float32, float64, bfloat16, int32 = torch.float32, torch.float64, torch.bfloat16, torch.int32

# elementwise
exp, log1p, expm1, sqrt, rsqrt, sin, cos = torch.exp, torch.log1p, torch.expm1, torch.sqrt, torch.rsqrt, torch.sin, torch.cos
sigmoid, log_sigmoid, silu, softplus, tanh = torch.sigmoid, F.logsigmoid, F.silu, F.softplus, torch.tanh
absolute = torch.abs


def gelu(x: Array) -> Array:
    """GELU by its tanh approximation."""
    return F.gelu(x, approximate="tanh")


def _same_dtype(*arrays: Array) -> None:
    dtypes = {str(x.dtype) for x in arrays}
    if len(dtypes) > 1:
        raise ValueError(f"arrays of different dtypes ({', '.join(sorted(dtypes))}); cast them to one dtype first.")


def where(condition: Array, x: Array | float, y: Array | float) -> Array:
    """x where the condition holds, else y; a Python number takes the other's dtype."""
    if isinstance(x, Array) and isinstance(y, Array):
        _same_dtype(x, y)
    return torch.where(condition, x, y)


def maximum(x: Array, y: Array | float) -> Array:
    return torch.maximum(x, y) if isinstance(y, Array) else x.clamp(min=y)


def minimum(x: Array, y: Array | float) -> Array:
    return torch.minimum(x, y) if isinstance(y, Array) else x.clamp(max=y)


def cast(x: Array, dtype: torch.dtype) -> Array:
    return x.to(dtype)


def epsilon(x: Array) -> float:
    """The spacing of x's dtype at 1: 2^-23 for float32."""
    return torch.finfo(x.dtype).eps


def dtype_name(x: Array) -> str:
    """The name of the dtype, as "float32"."""
    return str(x.dtype).removeprefix("torch.")


def device(x: Array) -> str:
    """Where it is: "cpu", "cuda" or "tpu"."""
    return x.device.type


def working_dtype(x: Array) -> torch.dtype:
    """What states and sums are kept in: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# making arrays, on the device of `like`
def array(values: Any, dtype: torch.dtype, like: Array) -> Array:
    return torch.as_tensor(values, dtype=dtype, device=like.device)


def full(shape: Sequence[int], value: float, dtype: torch.dtype, like: Array) -> Array:
    return torch.full(tuple(shape), value, dtype=dtype, device=like.device)


def zeros(shape: Sequence[int], dtype: torch.dtype, like: Array) -> Array:
    return full(shape, 0, dtype, like)


def ones(shape: Sequence[int], dtype: torch.dtype, like: Array) -> Array:
    return full(shape, 1, dtype, like)


def arange(length: int, like: Array) -> Array:
    """0, 1, ..., length - 1 in int32."""
    return torch.arange(length, dtype=torch.int32, device=like.device)


def causal(length: int, like: Array, *, strict: bool = False) -> Array:
    """[length, length], true where column <= row (strict: column < row)."""
    return torch.ones(length, length, dtype=torch.bool, device=like.device).tril(-1 if strict else 0)


# shape
moveaxis, swapaxes, broadcast_to = torch.movedim, torch.swapaxes, torch.broadcast_to


def transpose(x: Array, axes: Sequence[int]) -> Array:
    return x.permute(*axes)


def flip(x: Array, axis: int) -> Array:
    return torch.flip(x, (axis,))


def pad(x: Array, axis: int, before: int, after: int, value: float = 0) -> Array:
    """x with `before` and `after` more entries along one axis."""
    axis = axis % x.ndim
    return F.pad(x, [0, 0] * (x.ndim - 1 - axis) + [before, after], value=value) if before or after else x


def concatenate(arrays: Sequence[Array], axis: int) -> Array:
    _same_dtype(*arrays)
    return torch.cat(tuple(arrays), dim=axis)


def stack(arrays: Sequence[Array], axis: int = 0) -> Array:
    _same_dtype(*arrays)
    return torch.stack(tuple(arrays), dim=axis)


def take(x: Array, indices: Array, axis: int = 0) -> Array:
    """x's slices at integer `indices` of any shape along one axis (an embedding, for axis 0)."""
    if axis == 0:
        return F.embedding(indices, x) if x.ndim == 2 else x[indices]
    return torch.index_select(x, axis, indices.reshape(-1)).reshape(x.shape[:axis] + indices.shape + x.shape[axis + 1 :])


def take_along(x: Array, indices: Array, axis: int) -> Array:
    """As numpy's take_along_axis: indices has x's rank and broadcasts against it off the axis."""
    axis = axis % x.ndim
    shape = torch.broadcast_shapes(indices.shape, (*x.shape[:axis], 1, *x.shape[axis + 1 :]))
    return torch.gather(x, axis, indices.long().expand(shape))


def update(x_BS: Array, index_B: Array, values_B: Array, *, in_place: bool = False) -> Array:
    """A cache with x[b, index[b]] = values[b], or x[b, index[b, t]] = values[b, t] (trailing axes whole): a copy, or, in_place, itself."""
    _same_dtype(x_BS, values_B)
    row_B = torch.arange(index_B.shape[0], device=x_BS.device).reshape(-1, *[1] * (index_B.ndim - 1))
    return (x_BS.index_put_ if in_place else x_BS.index_put)((row_B, index_B.long()), values_B)


def largest_if_known(x: Array) -> int | None:
    """The largest entry of an integer array as a Python int; None while the program is being traced."""
    traced = torch.compiler.is_compiling() or isinstance(x, FakeTensor) or (x.is_cuda and torch.cuda.is_current_stream_capturing())
    return None if traced else int(x.max())


def argsort(x: Array) -> Array:
    """The stable order along the last axis."""
    return torch.argsort(x, dim=-1, stable=True)


# reductions and running sums
def sum(x: Array, axis: int | tuple[int, ...], keepdims: bool = False) -> Array:
    return torch.sum(x, dim=axis, keepdim=keepdims, dtype=x.dtype if x.is_floating_point() else torch.int32)


def mean(x: Array, axis: int | tuple[int, ...], keepdims: bool = False) -> Array:
    return torch.mean(x, dim=axis, keepdim=keepdims)


def max(x: Array, axis: int, keepdims: bool = False) -> Array:
    return torch.amax(x, dim=axis, keepdim=keepdims)


def any(x: Array) -> Array:
    return torch.any(x)


def logsumexp(x: Array, axis: int, keepdims: bool = False) -> Array:
    return torch.logsumexp(x, dim=axis, keepdim=keepdims)


def softmax(x: Array, axis: int) -> Array:
    return torch.softmax(x, dim=axis)


def cumsum(x: Array, axis: int) -> Array:
    return torch.cumsum(x, dim=axis, dtype=x.dtype)


def cumprod(x: Array, axis: int) -> Array:
    return torch.cumprod(x, dim=axis, dtype=x.dtype)


def cummax(x: Array, axis: int) -> Array:
    return torch.cummax(x, dim=axis).values


# products
def _exact(x: Array, precision: str) -> contextlib.AbstractContextManager:
    """TF32 off for one eager product on a GPU; "default" leaves it as the process has it."""
    if precision not in ("highest", "default"):
        raise ValueError(f'precision is {precision!r}; it must be "highest" or "default".')
    if precision == "default" or not x.is_cuda or torch.compiler.is_compiling() or not torch.backends.cuda.matmul.allow_tf32:
        return contextlib.nullcontext()
    return _without_tf32()


@contextlib.contextmanager
def _without_tf32():
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = True


def matmul(a: Array, b: Array, *, accumulate: torch.dtype | None = None, precision: str = "default") -> Array:
    """a @ b. `accumulate` is the dtype that products are summed in and returned (None: the operands'); bfloat16 operands of a
    float32 product are exact. precision="highest" forbids TF32 and bfloat16 passes for float32 operands."""
    _same_dtype(a, b)
    if accumulate is not None and accumulate != a.dtype:
        if a.dtype == bfloat16 and a.is_cuda and b.ndim == 2 and accumulate == float32 and not torch.is_grad_enabled():
            return torch.mm(a.reshape(-1, a.shape[-1]), b, out_dtype=float32).reshape(*a.shape[:-1], -1)
        a, b = a.to(accumulate), b.to(accumulate)
    with _exact(a, precision):
        return torch.matmul(a, b)


def einsum(equation: str, *arrays: Array, accumulate: torch.dtype | None = None, precision: str = "default") -> Array:
    """As numpy's einsum; `accumulate` and `precision` as in `matmul`."""
    _same_dtype(*arrays)
    if accumulate is not None:
        arrays = tuple(x.to(accumulate) for x in arrays)
    with _exact(arrays[0], precision):
        return torch.einsum(equation, *arrays)


_MANY_ROWS = 4096
"""What is worth splitting a weight for."""


def wide_matmul(x: Array, weight: Array) -> Array:
    """x [..., I] @ weight [I, J] with a float32 weight, in float32 (float64 stays); for few columns, such as gates.

    bfloat16 x on a GPU: the weight as three bfloat16 parts side by side, so one product of the tensor cores, summed in float32, is exact.
    """
    if x.dtype == bfloat16 and x.is_cuda and x.numel() // x.shape[-1] >= _MANY_ROWS:
        (y,) = _wide_product(x.reshape(-1, x.shape[-1]), weight)
        return y.reshape(*x.shape[:-1], -1)
    wide = working_dtype(x)
    return torch.matmul(x.to(wide), weight.to(wide))


def parts(x: Array, count: int) -> list[Array]:
    """bfloat16 arrays that add up to a float32 one, each 2^-8 of the one before."""
    parts = []
    for _ in range(count):
        parts.append(x.to(bfloat16))
        x = x - parts[-1].float()
    return parts


def _beside(parts: list[Array]) -> Array:
    """Side by side, filled up to rows of 16 bytes."""
    return F.pad(torch.cat(parts, 1), (0, -len(parts) * parts[0].shape[1] % 8))


def _summed_product(a: Array, b: Array, columns: int) -> Array:
    """a @ b in float32, its groups of so many columns added up."""
    y = torch.mm(a, b, out_dtype=float32) if a.is_cuda else torch.mm(a.float(), b.float())
    return y[:, : y.shape[1] // columns * columns].reshape(len(y), -1, columns).sum(1)


def _wide_forward(x_NI: Array, weight_IJ: Array) -> tuple[tuple[Array], tuple]:
    return (_summed_product(x_NI, _beside(parts(weight_IJ, 3)), weight_IJ.shape[1]),), ()


def _wide_backward(arrays: tuple[Array, ...], residuals: tuple, gradients: tuple[Array]) -> tuple[Array, Array]:
    (x_NI, weight_IJ), (dy_NJ,) = arrays, gradients
    high, low = parts(dy_NJ, 2)
    W, w = parts(weight_IJ, 2)
    dx_NI = _beside([high, low, high]) @ _beside([W, W, w]).T
    return dx_NI, _summed_product(x_NI.T, _beside([high, low]), weight_IJ.shape[1])


def dot_product_attention(q_BTHK: Array, k_BAHK: Array, v_BAHV: Array, *, visible: Array | None, scale: float) -> Array:
    """Softmax attention [B, T, H, V]; visible is bool [B, T, A], every row with a true entry; None is causal with A = T."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BAHK, v_BAHV))
    mask = None if visible is None else visible[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=visible is None, scale=scale).transpose(1, 2)


def inverse_unit_lower(x: Array) -> Array:
    """The inverse of unit lower triangles [..., C, C]; only what lies below the diagonal is read."""
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).expand(x.shape)
    return torch.linalg.solve_triangular(x, eye, upper=False, unitriangular=True)


def solve(a: Array, b: Array) -> Array:
    """x with a x = b, for square matrices a [..., K, K] and vectors b [..., K], by elimination."""
    return torch.linalg.solve(a, b[..., None])[..., 0]


def cholesky(x: Array) -> Array:
    """The lower triangles L with L L^T = x, for symmetric positive matrices [..., K, K]; NaN where x is not positive."""
    L, failed = torch.linalg.cholesky_ex(x)
    return torch.where(failed[..., None, None] > 0, float("nan"), L)


def solve_lower(a: Array, b: Array) -> Array:
    """x with a x = b, for lower triangles a [..., K, K] and matrices b [..., K, X]."""
    return torch.linalg.solve_triangular(a, b, upper=False)


# control
def scan(step: Callable, carry: Any, xs: Any, *, reverse: bool = False) -> tuple[Any, Any]:
    """carry, y = step(carry, x) for each x along the first axis of xs (an array or a tuple of them); (carry, ys stacked).

    y is an array, a tuple of arrays or None. reverse runs from the last x to the first; ys keep the order of xs.
    """
    xs_tuple = xs if isinstance(xs, tuple) else (xs,)
    rows = range(len(xs_tuple[0]))
    ys = []
    for i in reversed(rows) if reverse else rows:
        carry, y = step(carry, tuple(x[i] for x in xs_tuple) if isinstance(xs, tuple) else xs[i])
        ys.append(y)
    if reverse:
        ys.reverse()
    if ys[0] is None:
        return carry, None
    return carry, tuple(map(torch.stack, zip(*ys, strict=True))) if isinstance(ys[0], tuple) else torch.stack(ys)


def associative_scan(combine: Callable, xs: tuple[Array, ...], axis: int) -> tuple[Array, ...]:
    """The running combination along an axis: y_t = combine(y_{t-1}, x_t), in log2(T) passes. combine takes and returns tuples."""
    length, shift = xs[0].shape[axis], 1
    while shift < length:
        earlier = tuple(x.narrow(axis, 0, length - shift) for x in xs)
        later = tuple(x.narrow(axis, shift, length - shift) for x in xs)
        done = (x.narrow(axis, 0, shift) for x in xs)
        xs = tuple(torch.cat((d, c), dim=axis) for d, c in zip(done, combine(earlier, later), strict=True))
        shift *= 2
    return xs


def while_loop(condition: Callable, body: Callable, carry: tuple) -> tuple:
    """carry = body(carry) while condition(carry), a scalar bool array, holds. The carry keeps its shapes and dtypes."""
    if _is_fake(carry):
        return carry  # shapes are all that is asked for, and they do not change
    while bool(condition(carry)):
        carry = body(carry)
    return carry


def _is_fake(carry: tuple) -> bool:
    return isinstance(next(x for x in carry if isinstance(x, Array)), FakeTensor)


def stop_gradient(x: Array) -> Array:
    return x.detach()


def rematerialise(function: Callable) -> Callable:
    """The function, its intermediate values computed again in the backward pass instead of kept."""
    return functools.partial(checkpoint, function, use_reentrant=False)


def custom_gradient(forward: Callable, backward: Callable, outputs: int, saved: int) -> Callable:
    """See `kernels.arrays.custom_gradient`. Two opaque operations, under an autograd.Function that torch.compile can trace."""
    label = f"strata::{forward.__module__}.{forward.__qualname__}".replace(".", "_")

    def run_forward(arrays: list[Array], static: str) -> list[Array]:
        results, residuals = forward(*_absent_to_none(arrays), **_unwritten(static))
        assert len(results) == outputs
        return [x.contiguous() for x in (*results, *residuals)]

    def run_backward(arrays: list[Array], residuals: list[Array], gradients: list[Array], static: str) -> list[Array]:
        inputs = _absent_to_none(arrays)
        like = next(x for x in inputs if x is not None)
        results = backward(inputs, tuple(residuals), tuple(gradients), **_unwritten(static))
        return [_none(like) if g is None else g.contiguous() for g in results]

    forward_op = _opaque(f"{label}_forward", run_forward, "(Tensor[] arrays, str static) -> Tensor[]")
    backward_schema = "(Tensor[] arrays, Tensor[] residuals, Tensor[] gradients, str static) -> Tensor[]"
    backward_op = _opaque(f"{label}_backward", run_backward, backward_schema)

    rehearsed = set()

    def rehearse(arrays: Sequence[Array], static: str) -> None:
        """Both on fake tensors, once for such arrays: kernels that the backward pass will start are compiled meanwhile (kernels/ahead.py)."""
        key = (static, *((x.dtype, x.shape[-1]) for x in arrays))
        if key not in rehearsed:
            rehearsed.add(key)
            with FakeTensorMode() as mode, torch.no_grad():
                fakes = [mode.from_tensor(x) for x in arrays]
                everything = run_forward(fakes, static)
                results, residuals = everything[:outputs], everything[outputs:]
                run_backward(fakes, [*results[:saved], *residuals], [torch.empty_like(x) for x in results], static)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, static: str, *arrays: Array) -> tuple[Array, ...]:
            compiling = torch.compiler.is_compiling()
            if not compiling and arrays[0].is_cuda and not isinstance(arrays[0], FakeTensor):
                rehearse(arrays, static)
            run = forward_op if compiling else run_forward  # an opaque operation costs 0.1 ms of the host's time
            everything = run(list(arrays), static)
            results, residuals = everything[:outputs], everything[outputs:]
            ctx.save_for_backward(*arrays, *results[:saved], *residuals)
            ctx.count, ctx.static = len(arrays), static
            ctx.mark_non_differentiable(*(x for x in results if not x.is_floating_point()))
            return tuple(results)

        @staticmethod
        def backward(ctx, *gradients: Array) -> tuple:
            saved = ctx.saved_tensors  # asked for once: where a block is recomputed, that is all there is
            arrays, residuals = saved[: ctx.count], saved[ctx.count :]
            followed = torch.compiler.is_compiling() or torch.is_grad_enabled()  # the opaque operation refuses a gradient of the gradient
            results = (backward_op if followed else run_backward)(list(arrays), list(residuals), list(gradients), ctx.static)
            return (None, *(g if g.shape == x.shape else None for g, x in zip(results, arrays, strict=True)))

    def call(*arrays: Array | None, **static: Any) -> tuple[Array, ...]:
        like = next(x for x in arrays if x is not None)
        return Function.apply(_written(static), *[_none(like) if x is None else x for x in arrays])

    return call


def _opaque(label: str, run: Callable, schema: str) -> Callable:
    """A torch operation that torch.compile does not look into; its shapes come from a run on fake tensors."""
    operation = torch.library.custom_op(label, run, mutates_args=(), schema=schema)
    operation.register_fake(run)
    return operation


def _written(static: dict[str, Any]) -> str:
    return ";".join(f"{key}={value!r}" for key, value in static.items())


@functools.cache
def _unwritten(static: str) -> dict[str, Any]:
    return {key: ast.literal_eval(value) for key, value in (part.split("=", 1) for part in static.split(";") if part)}


def _none(like: Array) -> Array:
    """Stands for None in the list of tensors that an operation takes and returns."""
    return torch.zeros((0, 0, 0), dtype=like.dtype, device=like.device)


def _absent_to_none(arrays: Sequence[Array]) -> tuple[Array | None, ...]:
    return tuple(None if x.shape == (0, 0, 0) else x for x in arrays)


@torch.library.custom_op("strata::rotation", mutates_args=())
def _rotation(positions: Array, half: int, base: float) -> tuple[Array, Array]:
    return _rotation_table(positions, half, base)


@_rotation.register_fake
def _(positions: Array, half: int, base: float) -> tuple[Array, Array]:
    return tuple(positions.new_empty((*positions.shape, half), dtype=float32) for _ in range(2))


def rotation(positions: Array, half: int, base: float) -> tuple[Array, Array]:
    """See `composed.rotation`; opaque, or a compiled program would compute a sine for every head and dimension that it turns."""
    return _rotation(positions, half, base)


_wide_product = custom_gradient(_wide_forward, _wide_backward, outputs=1, saved=0)

declaration.make_all(name, custom_gradient)
