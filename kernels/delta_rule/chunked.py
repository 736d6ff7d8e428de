"""The delta rule in chunks: linear attention whose values are first solved for, the gradient written by hand.

The state takes S_t = gamma_t S_{t-1} + k_t u_t^T with u_t = beta_t (v_t - gamma_t S_{t-1}^T k_t). In a chunk with starting state S, decays D
between tokens and c from its start (`kernels.chunks`), that is a unit lower triangle (the WY form: Yang et al. 2024, arXiv 2406.06484,
Eq. 8-11; with decay arXiv 2412.06464, Eq. 9-10):

    (I + A) U = R        A = beta (K K^T * D) below the diagonal        R = beta (V - c (K S))

and then, with U for values, everything is `kernels.linear_attention.chunked`.

Shapes: B batch, T time, H heads, K key size, V value size, N chunks, C chunk length, M = N B H.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from kernels import arrays, chunks, segmentation
from kernels.chunks import DecayGradients
from kernels.linear_attention import chunked as linear
from kernels.linear_attention.chunked import Chunks, product, transpose
from kernels.linear_attention.reference import State, fresh

Array = Any  # torch.Tensor or jax.Array


class Solved(NamedTuple):
    """By chunk: queries, keys, values, write strengths, decays, and (I + A)^-1."""

    q_MCK: Array
    k_MCK: Array
    v_MCV: Array
    beta_MC: Array
    weight_MCC: Array
    since_start_MC: Array
    inverse_MCC: Array


def delta_rule(
    q, k, v, beta, log_decay=None, *, scale=1.0, state=None, segments=None, chunk: int | None = None, run: Callable | None = None
) -> tuple[Array, State]:
    """See `kernels.delta_rule.delta_rule`. chunk: the chunk's length. run: `differentiable`, or another form of it."""
    ops = arrays.of(q)
    state = fresh(q, v) if state is None else state
    decays = log_decay is not None or segments is not None
    log_decay = ops.zeros(beta.shape, state.S_BHKV.dtype, beta) if log_decay is None else log_decay
    log_decay, beta, _, padding, last_B = segmentation.gates(log_decay, beta, None, segments, state.segment_B, state.S_BHKV.dtype)
    chunk = chunk or chunks.length(q.shape[1], q.shape[-1])
    o, S = (run or differentiable)(q, k, v, beta, log_decay if decays else None, state.S_BHKV, scale=float(scale), chunk=chunk)
    o = o if padding is None else ops.where(padding[..., None], 0.0, o)
    return o, State(S, last_B)


def forward(q, k, v, beta, log_decay, S_BHKV, *, scale, chunk):
    ops = arrays.of(q)
    B, T, H, _ = q.shape
    w = _solved(q, k, v, beta, log_decay, S_BHKV.dtype, scale, chunk)
    # u = u_alone - p S: what each token writes, were the chunk's starting state 0, and what that state takes off.
    u_alone = product(w.inverse_MCC, w.v_MCV * w.beta_MC[..., None])
    p_MCK = product(w.inverse_MCC, w.k_MCK * (w.beta_MC * w.since_start_MC)[..., None])
    k_end = w.k_MCK * w.weight_MCC[:, -1, :, None]
    by_chunk = lambda x: x.reshape(-1, B * H, *x.shape[1:])  # noqa: E731

    def next_state(S, xs):
        keep, k_end, u_alone, p = xs
        u = u_alone - product(p, S)
        return keep[:, None, None] * S + product(transpose(k_end), u), (S, u)

    xs = tuple(map(by_chunk, (w.since_start_MC[:, -1], k_end, u_alone, p_MCK)))
    last, (starts, u) = ops.scan(next_state, S_BHKV.reshape(B * H, *S_BHKV.shape[2:]), xs)
    starts, u = (x.reshape(-1, *x.shape[2:]) for x in (starts, u))
    o = chunks.join(linear.read(w.q_MCK, Chunks(w.k_MCK, u, w.weight_MCC, w.since_start_MC, starts)), B, T, H)
    return (ops.cast(o, v.dtype), last.reshape(S_BHKV.shape)), (starts, u)


def backward(inputs, residuals, gradients, *, scale, chunk):
    q, k, v, beta, log_decay, S_BHKV = inputs
    (starts, u), (do, dlast) = residuals, gradients
    ops = arrays.of(q)
    B, T, H, _ = q.shape
    w = _solved(q, k, v, beta, log_decay, S_BHKV.dtype, scale, chunk)
    do_MCV = chunks.split(ops.cast(do, S_BHKV.dtype), chunk)
    c = Chunks(w.k_MCK, u, w.weight_MCC, w.since_start_MC, starts)
    dends, dS = _state_gradients(w, do_MCV, dlast)
    dq, dk, du, decays = linear.inside(w.q_MCK, c, do_MCV, dends)

    # back through (I + A) U = R
    beta_MC1, since_start = w.beta_MC[..., None], w.since_start_MC[..., None]
    held = product(w.k_MCK, starts) * since_start
    dR = product(transpose(w.inverse_MCC), du)
    dheld = -dR * beta_MC1
    dk_start = product(dheld, transpose(starts)) * since_start
    below = ops.causal(chunk, dR, strict=True)
    dA_over_beta = ops.where(below, -product(dR, transpose(u)), 0.0) * w.weight_MCC
    overlap = product(w.k_MCK, transpose(w.k_MCK))
    doverlap = dA_over_beta * beta_MC1
    dk = dk + dk_start + product(doverlap, w.k_MCK) + product(transpose(doverlap), w.k_MCK)
    dv = dR * beta_MC1
    dbeta = ops.sum(dR * (w.v_MCV - held), -1) + ops.sum(dA_over_beta * overlap, -1)
    pairs = decays.pairs_MCC + doverlap * overlap
    decays = DecayGradients(pairs, decays.since_start_MC + ops.sum(w.k_MCK * dk_start, -1), decays.to_end_MC, decays.through_M)

    results = (dq * scale, dk, dv, dbeta, chunks.decay_gradient(decays))
    dq, dk, dv, dbeta, dlog_decay = (chunks.join(x, B, T, H) for x in results)
    dlog_decay = None if log_decay is None else dlog_decay
    return ops.cast(dq, q.dtype), ops.cast(dk, k.dtype), ops.cast(dv, v.dtype), dbeta, dlog_decay, dS


differentiable = arrays.custom_gradient(forward, backward, outputs=2)


def _solved(q, k, v, beta, log_decay, dtype, scale, chunk) -> Solved:
    ops = arrays.of(q)
    q, k, v = (chunks.split(ops.cast(x, dtype), chunk) for x in (q, k, v))
    log_decay = ops.zeros(beta.shape, dtype, beta) if log_decay is None else log_decay
    beta = chunks.split(beta, chunk)
    weight, since_start = chunks.decay(chunks.split(log_decay, chunk), None)
    A = product(k, transpose(k)) * weight * beta[..., None]
    return Solved(q * scale, k, v, beta, weight, since_start, ops.inverse_unit_lower(A))


def _state_gradients(w: Solved, do_MCV: Array, dlast_BHKV: Array) -> tuple[Array, Array]:
    """The gradient of the state at each chunk's end [M, K, V], and of the first [B, H, K, V]; a state also reaches its chunk's u."""
    ops = arrays.of(do_MCV)
    B, H, K, V = dlast_BHKV.shape
    p_MCK = product(w.inverse_MCC, w.k_MCK * (w.beta_MC * w.since_start_MC)[..., None])
    k_end = w.k_MCK * w.weight_MCC[:, -1, :, None]
    du_read = product(transpose(product(w.q_MCK, transpose(w.k_MCK)) * w.weight_MCC), do_MCV)
    read = product(transpose(w.q_MCK), do_MCV * w.since_start_MC[..., None])
    xs = tuple(x.reshape(-1, B * H, *x.shape[1:]) for x in (w.since_start_MC[:, -1], k_end, p_MCK, du_read, read))

    def before(D, xs):
        keep, k_end, p, du_read, read = xs
        du = du_read + product(k_end, D)
        return keep[:, None, None] * D + read - product(transpose(p), du), D

    dS, dends = ops.scan(before, dlast_BHKV.reshape(B * H, K, V), xs, reverse=True)
    return dends.reshape(-1, K, V), dS.reshape(B, H, K, V)
