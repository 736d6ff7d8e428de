"""Linear attention in chunks: products inside a chunk, a scan over the states between chunks, and the gradient written by hand.

With D the decay inside a chunk (`kernels.chunks.decay`), c_t the decay from its start and S its starting state (MesaNet, Eq. 9):

    O = (Q K^T * D) V + c (Q S)            S' = c_C S + K^T (D_C V)

Shapes: B batch, T time, H heads, K key size, V value size, N chunks, C chunk length, M = N B H.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from kernels import arrays, chunks, segmentation
from kernels.chunks import DecayGradients
from kernels.linear_attention.reference import State, fresh

Array = Any  # torch.Tensor or jax.Array


class Chunks(NamedTuple):
    """One call's operands by chunk: keys, values (write strength included), decays, and the state at each chunk's start."""

    k_MCK: Array
    v_MCV: Array
    weight_MCC: Array
    since_start_MC: Array
    starts_MKV: Array


def linear_attention(
    q, k, v, log_decay, beta=None, *, sign=None, scale=1.0, state=None, segments=None, chunk: int | None = None, run: Callable | None = None
) -> tuple[Array, State]:
    """See `kernels.linear_attention.linear_attention`; `chunk` is the chunk's length, `run` another `differentiable`: a device's kernels."""
    ops = arrays.of(q)
    state = fresh(q, v) if state is None else state
    log_decay, beta, sign, padding, last_B = segmentation.gates(log_decay, beta, sign, segments, state.segment_B, state.S_BHKV.dtype)
    C = chunk or chunks.length(q.shape[1], q.shape[-1])
    o, S = (run or differentiable)(q, k, v, log_decay, beta, sign, state.S_BHKV, scale=float(scale), chunk=C)
    o = o if padding is None else ops.where(padding[..., None], 0.0, o)
    return o, State(S, last_B)


def forward(q, k, v, log_decay, beta, sign, S_BHKV, *, scale, chunk):
    ops = arrays.of(q)
    B, T, H, _ = q.shape
    q_MCK, c, last = _cut(q, k, v, log_decay, beta, sign, S_BHKV, scale=scale, chunk=chunk)
    o = chunks.join(read(q_MCK, c), B, T, H)
    return (ops.cast(o, v.dtype), last), (c.starts_MKV,)


def backward(inputs, residuals, gradients, *, scale, chunk):
    q, k, v, log_decay, beta, sign, S_BHKV = inputs
    (starts,), (do, dlast) = residuals, gradients
    ops = arrays.of(q)
    B, T, H, _ = q.shape
    q_MCK, c, _ = _cut(q, k, v, log_decay, beta, sign, S_BHKV, scale=scale, chunk=chunk, starts=starts)
    dq, dk, dv, dlog_decay, dS = pull_back(q_MCK, c, chunks.split(ops.cast(do, S_BHKV.dtype), chunk), dlast)
    dq, dk, dv, dlog_decay = (chunks.join(x, B, T, H) for x in (dq * scale, dk, dv, dlog_decay))
    dbeta = None
    if beta is not None:
        dbeta = ops.sum(dv * ops.cast(v, dv.dtype), -1)
        dv = dv * beta[..., None]
    return ops.cast(dq, q.dtype), ops.cast(dk, k.dtype), ops.cast(dv, v.dtype), dlog_decay, dbeta, None, dS


differentiable = arrays.custom_gradient(forward, backward, outputs=2)


def _cut(q, k, v, log_decay, beta, sign, S_BHKV, *, scale, chunk, starts=None) -> tuple[Array, Chunks, Array | None]:
    ops = arrays.of(q)
    q, k, v = (ops.cast(x, S_BHKV.dtype) for x in (q, k, v))
    v = v if beta is None else v * beta[..., None]
    return chunks.split(q * scale, chunk), *cut(k, v, log_decay, sign, S_BHKV, chunk, starts)


def cut(k, v, log_decay, sign, S_BHKV: Array, chunk: int, starts: Array | None = None) -> tuple[Chunks, Array | None]:
    """Operands in the state's dtype by chunk, and the last state; `starts` spares the scan (and the last state) when it is known."""
    k_MCK, v_MCV = chunks.split(k, chunk), chunks.split(v, chunk)
    sign_MC = None if sign is None else chunks.split(sign, chunk, fill=1)
    weight_MCC, since_start_MC = chunks.decay(chunks.split(log_decay, chunk), sign_MC)
    last = None
    if starts is None:
        starts, last = states(k_MCK, v_MCV, weight_MCC, since_start_MC, S_BHKV)
    return Chunks(k_MCK, v_MCV, weight_MCC, since_start_MC, starts), last


def states(k_MCK, v_MCV, weight_MCC, since_start_MC, S_BHKV) -> tuple[Array, Array]:
    """The state at each chunk's start [M, K, V], and after the last chunk [B, H, K, V]."""
    ops = arrays.of(k_MCK)
    B, H, K, V = S_BHKV.shape
    written_MKV = product(transpose(k_MCK), v_MCV * weight_MCC[:, -1, :, None])
    keep_N, written_N = since_start_MC[:, -1].reshape(-1, B * H, 1, 1), written_MKV.reshape(-1, B * H, K, V)
    last, starts = ops.scan(lambda S, x: (x[0] * S + x[1], S), S_BHKV.reshape(B * H, K, V), (keep_N, written_N))
    return starts.reshape(-1, K, V), last.reshape(B, H, K, V)


def read(q_MCK: Array, c: Chunks) -> Array:
    """o [M, C, V]: every token's query against its own state."""
    inside = product(product(q_MCK, transpose(c.k_MCK)) * c.weight_MCC, c.v_MCV)
    return inside + product(q_MCK, c.starts_MKV) * c.since_start_MC[..., None]


def pull_back(q_MCK: Array, c: Chunks, do_MCV: Array, dlast_BHKV: Array) -> tuple[Array, Array, Array, Array, Array]:
    """Gradients (dq [M, C, K], dk, dv, dlog_decay [M, C], dS [B, H, K, V]) of `read` and of the last state."""
    dends_MKV, dS_BHKV = state_gradients(q_MCK, c, do_MCV, dlast_BHKV)
    dq, dk, dv, decays = inside(q_MCK, c, do_MCV, dends_MKV)
    return dq, dk, dv, chunks.decay_gradient(decays), dS_BHKV


def state_gradients(q_MCK, c: Chunks, do_MCV, dlast_BHKV) -> tuple[Array, Array]:
    """The gradient of the state at each chunk's end [M, K, V], and of the first [B, H, K, V]."""
    ops = arrays.of(q_MCK)
    B, H, K, V = dlast_BHKV.shape
    keep_N = c.since_start_MC[:, -1].reshape(-1, B * H, 1, 1)
    read_N = product(transpose(q_MCK), do_MCV * c.since_start_MC[..., None]).reshape(-1, B * H, K, V)
    dS, dends = ops.scan(lambda D, x: (x[0] * D + x[1], D), dlast_BHKV.reshape(B * H, K, V), (keep_N, read_N), reverse=True)
    return dends.reshape(-1, K, V), dS.reshape(B, H, K, V)


def inside(q_MCK: Array, c: Chunks, do_MCV: Array, dends_MKV: Array) -> tuple[Array, Array, Array, DecayGradients]:
    """Gradients (dq, dk, dv, decays) inside the chunks, given those of the states at their ends."""
    ops = arrays.of(q_MCK)
    since_start, to_end = c.since_start_MC[..., None], c.weight_MCC[:, -1, :, None]
    score_MCC = product(q_MCK, transpose(c.k_MCK))
    dscore_MCC = product(do_MCV, transpose(c.v_MCV)) * c.weight_MCC
    dq_start = product(do_MCV, transpose(c.starts_MKV)) * since_start
    dk_end = product(c.v_MCV, transpose(dends_MKV)) * to_end
    dq = product(dscore_MCC, c.k_MCK) + dq_start
    dk = product(transpose(dscore_MCC), q_MCK) + dk_end
    dv = product(transpose(score_MCC * c.weight_MCC), do_MCV) + product(c.k_MCK, dends_MKV) * to_end
    through_M = c.since_start_MC[:, -1] * ops.sum(c.starts_MKV * dends_MKV, (1, 2))
    decays = DecayGradients(dscore_MCC * score_MCC, ops.sum(q_MCK * dq_start, -1), ops.sum(c.k_MCK * dk_end, -1), through_M)
    return dq, dk, dv, decays


def product(a: Array, b: Array) -> Array:
    return arrays.of(a).matmul(a, b, precision="highest")


def transpose(x: Array) -> Array:
    return arrays.of(x).swapaxes(x, -1, -2)
