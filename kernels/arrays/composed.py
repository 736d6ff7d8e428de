"""Operations composed of the small ones, written once for both frameworks.

Shapes: B batch, T time, D channels, H heads, K key size, W convolution window, V vocabulary.
"""

import math
from typing import Any, NamedTuple

from kernels import arrays, segmentation

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


class ConvolutionState(NamedTuple):
    """The last W - 1 inputs of the current segment, zero where there are fewer, and that segment's id (-1: none yet)."""

    inputs_BWD: Array
    segment_B: Array


def short_convolution(
    x_BTD: Array, weight_WD: Array, bias_D: Array | None = None, *, state: ConvolutionState | None = None, segments: Array | None = None
) -> tuple[Array, ConvolutionState]:
    """Causal depthwise convolution, y_t = bias + sum_j weight_j x_{t-W+1+j} within the segment of t; the last weight meets x_t.

    segments: int32 [B, T] ids; -1 is padding: such tokens are skipped, their output is 0 and they leave the state as it was.
    Returns y [B, T, D] in x's dtype and the state to go on from. A token by itself is x [B, 1, D].
    """
    ops = arrays.of(x_BTD)
    B, T, D = x_BTD.shape
    W = weight_WD.shape[0]
    if state is None:
        state = ConvolutionState(ops.zeros((B, W - 1, D), x_BTD.dtype, x_BTD), ops.full((B,), -1, ops.int32, x_BTD))

    if segments is None:
        seen = ops.concatenate((ops.cast(state.inputs_BWD, x_BTD.dtype), x_BTD), 1)
        y = _window_sum(ops, [seen[:, j : j + T] for j in range(W)], weight_WD, bias_D)
        return y, ConvolutionState(seen[:, T:], segmentation.unsegmented(state.segment_B))

    # Padding out of the way: real tokens to the front, in order; back to their places at the end.
    real_BT = segments >= 0
    rank_BT = ops.cumsum(ops.cast(real_BT, ops.int32), 1)  # how many real tokens up to and including t
    order_BT = ops.cast(ops.argsort(ops.cast(~real_BT, ops.int32)), ops.int32)
    x = ops.take_along(x_BTD, order_BT[..., None], 1)
    ids = ops.take_along(segments, order_BT, 1)
    last_B = segmentation.last(segments, state.segment_B)
    first_B = ops.where(state.segment_B >= 0, state.segment_B, ids[:, 0])  # a state without an id goes on with any
    seen_ids = ops.concatenate((ops.broadcast_to(first_B[:, None], (B, W - 1)), ids), 1)
    seen = ops.concatenate((ops.cast(state.inputs_BWD, x.dtype), x), 1)
    same = [(seen_ids[:, j : j + T] == ids)[..., None] for j in range(W)]
    y = _window_sum(ops, [ops.where(same[j], seen[:, j : j + T], 0.0) for j in range(W)], weight_WD, bias_D)
    y = ops.take_along(y, ops.maximum(rank_BT - 1, 0)[..., None], 1)
    y = ops.where(real_BT[..., None], y, 0.0)

    tail = rank_BT[:, -1:] + ops.arange(W - 1, x)[None]  # the last W - 1 of `seen` that are real
    inputs = ops.take_along(seen, tail[..., None], 1)
    inputs = ops.where((ops.take_along(seen_ids, tail, 1) == last_B[:, None])[..., None], inputs, 0.0)
    return y, ConvolutionState(inputs, last_B)


def _window_sum(ops: Any, windows: list[Array], weight_WD: Array, bias_D: Array | None) -> Array:
    y = sum(x * ops.cast(w, x.dtype) for x, w in zip(windows, weight_WD, strict=True))
    return y if bias_D is None else y + ops.cast(bias_D, y.dtype)
