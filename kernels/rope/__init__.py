"""Rotary position embedding on all key dimensions (Su et al. 2021, arXiv 2104.09864, Eq. 34); the first half of them pairs with the second.

    a' = a cos - b sin        b' = b cos + a sin        over the pairs (a, b), by the angle position * base^(-i / (K / 2)) of pair i

Shapes: B batch, T time, H heads, K key size, F = K / 2 pairs.
"""

from typing import Any

import kernels
from kernels import arrays, launch, shapes

Array = Any  # torch.Tensor or jax.Array


def _library(x_BTHK: Array, positions: Array, *, base: float) -> Array:
    return arrays.of(x_BTHK).rope(x_BTHK, positions, base=base)


def _triton(*arguments: Any, **options: Any) -> Array:
    from kernels.rope import triton  # here: importing kernels loads no framework; a statement: torch.compile can trace it

    return triton.rope(*arguments, **options)


IMPLEMENTATIONS = {"library": _library, "triton": _triton}
kernels.offer("rope", {"library": None, "triton": launch.refusal})


def rope(x_BTHK: Array, positions: Array, *, base: float = 10000.0, backend: str | None = None) -> Array:
    """x with its positions in it, in x's dtype: queries or keys.

    x: bfloat16, float32 or float64, K even. positions: int32, [T] or [B, T]. Angles, their cosines and sines are float32. x is differentiable.
    Raises ValueError for shapes that disagree and for a backend that does not exist.
    """
    sizes = shapes.check("rope", x=(x_BTHK, "BTHK"), positions=(positions, "T" if positions.ndim == 1 else "BT"))
    ops = arrays.of(x_BTHK)
    if ops.name == "jax":  # XLA makes it part of what is around it
        return _library(x_BTHK, positions, base=base)
    name = kernels.choose("rope", sizes, ops.dtype_name(x_BTHK), ops.device(x_BTHK), backend)
    return IMPLEMENTATIONS[name](x_BTHK, positions, base=base)
