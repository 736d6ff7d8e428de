"""The recurrence token by token, and its one-token step.

Shapes: B batch, T time, D channels.
"""

from typing import Any, NamedTuple

from kernels import arrays, segmentation

Array = Any  # torch.Tensor or jax.Array


class State(NamedTuple):
    """h [B, D] in float32 (float64 for float64 inputs), and the id of its segment [B] (-1: none yet)."""

    h_BD: Array
    segment_B: Array


def fresh(x: Array) -> State:
    """The state before the first token, for x [B, ..., D]."""
    ops = arrays.of(x)
    h = ops.zeros((x.shape[0], x.shape[-1]), ops.working_dtype(x), x)
    return State(h, ops.full((x.shape[0],), -1, ops.int32, x))


def step(x_BD: Array, log_a_BD: Array, *, state: State | None = None, segment_B: Array | None = None) -> tuple[Array, State]:
    """One token: h [B, D] and the state after it. Arguments as `rg_lru`'s without the time axis."""
    ops = arrays.of(x_BD)
    state = fresh(x_BD) if state is None else state
    x, log_a = (ops.cast(y, state.h_BD.dtype) for y in (x_BD, log_a_BD))
    reset_B, padding_B, segment_B = segmentation.one(segment_B, state.segment_B)
    h = ops.where(reset_B[:, None], 0.0, ops.exp(log_a) * state.h_BD) + x
    out = ops.where(padding_B[:, None], 0.0, h)
    return ops.cast(out, x_BD.dtype), State(ops.where(padding_B[:, None], state.h_BD, h), segment_B)


def rg_lru(x, log_a, *, state=None, segments=None) -> tuple[Array, State]:
    """See `kernels.rg_lru.rg_lru`."""
    ops = arrays.of(x)
    given = () if segments is None else (segments,)

    def token(state, xs):
        x, log_a, *segment = xs
        out, state = step(x, log_a, state=state, segment_B=segment[0] if segment else None)
        return state, out

    by_time = tuple(ops.moveaxis(y, 1, 0) for y in (x, log_a, *given))
    state, h_TBD = ops.scan(token, fresh(x) if state is None else state, by_time)
    return ops.moveaxis(h_TBD, 0, 1), state
