"""The mLSTM cell token by token, stabilised as its paper does, and its one-token step.

Shapes: B batch, T time, H heads, K key size, V value size.
"""

from typing import Any, NamedTuple

from kernels import arrays, segmentation

Array = Any  # torch.Tensor or jax.Array
NOTHING = -1e30  # m where nothing has been written: below any gate, and finite


class State(NamedTuple):
    """C [B, H, K, V] and n [B, H, K], both divided by exp(m [B, H]), in float32 (float64 for float64 inputs); their segment's id [B]."""

    C_BHKV: Array
    n_BHK: Array
    m_BH: Array
    segment_B: Array


def fresh(q: Array, v: Array) -> State:
    """The state before the first token, for q [B, ..., H, K] and v [B, ..., H, V]."""
    ops, dtype = arrays.of(q), arrays.of(q).working_dtype(q)
    B, H, K = q.shape[0], *q.shape[-2:]
    C, n = ops.zeros((B, H, K, v.shape[-1]), dtype, q), ops.zeros((B, H, K), dtype, q)
    return State(C, n, ops.full((B, H), NOTHING, dtype, q), ops.full((B,), -1, ops.int32, q))


def normalised(read: Array, weight: Array, m: Array) -> Array:
    """C^T q / max(|n . q|, 1) from both as divided by exp(m): read [..., V], weight = n . q and m [...]."""
    ops = arrays.of(read)
    return read / ops.maximum(ops.absolute(weight), ops.exp(-m))[..., None]


def step(
    q_BHK: Array,
    k_BHK: Array,
    v_BHV: Array,
    log_input_BH: Array,
    log_decay_BH: Array,
    *,
    state: State | None = None,
    segment_B: Array | None = None,
) -> tuple[Array, State]:
    """One token in constant memory: o [B, H, V] and the state after it. Arguments as `mlstm`'s without the time axis."""
    ops = arrays.of(q_BHK)
    state = fresh(q_BHK, v_BHV) if state is None else state
    q, k, v, log_input, log_decay = (ops.cast(x, state.C_BHKV.dtype) for x in (q_BHK, k_BHK, v_BHV, log_input_BH, log_decay_BH))
    reset_B, padding_B, segment_B = segmentation.one(segment_B, state.segment_B)
    padding, log_decay = padding_B[:, None], ops.where(reset_B[:, None], -float("inf"), log_decay)

    m_before = ops.stop_gradient(state.m_BH)
    m = ops.maximum(ops.maximum(ops.stop_gradient(log_decay) + m_before, ops.stop_gradient(log_input)), NOTHING)
    keep, write = ops.exp(log_decay + m_before - m), ops.exp(log_input - m)
    C = keep[..., None, None] * state.C_BHKV + (write[..., None] * k)[..., :, None] * v[..., None, :]
    n = keep[..., None] * state.n_BHK + write[..., None] * k
    o = normalised(ops.einsum("bhk,bhkv->bhv", q, C, precision="highest"), ops.einsum("bhk,bhk->bh", q, n, precision="highest"), m)

    o = ops.where(padding[..., None], 0.0, o)
    C, n = ops.where(padding[..., None, None], state.C_BHKV, C), ops.where(padding[..., None], state.n_BHK, n)
    return ops.cast(o, v_BHV.dtype), State(C, n, ops.where(padding, m_before, m), segment_B)


def mlstm(q, k, v, log_input, log_decay, *, state=None, segments=None) -> tuple[Array, State]:
    """See `kernels.mlstm.mlstm`."""
    ops = arrays.of(q)
    given = () if segments is None else (segments,)

    def token(state, xs):
        *xs, segment_B = xs if given else (*xs, None)
        o, state = step(*xs, state=state, segment_B=segment_B)
        return state, o

    by_time = tuple(ops.moveaxis(x, 1, 0) for x in (q, k, v, log_input, log_decay, *given))
    state, o_TBHV = ops.scan(token, fresh(q, v) if state is None else state, by_time)
    return ops.moveaxis(o_TBHV, 0, 1), state
