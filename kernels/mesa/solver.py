"""Conjugate gradients for many small systems at once, each stopping by itself.

Shapes: K the size of a system; [..., K], one system for each leading index.
"""

from collections.abc import Callable
from typing import Any

from kernels import arrays

Array = Any  # torch.Tensor or jax.Array


def conjugate_gradients(
    apply: Callable[[Array], Array],
    rhs: Array,
    diagonal: Array,
    *,
    steps: int,
    eps: float,
    criterion: str,
    start: str,
    unrolled: bool = False,
) -> tuple[Array, Array]:
    """x with A x = rhs, and the steps that each system took, int32 [...]. `apply` is x -> A x, `diagonal` is that of A.

    Conjugate gradients (MesaNet, Algorithm 1). Right-hand sides are scaled to unit norm and the solution back, so that nothing depends on
    their size. A system is frozen (x kept) once ||r|| <= eps min(||r0||, ||rhs||) (criterion "b") or eps ||r0|| ("r0"), once ||r|| is
    below the dtype's epsilon times ||rhs||, when p'Ap <= 0, or when its right-hand side is 0. The loop ends when all are frozen; unrolled,
    it runs through all `steps`, so that frameworks can differentiate it.
    """
    x, taken = iterate(apply, rhs, diagonal, steps=steps, eps=eps, criterion=criterion, start=start, unrolled=unrolled)
    return x, taken[..., 0]


def iterate(apply, rhs, diagonal, *, steps, eps, criterion, start, unrolled=False, axis: int = -1) -> tuple[Array, Array]:
    """`conjugate_gradients` that keeps every array's axes, as a kernel needs it: the steps are [..., 1]. axis: that of a system's K numbers.

    A system is frozen from when the square of its residual is carried as 0.
    """
    ops = arrays.of(rhs)
    unit, size = _unit(rhs, ops, axis)
    x = jacobi(unit, diagonal) if start == "jacobi" else unit * 0.0
    r = unit - apply(x)
    rr = _square(r, ops, axis)
    first = ops.sqrt(ops.stop_gradient(rr))
    limit = ops.maximum(eps * (ops.minimum(first, 1.0) if criterion == "b" else first), ops.epsilon(r)) ** 2

    def going(carry):
        rr, count = carry[3], carry[-1]
        return (count < steps) & ops.any(rr > limit)

    def advance_all(carry):
        x, r, p, rr, taken, count = carry
        Ap = apply(p)
        curvature = ops.sum(p * Ap, axis, keepdims=True)
        moves = (rr > limit) & (curvature > 0)
        alpha = ops.where(moves, rr / ops.where(moves, curvature, 1.0), 0.0)
        x, r = x + alpha * p, r - alpha * Ap
        new = _square(r, ops, axis)
        active = moves & (new > limit)
        turn = ops.where(active, new / ops.where(active, rr, 1.0), 0.0)
        return x, r, r + turn * p, ops.where(active, new, 0.0), taken + ops.cast(moves, ops.int32), count + 1

    carry = (x, r, r, ops.where(size > 0, rr, 0.0), ops.zeros(rr.shape, ops.int32, rhs), 0)
    if unrolled:
        carry, _ = ops.scan(lambda carry, _: (advance_all(carry), None), carry, ops.arange(steps, rhs))
    else:
        carry = ops.while_loop(going, advance_all, carry)
    return carry[0] * size, carry[4]


def _square(x: Array, ops: Any, axis: int) -> Array:
    return ops.sum(x * x, axis, keepdims=True)


def jacobi(rhs: Array, diagonal: Array) -> Array:
    """rhs / diagonal, and 0 where the diagonal is not positive (a negative decay can make it so)."""
    ops = arrays.of(rhs)
    positive = diagonal > 0
    return ops.where(positive, rhs / ops.where(positive, diagonal, 1.0), 0.0)


def relative_residual(rhs: Array, left: Array, *, axis: int = -1, keepdims: bool = False) -> Array:
    """||left|| / ||rhs|| over an axis in float32, for left = rhs - A x; 0 where rhs is 0."""
    ops = arrays.of(rhs)
    _, size = _unit(rhs, ops, axis)
    left = ops.where(size > 0, left / ops.where(size > 0, size, 1.0), 0.0)
    return ops.cast(ops.sqrt(ops.sum(left * left, axis, keepdims=keepdims)), ops.float32)


def _unit(x: Array, ops: Any, axis: int) -> tuple[Array, Array]:
    """x / ||x|| and ||x|| [..., 1] over an axis, without squaring anything tiny or huge; 0 and 0 for x = 0.

    ||x|| is a constant to gradients: who divides by it and multiplies again has the right one.
    """
    largest = ops.stop_gradient(ops.max(ops.absolute(x), axis, keepdims=True))
    scaled = x / ops.where(largest > 0, largest, 1.0)
    norm = ops.sqrt(ops.stop_gradient(ops.sum(scaled * scaled, axis, keepdims=True)))
    return scaled / ops.where(norm > 0, norm, 1.0), largest * norm
