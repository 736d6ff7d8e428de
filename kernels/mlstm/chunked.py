"""mLSTM in chunks: linear attention of the values [v | 1] whose weights hold the gates and the running maximum m.

With L the log decay inside a chunk, l from its start and m_0 the maximum there, token t has m_t = max(l_t + m_0, max_s L_ts + log_input_s)
and weighs token s by exp(L_ts + log_input_s - m_t), the starting state by exp(l_t + m_0 - m_t): at most 1 each, at the scale of m_t. The
last column read is n . q. With those weights everything is `kernels.linear_attention.chunked`; m is a constant to the gradient.

Shapes: B batch, T time, H heads, K key size, V value size, C chunk length, M = chunks x B x H, X = V + 1.
"""

from collections.abc import Callable
from typing import Any

from kernels import arrays, chunks, segmentation
from kernels.linear_attention import chunked as linear
from kernels.linear_attention.chunked import Chunks
from kernels.mlstm.reference import NOTHING, State, fresh, normalised

Array = Any  # torch.Tensor or jax.Array


def mlstm(
    q, k, v, log_input, log_decay, *, state=None, segments=None, chunk: int | None = None, run: Callable | None = None
) -> tuple[Array, State]:
    """See `kernels.mlstm.mlstm`; `chunk` is the chunk's length, `run` another `in_arrays`: a device's kernels."""
    ops = arrays.of(q)
    state = fresh(q, v) if state is None else state
    dtype = state.C_BHKV.dtype
    log_decay, _, _, padding, last_B = segmentation.gates(log_decay, None, None, segments, state.segment_B, dtype)
    log_input = ops.cast(log_input, dtype)
    log_input = log_input if padding is None else ops.where(padding, -float("inf"), log_input)
    C = chunk or chunks.length(q.shape[1], q.shape[-1])
    start = state.C_BHKV, state.n_BHK, ops.stop_gradient(state.m_BH)
    o, C_BHKV, n_BHK, m_BH = (run or in_arrays)(q, k, v, log_input, log_decay, *start, chunk=C)
    o = o if padding is None else ops.where(padding[..., None], 0.0, o)
    return ops.cast(o, v.dtype), State(C_BHKV, n_BHK, ops.stop_gradient(m_BH), last_B)


def in_arrays(q, k, v, log_input, log_decay, C_BHKV, n_BHK, m_BH, *, chunk) -> tuple[Array, Array, Array, Array]:
    """(o, and C, n and m after the last token)"""
    ops, V = arrays.of(q), v.shape[-1]
    S_BHKX = ops.concatenate((C_BHKV, n_BHK[..., None]), -1)
    read, S_BHKX, m_BTH = differentiable(q, k, v, log_input, log_decay, S_BHKX, m_BH, chunk=chunk)
    m_BTH = ops.stop_gradient(m_BTH)
    return normalised(read[..., :V], read[..., V], m_BTH), S_BHKX[..., :V], S_BHKX[..., V], m_BTH[:, -1]


def forward(q, k, v, log_input, log_decay, S_BHKX, m_BH, *, chunk):
    ops, dtype = arrays.of(q), S_BHKX.dtype
    B, T, H, _ = q.shape
    k_MCK, values_MCX = chunks.split(ops.cast(k, dtype), chunk), chunks.split(_values(v, dtype), chunk)
    weight, since_start, m_MC = _weights(log_input, log_decay, m_BH, chunk)
    starts, last = linear.states(k_MCK, values_MCX, weight, since_start, S_BHKX)
    read = linear.read(chunks.split(ops.cast(q, dtype), chunk), Chunks(k_MCK, values_MCX, weight, since_start, starts))
    return (chunks.join(read, B, T, H), last, chunks.join(m_MC, B, T, H)), (starts,)


def backward(inputs, residuals, gradients, *, chunk):
    q, k, v, log_input, log_decay, S_BHKX, m_BH = inputs
    (starts,), (dread, dlast, _) = residuals, gradients
    ops, dtype = arrays.of(q), S_BHKX.dtype
    B, T, H, _ = q.shape
    weight, since_start, _ = _weights(log_input, log_decay, m_BH, chunk)
    c = Chunks(chunks.split(ops.cast(k, dtype), chunk), chunks.split(_values(v, dtype), chunk), weight, since_start, starts)
    q_MCK, dread_MCX = chunks.split(ops.cast(q, dtype), chunk), chunks.split(dread, chunk)
    dends, dS = linear.state_gradients(q_MCK, c, dread_MCX, dlast)
    dq, dk, dvalues, decays = linear.inside(q_MCK, c, dread_MCX, dends)
    dlog_input = ops.sum(decays.pairs_MCC, 1) + decays.to_end_MC  # a token's input gate is in every weight it is read by
    results = (dq, dk, dvalues[..., :-1], dlog_input, chunks.decay_gradient(decays))
    dq, dk, dv, dlog_input, dlog_decay = (chunks.join(x, B, T, H) for x in results)
    return ops.cast(dq, q.dtype), ops.cast(dk, k.dtype), ops.cast(dv, v.dtype), dlog_input, dlog_decay, dS, None


differentiable = arrays.custom_gradient(forward, backward, outputs=3)


def _values(v: Array, dtype: Any) -> Array:
    """[v | 1]"""
    return arrays.of(v).pad(arrays.of(v).cast(v, dtype), -1, 0, 1, 1.0)


def _weights(log_input, log_decay, m_BH, chunk) -> tuple[Array, Array, Array]:
    """(weight_MCC, since_start_MC, m_MC) as above."""
    ops = arrays.of(log_input)
    between, since_start = chunks.log_decays(chunks.split(log_decay, chunk))
    logit = between + chunks.split(log_input, chunk, fill=-float("inf"))[:, None, :]
    own_MC = ops.max(logit, -1)
    rows = m_BH.shape[0] * m_BH.shape[1]
    xs = since_start[:, -1].reshape(-1, rows), own_MC[:, -1].reshape(-1, rows)
    floor = lambda m: ops.maximum(m, NOTHING)  # noqa: E731
    _, m_starts = ops.scan(lambda m, x: (floor(ops.maximum(x[0] + m, x[1])), m), m_BH.reshape(-1), xs)
    from_start = since_start + m_starts.reshape(-1, 1)
    m_MC = floor(ops.maximum(own_MC, from_start))
    return ops.exp(logit - m_MC[..., None]), ops.exp(from_start - m_MC), m_MC
