"""Documents in a row of tokens, by the ids that `segments` [B, T] gives them.

The rules, the same for every operation: an id other than the one before resets the state at that token; -1 is padding: its output
is 0 and the state passes it unchanged; a state carries the id of its last segment, and -1 there (no id yet) goes on with any.
Without `segments`, tokens continue the state's segment.

Shapes: B batch, T time.
"""

from typing import Any

from kernels import arrays

Array = Any  # torch.Tensor or jax.Array


def unsegmented(last_B: Array) -> Array:
    """The id after tokens that had none: the state's own, 0 when it had none yet."""
    return arrays.of(last_B).maximum(last_B, 0)


def running(segments_BT: Array, last_B: Array) -> Array:
    """[B, T + 1]: before each token, and at the end, the id of the last token that was not padding (-1: none yet)."""
    ops = arrays.of(segments_BT)
    check(segments_BT, ops)
    ids = ops.concatenate((last_B[:, None], segments_BT), 1)
    place = ops.where(ids >= 0, ops.arange(ids.shape[1], ids), 0)
    return ops.take_along(ids, ops.cummax(place, 1), 1)


def check(segments: Array, ops: Any) -> None:
    """Document ids are int32: ValueError for others."""
    if segments.dtype != ops.int32:
        raise ValueError(f"segments is {ops.dtype_name(segments)}; document ids must be int32.")


def last(segments_BT: Array, last_B: Array) -> Array:
    """[B]: the id of the last token that was not padding."""
    return running(segments_BT, last_B)[:, -1]


def marks(segments_BT: Array, last_B: Array) -> tuple[Array, Array, Array]:
    """(reset_BT, padding_BT, last_B): where the state is dropped before a token, where there is no token, the id at the end."""
    before = running(segments_BT, last_B)
    padding = segments_BT < 0
    previous = before[:, :-1]
    return ~padding & (previous >= 0) & (segments_BT != previous), padding, before[:, -1]


def one(segment_B: Array | None, last_B: Array) -> tuple[Array, Array, Array]:
    """`marks` for a single token: (reset_B, padding_B, last_B)."""
    ops = arrays.of(last_B)
    if segment_B is None:
        never = last_B < -1
        return never, never, unsegmented(last_B)
    check(segment_B, ops)
    padding = segment_B < 0
    return ~padding & (last_B >= 0) & (segment_B != last_B), padding, ops.where(padding, last_B, segment_B)


def gates(
    log_decay_BTH: Array, beta_BTH: Array | None, sign_BTH: Array | None, segments_BT: Array | None, last_B: Array, dtype: Any
) -> tuple[Array, Array | None, Array | None, Array | None, Array]:
    """Gates that say by themselves what `segments` says: (log_decay, beta, sign, padding_BT1 or None, last_B).

    A reset is a log_decay of -inf; a padding token keeps the state (log_decay 0, sign 1) and writes nothing (beta 0).
    """
    ops = arrays.of(log_decay_BTH)
    log_decay_BTH = ops.cast(log_decay_BTH, dtype)
    beta_BTH = None if beta_BTH is None else ops.cast(beta_BTH, dtype)
    sign_BTH = None if sign_BTH is None else ops.cast(sign_BTH, dtype)
    if segments_BT is None:
        return log_decay_BTH, beta_BTH, sign_BTH, None, unsegmented(last_B)
    reset_BT, padding_BT, last_B = marks(segments_BT, last_B)
    reset, padding = reset_BT[..., None], padding_BT[..., None]
    log_decay_BTH = ops.where(reset, -float("inf"), ops.where(padding, 0.0, log_decay_BTH))
    beta_BTH = ops.ones(log_decay_BTH.shape, dtype, log_decay_BTH) if beta_BTH is None else beta_BTH
    beta_BTH = ops.where(padding, 0.0, beta_BTH)
    sign_BTH = None if sign_BTH is None else ops.where(padding, 1.0, sign_BTH)
    return log_decay_BTH, beta_BTH, sign_BTH, padding, last_B
