"""Softmax attention as it is defined, every product at the highest precision.

Shapes: B batch, T time, A all that can be seen, H heads, K key size, V value size.
"""

from typing import Any

from kernels import arrays
from kernels.attention.cache import Seen, mask

Array = Any  # torch.Tensor or jax.Array


def attend(q_BTHK: Array, seen: Seen, *, window: int | None, scale: float) -> Array:
    """o [B, T, H, V] for queries over what they see."""
    ops = arrays.of(q_BTHK)
    T, work = q_BTHK.shape[1], ops.working_dtype(q_BTHK)
    visible = ops.causal(T, q_BTHK)[None] if seen.rule is None else mask(seen.rule, window)
    q, k, v = (ops.cast(x, work) for x in (q_BTHK, seen.k_BAHK, seen.v_BAHV))
    scores_BHTA = scale * ops.einsum("bthk,bahk->bhta", q, k, precision="highest")
    weights_BHTA = ops.softmax(ops.where(visible[:, None], scores_BHTA, -float("inf")), -1)
    return ops.cast(ops.einsum("bhta,bahv->bthv", weights_BHTA, v, precision="highest"), seen.v_BAHV.dtype)
