"""Operations composed of the small ones, written once for both frameworks.

Shapes: B batch, T time, D channels, H heads, K key size, V vocabulary.
"""

import math
from typing import Any

from kernels import arrays

Array = Any  # torch.Tensor or jax.Array


def rms_norm(x: Array, weight: Array, *, eps: float = 1e-6) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, computed in float32, in x's dtype. weight [.., D] broadcasts."""
    ops = arrays.of(x)
    x32 = ops.cast(x, ops.working_dtype(x))
    scale = ops.rsqrt(ops.mean(x32 * x32, -1, keepdims=True) + eps)
    return ops.cast(x32 * scale * ops.cast(weight, x32.dtype), x.dtype)


def rotation(positions: Array, half: int, base: float) -> tuple[Array, Array]:
    """cos and sin, float32 [..., half], of RoPE's angles at integer positions [...]."""
    ops = arrays.of(positions)
    frequency = ops.exp(ops.cast(ops.arange(half, positions), ops.float32) * (-math.log(base) / half))
    angle = ops.cast(positions, ops.float32)[..., None] * frequency
    return ops.cos(angle), ops.sin(angle)


def l2_normalise(x: Array, *, eps: float = 1e-6) -> Array:
    """x / sqrt(sum(x^2) + eps^2) over the last axis, computed in float32, in x's dtype."""
    ops = arrays.of(x)
    x32 = ops.cast(x, ops.working_dtype(x))
    return ops.cast(x32 * ops.rsqrt(ops.sum(x32 * x32, -1, keepdims=True) + eps * eps), x.dtype)


def rope(x_BTHK: Array, positions: Array, *, base: float = 10000.0, fraction: float = 1.0) -> Array:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864, Eq. 34) on the first `fraction` of the key dimensions.

    The first half of the rotated dimensions pairs with the second half. positions is integer, [T] or [B, T]. Angles are float32.
    """
    ops = arrays.of(x_BTHK)
    rotated = int(x_BTHK.shape[-1] * fraction) // 2 * 2
    half = rotated // 2
    cos, sin = (ops.cast(table_TF[..., None, :], x_BTHK.dtype) for table_TF in ops.rotation(positions, half, base))
    a, b, rest = x_BTHK[..., :half], x_BTHK[..., half:rotated], x_BTHK[..., rotated:]
    return ops.concatenate((a * cos - b * sin, b * cos + a * sin, rest), -1)


def softmax_cross_entropy(logits: Array, targets: Array) -> Array:
    """-log softmax(logits)[target], float32: logits [..., V], integer targets [...]."""
    ops = arrays.of(logits)
    logits = ops.cast(logits, ops.working_dtype(logits))
    return ops.logsumexp(logits, -1) - ops.take_along(logits, targets[..., None], -1)[..., 0]
