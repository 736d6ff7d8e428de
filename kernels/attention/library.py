"""Softmax attention by the framework's own: torch's scaled_dot_product_attention, JAX's dot_product_attention.

Shapes: B batch, T time, A all that can be seen, H heads, K key size, V value size.
"""

from typing import Any

from kernels import arrays
from kernels.attention.cache import Seen

Array = Any  # torch.Tensor or jax.Array


def attend(q_BTHK: Array, seen: Seen, *, window: int | None, scale: float) -> Array:
    """o [B, T, H, V] for queries over what they see."""
    ops = arrays.of(q_BTHK)
    return ops.dot_product_attention(q_BTHK, seen.k_BAHK, seen.v_BAHV, visible=seen.visible_BTA, scale=scale)
