"""Palimpsa in chunks, exact: one chunk after another, all tokens of a chunk at once, the gradient written by hand.

Every token divides its whole state, so [K, V] numbers a token exist, but only for the chunk at hand. With D the decay inside a chunk
(`kernels.chunks.decay`) and c from its start, what is left at t of what was there before, and what t reads, are

    kept_t = c_t S_start + sum_{s < t} D_ts key_s value_s^T        S_t = kept_t + key_t value_t^T        S: M (k, v) and J (k^2, beta)

and backwards, with R = 1 / (prior + J), X = M R and L = scale q do^T R, the gradients of what each token wrote are

    P_s = sum_{t >= s} D_ts L_t + D_Cs P_end        Q_s = -sum_{t >= s} D_ts L_t X_t + D_Cs Q_end

from which all others follow. That of the log decay is <kept_t, P_t> + <kept_t, Q_t>, without a division by the decay. (The cheaper
reverse sum of prior L X - v dv - beta dbeta is the same number, but cancels where the decay is strong: in float32 it is off by 5e-4 of
the largest at log decays about -5, by more than itself at -20, and it carries rounding over resets.)

Shapes: B batch, T time, H heads, K key size, V value size, N chunks, C chunk length, G = B H.
"""

from collections.abc import Callable
from typing import Any

from kernels import arrays, chunks, segmentation
from kernels.palimpsa.reference import State, fresh

Array = Any  # torch.Tensor or jax.Array


def palimpsa(q, k, v, beta, log_decay, prior, *, scale=1.0, state=None, segments=None, chunk: int | None = None) -> tuple[Array, State]:
    """See `kernels.palimpsa.palimpsa`; `chunk` is the chunk's length."""
    options = {"scale": float(scale), "chunk": chunk or min(q.shape[1], CHUNK)}
    return gated(differentiable, q, k, v, beta, log_decay, prior, state, segments, **options)


def gated(differentiable: Callable, q, k, v, beta, log_decay, prior, state, segments, **options) -> tuple[Array, State]:
    """`differentiable`(q, k, v, beta, log_decay, prior, M, J, **options) -> (o, M, J), with documents said by the gates alone."""
    ops = arrays.of(q)
    state = fresh(q, v) if state is None else state
    dtype = state.M_BHKV.dtype
    log_decay, _, _, padding, last_B = segmentation.gates(log_decay, None, None, segments, state.segment_B, dtype)
    if padding is not None:
        k, v = (ops.where(padding[..., None], 0.0, x) for x in (k, v))
    beta, prior = ops.cast(beta, dtype), ops.cast(prior, dtype)
    o, M, J = differentiable(q, k, v, beta, log_decay, prior, state.M_BHKV, state.J_BHKV, **options)
    return o if padding is None else ops.where(padding[..., None], 0.0, o), State(M, J, last_B)


CHUNK = 16
"""Tokens whose states are held at once: memory is C + T / C states a head, and work a token grows with C."""


def forward(q, k, v, beta, log_decay, prior, M_BHKV, J_BHKV, *, scale, chunk):
    ops = arrays.of(q)
    xs = _cut(q, k, v, beta, log_decay, M_BHKV.dtype, scale, chunk)
    prior_G = _prior(prior, M_BHKV)

    def one_chunk(starts, x):
        q, k, v, beta, weight, since_start = x
        M, J = (kept + written for kept, written in _states(starts, k, v, beta, weight, since_start))
        o = ops.einsum("gck,gckv->gcv", q, M / (prior_G + J), precision="highest")
        return (M[:, -1], J[:, -1]), (o, *starts)

    ends, (o, *starts) = ops.scan(one_chunk, tuple(_flat(S) for S in (M_BHKV, J_BHKV)), xs)
    return (ops.cast(_join(o, q), v.dtype), *(S.reshape(M_BHKV.shape) for S in ends)), tuple(starts)


def backward(inputs, residuals, gradients, *, scale, chunk):
    q, k, v, beta, log_decay, prior, M_BHKV, J_BHKV = inputs
    (do, *dends), dtype = gradients, M_BHKV.dtype
    ops = arrays.of(q)
    do_NGCV = _split(ops.cast(do, dtype), chunk)
    xs = (*_cut(q, k, v, beta, log_decay, dtype, scale, chunk), do_NGCV, *residuals)
    prior_G = _prior(prior, M_BHKV)
    contract = lambda equation, *arrays: ops.einsum(equation, *arrays, precision="highest")  # noqa: E731

    def one_chunk(ends, x):
        q, k, v, beta, weight, since_start, do, *starts = x
        (M_kept, M_new), (J_kept, J_new) = _states(starts, k, v, beta, weight, since_start)
        R = 1 / (prior_G + (J_kept + J_new))
        X = (M_kept + M_new) * R
        L = q[..., None] * do[..., None, :] * R
        read = (L, -L * X)
        P, Q = (_product(_transpose(weight), S) + weight[:, -1, :, None, None] * end[:, None] for S, end in zip(read, ends, strict=True))
        dq = contract("gckv,gcv->gck", X, do)
        dk = contract("gckv,gcv->gck", P, v) + 2 * k * contract("gckv,gcv->gck", Q, beta)
        dv, dbeta = contract("gckv,gck->gcv", P, k), contract("gckv,gck->gcv", Q, k * k)
        dlog_decay = contract("gckv,gckv->gc", M_kept, P) + contract("gckv,gckv->gc", J_kept, Q)
        dprior = ops.sum(read[1], (1, 2, 3))
        dstarts = (
            contract("gckv,gc->gkv", S, since_start) + since_start[:, -1, None, None] * end for S, end in zip(read, ends, strict=True)
        )
        return tuple(dstarts), (dq, dk, dv, dbeta, dlog_decay, dprior)

    dstarts, (*results, dprior) = ops.scan(one_chunk, tuple(_flat(S) for S in dends), xs, reverse=True)
    dq, dk, dv, dbeta, dlog_decay = (_join(x, q) for x in results)
    dprior = ops.sum(dprior.reshape(-1, *M_BHKV.shape[:2]), (0, 1))
    return (
        ops.cast(dq * scale, q.dtype), ops.cast(dk, k.dtype), ops.cast(dv, v.dtype), dbeta, dlog_decay, dprior,
        *(S.reshape(M_BHKV.shape) for S in dstarts),
    )  # fmt: skip


differentiable = arrays.custom_gradient(forward, backward, outputs=3)


def _states(starts, k, v, beta, weight, since_start) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """For M and for J, [G, C, K, V] each: what is left at every token of what was there before it, and what it writes."""
    ops = arrays.of(k)
    before = ops.where(ops.causal(k.shape[1], k, strict=True), weight, 0.0)

    def one(start: Array, key: Array, value: Array) -> tuple[Array, Array]:
        written = key[..., None] * value[..., None, :]
        return _product(before, written) + since_start[..., None, None] * start[:, None], written

    return one(starts[0], k, v), one(starts[1], k * k, beta)


def _product(weight_GCC: Array, S_GCKV: Array) -> Array:
    flat = S_GCKV.reshape(*S_GCKV.shape[:2], -1)
    return arrays.of(flat).matmul(weight_GCC, flat, precision="highest").reshape(S_GCKV.shape)


def _transpose(x: Array) -> Array:
    return arrays.of(x).swapaxes(x, -1, -2)


def _cut(q, k, v, beta, log_decay, dtype, scale, chunk) -> tuple[Array, ...]:
    """q, k, v, beta [N, G, C, ...] and the decays between tokens and from the chunk's start."""
    ops = arrays.of(q)
    weight, since_start = chunks.decay(chunks.split(log_decay, chunk), None)
    G = q.shape[0] * q.shape[2]
    operands = (_split(x, chunk) for x in (ops.cast(q, dtype) * scale, ops.cast(k, dtype), ops.cast(v, dtype), beta))
    return *operands, weight.reshape(-1, G, chunk, chunk), since_start.reshape(-1, G, chunk)


def _split(x_BTHK: Array, chunk: int) -> Array:
    return chunks.split(x_BTHK, chunk).reshape(-1, x_BTHK.shape[0] * x_BTHK.shape[2], chunk, x_BTHK.shape[3])


def _join(x_NGC: Array, q_BTHK: Array) -> Array:
    return chunks.join(x_NGC.reshape(-1, *x_NGC.shape[2:]), *q_BTHK.shape[:3])


def _flat(S_BHKV: Array) -> Array:
    return S_BHKV.reshape(-1, *S_BHKV.shape[2:])


def _prior(prior_H: Array, M_BHKV: Array) -> Array:
    """[G, 1, 1, 1]"""
    return arrays.of(prior_H).broadcast_to(prior_H, M_BHKV.shape[:2]).reshape(-1, 1, 1, 1)
