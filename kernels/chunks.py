"""Time cut into chunks, and the decay between the tokens of a chunk: what every chunked form of a gated recurrence starts with.

Shapes: B batch, T time, H heads, N chunks, C chunk length, M = N B H (chunk-major, so that a scan over N runs along the first axis).
"""

from typing import Any, NamedTuple

from kernels import arrays

Array = Any  # torch.Tensor or jax.Array


def length(T: int, K: int) -> int:
    """A chunk's length for T tokens of key size K: the work per token grows with C + K, so about K, and 64 at most."""
    return min(T, 64 if K > 32 else 32)


def split(x_BTH: Array, C: int, *, fill: float = 0) -> Array:
    """[B, T, H, ...] -> [M, C, ...], filled up at the end of time to whole chunks."""
    ops = arrays.of(x_BTH)
    B, T, H, *rest = x_BTH.shape
    N = -(-T // C)
    x = ops.pad(x_BTH, 1, 0, N * C - T, fill).reshape(B, N, C, H, *rest)
    return ops.transpose(x, (1, 0, 3, 2, *range(4, x.ndim))).reshape(N * B * H, C, *rest)


def join(x_MC: Array, B: int, T: int, H: int) -> Array:
    """[M, C, ...] -> [B, T, H, ...]: undoes `split`."""
    ops = arrays.of(x_MC)
    M, C, *rest = x_MC.shape
    x = ops.transpose(x_MC.reshape(M // (B * H), B, H, C, *rest), (1, 0, 3, 2, *range(4, 4 + len(rest))))
    return x.reshape(B, -1, H, *rest)[:, :T]


def log_decays(log_decay_MC: Array) -> tuple[Array, Array]:
    """(between_MCC, since_start_MC): the logarithms of `decay`'s, without signs; -inf above the diagonal.

    Each is the sum of its own log decays and never a difference of two sums: -inf stays exact, large decays blur nothing.
    """
    ops = arrays.of(log_decay_MC)
    C = log_decay_MC.shape[1]
    between = ops.cumsum(ops.where(ops.causal(C, log_decay_MC, strict=True), log_decay_MC[:, :, None], 0.0), 1)
    return ops.where(ops.causal(C, log_decay_MC), between, -float("inf")), ops.cumsum(log_decay_MC, 1)


def decay(log_decay_MC: Array, sign_MC: Array | None) -> tuple[Array, Array]:
    """(weight_MCC, since_start_MC): the decay from s to t, weight[t, s] = prod_{s < i <= t} sign_i exp(log_decay_i) for s <= t and 0
    above; and from the chunk's start to t."""
    ops = arrays.of(log_decay_MC)
    between, since_start = log_decays(log_decay_MC)
    weight, since_start = ops.exp(between), ops.exp(since_start)
    if sign_MC is not None:
        sign = ops.cumprod(sign_MC, 1)
        weight, since_start = weight * sign[:, :, None] * sign[:, None, :], since_start * sign
    return weight, since_start


class DecayGradients(NamedTuple):
    """d loss / d log of each decay that a chunk used: weight[t, s], since_start[t], from s to the chunk's end, over the whole chunk."""

    pairs_MCC: Array
    since_start_MC: Array
    to_end_MC: Array
    through_M: Array


def decay_gradient(g: DecayGradients) -> Array:
    """d loss / d log_decay [M, C]. Token i is in the decay from s to t when s < i <= t; only sums over what i is in: no cancellation."""
    ops = arrays.of(g.pairs_MCC)
    C = g.pairs_MCC.shape[1]
    up_to = ops.cumsum(g.pairs_MCC, 2)  # [t, j]: the pairs (t, s <= j)
    within = ops.sum(ops.where(ops.causal(C, up_to, strict=True), up_to, 0.0), 1)  # [j]: the pairs s <= j < t
    before = within + ops.cumsum(g.to_end_MC, 1)
    after = ops.flip(ops.cumsum(ops.flip(g.since_start_MC, 1), 1), 1)
    return ops.pad(before[:, :-1], 1, 1, 0) + after + g.through_M[:, None]
