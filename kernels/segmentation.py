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
    ids = ops.concatenate((last_B[:, None], segments_BT), 1)
    place = ops.where(ids >= 0, ops.arange(ids.shape[1], ids), 0)
    return ops.take_along(ids, ops.cummax(place, 1), 1)


def last(segments_BT: Array, last_B: Array) -> Array:
    """[B]: the id of the last token that was not padding."""
    return running(segments_BT, last_B)[:, -1]


def marks(segments_BT: Array, last_B: Array) -> tuple[Array, Array, Array]:
    """(reset_BT, padding_BT, last_B): where the state is dropped before a token, where there is no token, the id at the end."""
    before = running(segments_BT, last_B)
    padding = segments_BT < 0
    previous = before[:, :-1]
    return ~padding & (previous >= 0) & (segments_BT != previous), padding, before[:, -1]
