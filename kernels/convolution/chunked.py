"""The short convolution in array operations.

Shapes: B batch, T time, D channels, W window, H heads.
"""

from typing import Any, NamedTuple

from kernels import arrays, segmentation

Array = Any  # torch.Tensor or jax.Array
EPSILON = 1e-6
"""Of the norm of a head."""


class State(NamedTuple):
    """The last W - 1 inputs of the current segment, zero where there are fewer, and that segment's id (-1: none yet)."""

    inputs_BWD: Array
    segment_B: Array


def fresh(x_BTD: Array, W: int) -> State:
    """The state before the first token."""
    ops = arrays.of(x_BTD)
    B, _, D = x_BTD.shape
    return State(ops.zeros((B, W - 1, D), x_BTD.dtype, x_BTD), ops.full((B,), -1, ops.int32, x_BTD))


def short_convolution(x_BTD, weight_WD, bias_D=None, *, silu=False, heads=None, state=None, segments=None) -> tuple[Array, State]:
    """See `kernels.convolution.short_convolution`."""
    ops = arrays.of(x_BTD)
    y, state = _convolve(x_BTD, weight_WD, bias_D, fresh(x_BTD, len(weight_WD)) if state is None else state, segments)
    return ops.cast(activate(y, silu, heads), x_BTD.dtype), state


def activate(y: Array, silu: bool, heads: int | None) -> Array:
    """What follows the sum over the window."""
    ops = arrays.of(y)
    y = ops.silu(y) if silu else y
    return y if heads is None else ops.l2_normalise(y.reshape(*y.shape[:-1], heads, -1), eps=EPSILON).reshape(y.shape)


def state_after(x_BTD: Array, W: int, state: State | None) -> State:
    """The state after tokens that continue its segment."""
    ops = arrays.of(x_BTD)
    state = fresh(x_BTD, W) if state is None else state
    T = x_BTD.shape[1]
    if T < W - 1:
        x_BTD = ops.concatenate((ops.cast(state.inputs_BWD, x_BTD.dtype), x_BTD), 1)
    return State(x_BTD[:, x_BTD.shape[1] - (W - 1) :], segmentation.unsegmented(state.segment_B))


def _convolve(x_BTD: Array, weight_WD: Array, bias_D: Array | None, state: State, segments: Array | None) -> tuple[Array, State]:
    ops = arrays.of(x_BTD)
    B, T, _ = x_BTD.shape
    W = weight_WD.shape[0]
    if segments is None:
        seen = ops.concatenate((ops.cast(state.inputs_BWD, x_BTD.dtype), x_BTD), 1)
        y = _window_sum(ops, [seen[:, j : j + T] for j in range(W)], weight_WD, bias_D)
        return y, state_after(x_BTD, W, state)

    # Padding out of the way: real tokens to the front, in order; back to their places at the end.
    real_BT = segments >= 0
    last_B = segmentation.last(segments, state.segment_B)
    rank_BT = ops.cumsum(ops.cast(real_BT, ops.int32), 1)  # how many real tokens up to and including t
    order_BT = ops.cast(ops.argsort(ops.cast(~real_BT, ops.int32)), ops.int32)
    x = ops.take_along(x_BTD, order_BT[..., None], 1)
    ids = ops.take_along(segments, order_BT, 1)
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
    return y, State(inputs, last_B)


def _window_sum(ops: Any, windows: list[Array], weight_WD: Array, bias_D: Array | None) -> Array:
    """In float32 (float64 stays)."""
    wide = ops.working_dtype(windows[0])
    y = sum(ops.cast(x, wide) * ops.cast(w, wide) for x, w in zip(windows, weight_WD, strict=True))
    return y if bias_D is None else y + ops.cast(bias_D, wide)
