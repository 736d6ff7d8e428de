"""Palimpsa token by token: the recurrence itself, and its one-token step.

Shapes: B batch, T time, H heads, K key size, V value size.
"""

from typing import Any, NamedTuple

from kernels import arrays, segmentation

Array = Any  # torch.Tensor or jax.Array


class State(NamedTuple):
    """M and J [B, H, K, V] in float32 (float64 for float64 inputs), and the id of their segment [B] (-1: none yet).

    prior + J is the importance of each entry, and M / (prior + J) the map that queries read. J is at least 0.
    """

    M_BHKV: Array
    J_BHKV: Array
    segment_B: Array


def fresh(q: Array, v: Array) -> State:
    """The state before the first token, for q [B, ..., H, K] and v [B, ..., H, V]."""
    ops = arrays.of(q)
    M, J = (ops.zeros((q.shape[0], *q.shape[-2:], v.shape[-1]), ops.working_dtype(q), q) for _ in range(2))
    return State(M, J, ops.full((q.shape[0],), -1, ops.int32, q))


def step(
    q_BHK: Array,
    k_BHK: Array,
    v_BHV: Array,
    beta_BHV: Array,
    log_decay_BH: Array,
    prior_H: Array,
    *,
    scale: float = 1.0,
    state: State | None = None,
    segment_B: Array | None = None,
) -> tuple[Array, State]:
    """One token in constant memory: o [B, H, V] and the state after it. Arguments as `palimpsa`'s without the time axis."""
    ops = arrays.of(q_BHK)
    state = fresh(q_BHK, v_BHV) if state is None else state
    q, k, v, beta, log_decay, prior = (ops.cast(x, state.M_BHKV.dtype) for x in (q_BHK, k_BHK, v_BHV, beta_BHV, log_decay_BH, prior_H))
    decay = ops.exp(log_decay)[..., None, None]

    reset_B, padding_B, segment_B = segmentation.one(segment_B, state.segment_B)
    each = lambda x_B: x_B[:, None, None, None]  # noqa: E731

    def next_of(S: Array, key: Array, value: Array) -> Array:
        kept = ops.where(each(reset_B), 0.0, decay * S)
        return ops.where(each(padding_B), S, kept + key[..., :, None] * value[..., None, :])

    M, J = next_of(state.M_BHKV, k, v), next_of(state.J_BHKV, k * k, beta)
    o = scale * ops.einsum("bhk,bhkv->bhv", q, M / (prior[:, None, None] + J), precision="highest")
    return ops.cast(ops.where(padding_B[:, None, None], 0.0, o), v_BHV.dtype), State(M, J, segment_B)


def palimpsa(q, k, v, beta, log_decay, prior, *, scale=1.0, state=None, segments=None) -> tuple[Array, State]:
    """See `kernels.palimpsa.palimpsa`."""
    ops = arrays.of(q)
    given = () if segments is None else (segments,)

    def token(state, xs):
        *xs, segment_B = xs if given else (*xs, None)
        o, state = step(*xs, prior, scale=scale, state=state, segment_B=segment_B)
        return state, o

    by_time = tuple(ops.moveaxis(x, 1, 0) for x in (q, k, v, beta, log_decay, *given))
    state, o_TBHV = ops.scan(token, fresh(q, v) if state is None else state, by_time)
    return ops.moveaxis(o_TBHV, 0, 1), state
