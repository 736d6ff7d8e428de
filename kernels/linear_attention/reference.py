"""Linear attention token by token: the recurrence itself, and its one-token step.

Shapes: B batch, T time, H heads, K key size, V value size.
"""

from typing import Any, NamedTuple

from kernels import arrays, segmentation

Array = Any  # torch.Tensor or jax.Array


class State(NamedTuple):
    """S [B, H, K, V] in float32 (float64 for float64 inputs), and the id of its segment [B] (-1: none yet)."""

    S_BHKV: Array
    segment_B: Array


def fresh(q: Array, v: Array) -> State:
    """The state before the first token, for q [B, ..., H, K] and v [B, ..., H, V]."""
    ops = arrays.of(q)
    S = ops.zeros((q.shape[0], *q.shape[-2:], v.shape[-1]), ops.working_dtype(q), q)
    return State(S, ops.full((q.shape[0],), -1, ops.int32, q))


def step(
    q_BHK: Array,
    k_BHK: Array,
    v_BHV: Array,
    log_decay_BH: Array,
    beta_BH: Array | None = None,
    *,
    sign: Array | None = None,
    scale: float = 1.0,
    state: State | None = None,
    segment_B: Array | None = None,
) -> tuple[Array, State]:
    """One token in constant memory: o [B, H, V] and the state after it. Arguments as `linear_attention`'s without the time axis."""
    ops = arrays.of(q_BHK)
    state = fresh(q_BHK, v_BHV) if state is None else state
    q, k, v, gate = (ops.cast(x, state.S_BHKV.dtype) for x in (q_BHK, k_BHK, v_BHV, log_decay_BH))
    v = v if beta_BH is None else v * ops.cast(beta_BH, v.dtype)[..., None]
    decay = ops.exp(gate) if sign is None else ops.exp(gate) * ops.cast(sign, gate.dtype)

    reset_B, padding_B, segment_B = segmentation.one(segment_B, state.segment_B)
    each = lambda x_B: x_B[:, None, None, None]  # noqa: E731
    kept = ops.where(each(reset_B), 0.0, decay[..., None, None] * state.S_BHKV)
    S = ops.where(each(padding_B), state.S_BHKV, kept + k[..., :, None] * v[..., None, :])
    o = ops.where(padding_B[:, None, None], 0.0, scale * ops.einsum("bhk,bhkv->bhv", q, S, precision="highest"))
    return ops.cast(o, v_BHV.dtype), State(S, segment_B)


def linear_attention(q, k, v, log_decay, beta=None, *, sign=None, scale=1.0, state=None, segments=None) -> tuple[Array, State]:
    """See `kernels.linear_attention.linear_attention`."""
    ops = arrays.of(q)
    given = {"beta_BH": beta, "sign": sign, "segment_B": segments}
    given = {name: x for name, x in given.items() if x is not None}

    def token(state, xs):
        q, k, v, log_decay, *rest = xs
        o, state = step(q, k, v, log_decay, **dict(zip(given, rest, strict=True)), scale=scale, state=state)
        return state, o

    by_time = tuple(ops.moveaxis(x, 1, 0) for x in (q, k, v, log_decay, *given.values()))
    state, o_TBHV = ops.scan(token, fresh(q, v) if state is None else state, by_time)
    return ops.moveaxis(o_TBHV, 0, 1), state
