"""Softmax attention by the framework's own: torch's scaled_dot_product_attention (FlexAttention for windows and documents on a GPU), JAX's
dot_product_attention.

Shapes: B batch, T time, A all that can be seen, H heads, K key size, V value size.
"""

from typing import Any

from kernels import arrays
from kernels.attention.cache import Seen, mask

Array = Any  # torch.Tensor or jax.Array


def attend(q_BTHK: Array, seen: Seen, *, window: int | None, scale: float) -> Array:
    """o [B, T, H, V] for queries over what they see."""
    ops = arrays.of(q_BTHK)
    if seen.rule is not None and _flexible(q_BTHK, seen):
        from kernels.attention import flexible

        return flexible.attend(q_BTHK, seen.k_BAHK, seen.v_BAHV, seen.rule, window=window, scale=scale)
    visible = None if seen.rule is None else mask(seen.rule, window)
    return ops.dot_product_attention(q_BTHK, seen.k_BAHK, seen.v_BAHV, visible=visible, scale=scale)


def _flexible(q_BTHK: Array, seen: Seen) -> bool:
    """Whether FlexAttention takes these: queries over their own keys, in torch on a GPU."""
    ops = arrays.of(q_BTHK)
    B, T, H, K = q_BTHK.shape
    ours = ops.name == "torch" and ops.device(q_BTHK) == "cuda" and ops.dtype_name(q_BTHK) in ("bfloat16", "float32")
    return ours and seen.k_BAHK.shape[1] == T and K >= 16
