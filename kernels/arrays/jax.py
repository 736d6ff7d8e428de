"""The array operations over JAX. `kernels/arrays/torch.py` has the same names with the same meaning.

No implicit promotion: operations on several arrays refuse mixed floating dtypes with a ValueError; use `cast`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kernels.arrays import declaration
from kernels.arrays.composed import l2_normalise, rms_norm, rope, rotation, softmax_cross_entropy

__all__ = ["l2_normalise", "rms_norm", "rope", "rotation", "softmax_cross_entropy"]

Array = jax.Array
name = "jax"
float32, float64, bfloat16, int32 = jnp.float32, jnp.float64, jnp.bfloat16, jnp.int32

# elementwise
exp, log1p, expm1, sqrt, rsqrt, sin, cos = jnp.exp, jnp.log1p, jnp.expm1, jnp.sqrt, jax.lax.rsqrt, jnp.sin, jnp.cos
sigmoid, log_sigmoid, silu, softplus, tanh = jax.nn.sigmoid, jax.nn.log_sigmoid, jax.nn.silu, jax.nn.softplus, jnp.tanh
absolute = jnp.abs


def gelu(x: Array) -> Array:
    """GELU by its tanh approximation."""
    return jax.nn.gelu(x, approximate=True)


def _same_dtype(*arrays: Array) -> None:
    dtypes = {str(x.dtype) for x in arrays}
    if len(dtypes) > 1:
        raise ValueError(f"arrays of different dtypes ({', '.join(sorted(dtypes))}); cast them to one dtype first.")


def where(condition: Array, x: Array | float, y: Array | float) -> Array:
    """x where the condition holds, else y; a Python number takes the other's dtype."""
    if isinstance(x, Array) and isinstance(y, Array):
        _same_dtype(x, y)
    return jnp.where(condition, x, y)


def maximum(x: Array, y: Array | float) -> Array:
    return jnp.maximum(x, y)


def minimum(x: Array, y: Array | float) -> Array:
    return jnp.minimum(x, y)


def cast(x: Array, dtype: Any) -> Array:
    return x.astype(dtype)


def epsilon(x: Array) -> float:
    """The spacing of x's dtype at 1: 2^-23 for float32."""
    return float(jnp.finfo(x.dtype).eps)


def dtype_name(x: Array) -> str:
    """The name of the dtype, as "float32"."""
    return str(x.dtype)


def device(x: Array) -> str:
    """Where it is: "cpu", "gpu" (torch's is "cuda": Triton's kernels take its tensors alone) or "tpu"; the default device, as traced arrays have
    none, or what `compiling_for` names."""
    return _target or jax.default_backend()


_target: str | None = None


@contextlib.contextmanager
def compiling_for(device: str) -> Iterator[None]:
    """What is traced inside is meant for another device than this process has: to compile for a TPU where there is none."""
    global _target
    before, _target = _target, device
    try:
        yield
    finally:
        _target = before


def working_dtype(x: Array) -> Any:
    """What states and sums are kept in: float64 for float64, else float32."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


# making arrays; `like` names a device in torch and is not needed here
def array(values: Any, dtype: Any, like: Array) -> Array:
    return jnp.asarray(values, dtype=dtype)


def full(shape: Sequence[int], value: float, dtype: Any, like: Array) -> Array:
    return jnp.full(tuple(shape), value, dtype=dtype)


def zeros(shape: Sequence[int], dtype: Any, like: Array) -> Array:
    return full(shape, 0, dtype, like)


def ones(shape: Sequence[int], dtype: Any, like: Array) -> Array:
    return full(shape, 1, dtype, like)


def arange(length: int, like: Array) -> Array:
    """0, 1, ..., length - 1 in int32."""
    return jnp.arange(length, dtype=jnp.int32)


def causal(length: int, like: Array, *, strict: bool = False) -> Array:
    """[length, length], true where column <= row (strict: column < row)."""
    return jnp.tril(jnp.ones((length, length), bool), -1 if strict else 0)


# shape
moveaxis, swapaxes, broadcast_to, transpose = jnp.moveaxis, jnp.swapaxes, jnp.broadcast_to, jnp.transpose


def flip(x: Array, axis: int) -> Array:
    return jnp.flip(x, axis)


def pad(x: Array, axis: int, before: int, after: int, value: float = 0) -> Array:
    """x with `before` and `after` more entries along one axis."""
    widths = [(before, after) if n == axis % x.ndim else (0, 0) for n in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value) if before or after else x


def concatenate(arrays: Sequence[Array], axis: int) -> Array:
    _same_dtype(*arrays)
    return jnp.concatenate(arrays, axis=axis)


def stack(arrays: Sequence[Array], axis: int = 0) -> Array:
    _same_dtype(*arrays)
    return jnp.stack(arrays, axis=axis)


def take(x: Array, indices: Array, axis: int = 0) -> Array:
    """x's slices at integer `indices` of any shape along one axis (an embedding, for axis 0)."""
    return jnp.take(x, indices, axis=axis)


def take_along(x: Array, indices: Array, axis: int) -> Array:
    """As numpy's take_along_axis: indices has x's rank and broadcasts against it off the axis."""
    return jnp.take_along_axis(x, indices, axis=axis)


def update(x_BS: Array, index_B: Array, values_B: Array, *, in_place: bool = False) -> Array:
    """A cache with x[b, index[b]] = values[b], or x[b, index[b, t]] = values[b, t] (trailing axes whole): a copy; in_place is torch's."""
    _same_dtype(x_BS, values_B)
    row_B = jnp.arange(index_B.shape[0]).reshape(-1, *[1] * (index_B.ndim - 1))
    return x_BS.at[row_B, index_B].set(values_B)


def largest_if_known(x: Array) -> int | None:
    """The largest entry of an integer array as a Python int; None while the program is being traced."""
    return None if isinstance(x, jax.core.Tracer) else int(x.max())


def argsort(x: Array) -> Array:
    """The stable order along the last axis."""
    return jnp.argsort(x, axis=-1, stable=True)


# reductions and running sums
def sum(x: Array, axis: int | tuple[int, ...], keepdims: bool = False) -> Array:
    return jnp.sum(x, axis=axis, keepdims=keepdims, dtype=x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32)


def mean(x: Array, axis: int | tuple[int, ...], keepdims: bool = False) -> Array:
    return jnp.mean(x, axis=axis, keepdims=keepdims)


def max(x: Array, axis: int, keepdims: bool = False) -> Array:
    return jnp.max(x, axis=axis, keepdims=keepdims)


def any(x: Array) -> Array:
    return jnp.any(x)


def logsumexp(x: Array, axis: int, keepdims: bool = False) -> Array:
    return jax.nn.logsumexp(x, axis=axis, keepdims=keepdims)


def softmax(x: Array, axis: int) -> Array:
    return jax.nn.softmax(x, axis=axis)


def cumsum(x: Array, axis: int) -> Array:
    return jnp.cumsum(x, axis=axis, dtype=x.dtype)


def cumprod(x: Array, axis: int) -> Array:
    return jnp.cumprod(x, axis=axis, dtype=x.dtype)


def cummax(x: Array, axis: int) -> Array:
    return jax.lax.cummax(x, axis=axis % x.ndim)


# products
def wide_matmul(x: Array, weight: Array) -> Array:
    """x [..., I] @ weight [I, J] with a float32 weight, in float32 (float64 stays); for few columns, such as gates."""
    wide = working_dtype(x)
    return jnp.matmul(x.astype(wide), weight.astype(wide))


def matmul(a: Array, b: Array, *, accumulate: Any = None, precision: str = "default") -> Array:
    """a @ b. `accumulate` is the dtype that products are summed in and returned (None: the operands'); bfloat16 operands of a
    float32 product are exact. precision="highest" forbids TF32 and bfloat16 passes for float32 operands."""
    _same_dtype(a, b)
    return jnp.matmul(a, b, precision=_precision(precision), preferred_element_type=accumulate or a.dtype)


def einsum(equation: str, *arrays: Array, accumulate: Any = None, precision: str = "default") -> Array:
    """As numpy's einsum; `accumulate` and `precision` as in `matmul`."""
    _same_dtype(*arrays)
    return jnp.einsum(equation, *arrays, precision=_precision(precision), preferred_element_type=accumulate or arrays[0].dtype)


def _precision(precision: str) -> jax.lax.Precision:
    if precision not in ("highest", "default"):
        raise ValueError(f'precision is {precision!r}; it must be "highest" or "default".')
    return jax.lax.Precision.HIGHEST if precision == "highest" else jax.lax.Precision.DEFAULT


def dot_product_attention(q_BTHK: Array, k_BAHK: Array, v_BAHV: Array, *, visible: Array | None, scale: float) -> Array:
    """Softmax attention [B, T, H, V]; visible is bool [B, T, A], every row with a true entry; None is causal with A = T."""
    K, V = q_BTHK.shape[-1], v_BAHV.shape[-1]
    q, k, v = (pad(x, -1, 0, (K if K > V else V) - x.shape[-1]) for x in (q_BTHK, k_BAHK, v_BAHV))  # it wants K = V
    mask = None if visible is None else visible[:, None]
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=visible is None, scale=scale)[..., :V]


def inverse_unit_lower(x: Array) -> Array:
    """The inverse of unit lower triangles [..., C, C]; only what lies below the diagonal is read."""
    eye = jnp.broadcast_to(jnp.eye(x.shape[-1], dtype=x.dtype), x.shape)
    return jax.scipy.linalg.solve_triangular(x, eye, lower=True, unit_diagonal=True)


def solve(a: Array, b: Array) -> Array:
    """x with a x = b, for square matrices a [..., K, K] and vectors b [..., K], by elimination."""
    return jnp.linalg.solve(a, b[..., None])[..., 0]


def cholesky(x: Array) -> Array:
    """The lower triangles L with L L^T = x, for symmetric positive matrices [..., K, K]; NaN where x is not positive."""
    return jnp.linalg.cholesky(x)


def solve_lower(a: Array, b: Array) -> Array:
    """x with a x = b, for lower triangles a [..., K, K] and matrices b [..., K, X]."""
    return jax.scipy.linalg.solve_triangular(a, b, lower=True)


# control
def scan(step: Callable, carry: Any, xs: Any, *, reverse: bool = False) -> tuple[Any, Any]:
    """carry, y = step(carry, x) for each x along the first axis of xs (an array or a tuple of them); (carry, ys stacked).

    y is an array, a tuple of arrays or None. reverse runs from the last x to the first; ys keep the order of xs.
    """
    return jax.lax.scan(step, carry, xs, reverse=reverse)


def associative_scan(combine: Callable, xs: tuple[Array, ...], axis: int) -> tuple[Array, ...]:
    """The running combination along an axis: y_t = combine(y_{t-1}, x_t), in log2(T) passes. combine takes and returns tuples."""
    return jax.lax.associative_scan(combine, xs, axis=axis)


def while_loop(condition: Callable, body: Callable, carry: tuple) -> tuple:
    """carry = body(carry) while condition(carry), a scalar bool array, holds. The carry keeps its shapes and dtypes."""
    return jax.lax.while_loop(condition, body, carry)


def stop_gradient(x: Array) -> Array:
    return jax.lax.stop_gradient(x)


def rematerialise(function: Callable) -> Callable:
    """The function, its intermediate values computed again in the backward pass instead of kept."""
    return jax.checkpoint(function)


def custom_gradient(forward: Callable, backward: Callable, outputs: int, saved: int) -> Callable:
    """See `kernels.arrays.custom_gradient`."""

    def call(*arrays: Array | None, **static: Any) -> tuple[Array, ...]:
        return _with_gradient(forward, backward, saved, tuple(sorted(static.items())))(*arrays)

    return call


@functools.lru_cache(maxsize=256)
def _with_gradient(forward: Callable, backward: Callable, saved: int, static: tuple) -> Callable:
    options = dict(static)

    @jax.custom_vjp
    def function(*arrays):
        return forward(*arrays, **options)[0]

    def keep(*arrays):
        results, residuals = forward(*arrays, **options)
        return results, (arrays, (*results[:saved], *residuals))

    def pull_back(kept, gradients):
        return tuple(backward(*kept, gradients, **options))

    function.defvjp(keep, pull_back)
    return function


declaration.make_all(name, custom_gradient)
