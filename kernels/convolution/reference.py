"""The convolution token by token, and its one-token step.

Shapes: B batch, T time, D channels, W window, H heads.
"""

from typing import Any

from kernels import arrays, segmentation
from kernels.convolution.chunked import State, activate, fresh

Array = Any  # torch.Tensor or jax.Array


def step(
    x_BD: Array, weight_WD: Array, bias_D: Array | None = None, *, silu: bool = False, heads: int | None = None,
    state: State | None = None, segment_B: Array | None = None,
) -> tuple[Array, State]:  # fmt: skip
    """One token: y [B, D] and the state after it. Arguments as `short_convolution`'s without the time axis."""
    ops = arrays.of(x_BD)
    state = fresh(x_BD[:, None], len(weight_WD)) if state is None else state
    reset_B, padding_B, segment_B = segmentation.one(segment_B, state.segment_B)
    before = ops.where(reset_B[:, None, None], 0.0, state.inputs_BWD)
    window = ops.concatenate((before, ops.cast(x_BD, before.dtype)[:, None]), 1)
    wide = ops.working_dtype(x_BD)
    y = ops.sum(ops.cast(window, wide) * ops.cast(weight_WD, wide), 1)
    y = activate(y if bias_D is None else y + ops.cast(bias_D, wide), silu, heads)
    after = ops.where(padding_B[:, None, None], state.inputs_BWD, window[:, 1:])
    return ops.cast(ops.where(padding_B[:, None], 0.0, y), x_BD.dtype), State(after, segment_B)


def short_convolution(x_BTD, weight_WD, bias_D=None, *, silu=False, heads=None, state=None, segments=None) -> tuple[Array, State]:
    """See `kernels.convolution.short_convolution`."""
    ops = arrays.of(x_BTD)
    given = () if segments is None else (segments,)

    def token(state, xs):
        x, *segment = xs
        y, state = step(x, weight_WD, bias_D, silu=silu, heads=heads, state=state, segment_B=segment[0] if segment else None)
        return state, y

    start = fresh(x_BTD, len(weight_WD)) if state is None else state
    state, y_TBD = ops.scan(token, start, tuple(ops.moveaxis(y, 1, 0) for y in (x_BTD, *given)))
    return ops.moveaxis(y_TBD, 0, 1), state
