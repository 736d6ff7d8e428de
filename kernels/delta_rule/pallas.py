"""The delta rule for TPUs: one program a chunk, the state in fast memory from one chunk of a row to the next.

The maths is `kernels.delta_rule.chunked`'s. What the tokens of a chunk write, U, is solved for where it is needed: only the states at the
chunks' starts are kept for the backward pass. With bfloat16 q, k and v, what is solved for has 16 bits and other operands of products are
rounded to bfloat16; with float32 all is float32.

Shapes: B batch, T time, H heads, K key size, V value size, G = B H, N chunks, C chunk length.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels import arrays, mosaic
from kernels.delta_rule import chunked
from kernels.linear_attention import pallas as linear
from kernels.linear_attention.reference import State
from kernels.mosaic import by_chunk, by_row, new
from kernels.mosaic_tiles import NT, TN, Decay, column, decay, decay_gradient, dot, inverse_unit_lower, no_decay, row, token, total

Array = Any  # jax.Array


def delta_rule(q, k, v, beta, log_decay=None, *, scale=1.0, state=None, segments=None, chunk: int | None = None) -> tuple[Array, State]:
    """See `kernels.delta_rule.delta_rule`; `chunk` is the chunk's length."""
    options = {"scale": scale, "state": state, "segments": segments, "chunk": chunk or mosaic.chunk_length(q.shape[1])}
    return chunked.delta_rule(q, k, v, beta, log_decay, **options, run=differentiable)


def forward(q, k, v, beta, log_decay, S_BHKV, *, scale, chunk):
    (B, T, H, K), V = q.shape, v.shape[-1]
    inputs, (G, N) = _cut(q, k, v, beta, log_decay, chunk)
    f32 = jnp.float32
    outputs = [by_chunk(new((G, N, chunk, V), v.dtype)), by_chunk(new((G, N, K, V), f32)), by_row(new((G, K, V), f32))]
    o, starts, last = mosaic.launch(
        _forward, G, N, [*inputs, by_row(S_BHKV.reshape(G, K, V))], outputs, products=_solve_cost(chunk, K, V) + chunk * (chunk * (K + V) + 2 * K * V),
        exponentials=chunk * chunk, like=q, scale=scale, precise=_precise(q),
    )  # fmt: skip
    return (mosaic.join(o, B, T), last.reshape(B, H, K, V)), (starts,)


def backward(inputs, residuals, gradients, *, scale, chunk):
    q, k, v, beta, log_decay, S_BHKV = inputs
    (starts,), (do, dlast) = residuals, gradients
    (B, T, _, K), V = q.shape, v.shape[-1]
    operands, (G, N) = _cut(q, k, v, beta, log_decay, chunk)
    gate = by_chunk(new((G, N, 1, chunk), jnp.float32))
    outputs = [by_chunk(new((G, N, chunk, x.shape[-1]), x.dtype)) for x in (q, k, v)]
    outputs += [gate, None if log_decay is None else gate, by_row(new((G, K, V), jnp.float32))]
    given = [*operands, by_chunk(starts), by_chunk(mosaic.split(do, chunk)), by_row(dlast.reshape(G, K, V))]
    *results, dS = mosaic.launch(
        _backward, G, N, given, outputs, products=_solve_cost(chunk, K, V) + chunk * (chunk * (6 * K + 4 * V) + 7 * K * V),
        exponentials=chunk * chunk, reverse=True, like=q, scale=scale, precise=_precise(q),
    )  # fmt: skip
    return *(None if x is None else mosaic.join(x, B, T) for x in results), dS.reshape(S_BHKV.shape)


differentiable = arrays.custom_gradient(forward, backward, outputs=2)


def _precise(q: Array) -> tuple[int, int]:
    """bfloat16 parts of operands: of ordinary products, of those that solve."""
    return (1, 2) if q.dtype == jnp.bfloat16 else (3, 3)


def _solve_cost(C: int, K: int, V: int) -> int:
    return C * C * (K + V) + C * K * V + 2 * C**3 * max((C - 1).bit_length() - 1, 0)


def _cut(q, k, v, beta, log_decay, chunk) -> tuple[list, tuple[int, int]]:
    cut = [None if x is None else mosaic.split(x, chunk) for x in (q, k, v, beta, log_decay)]
    return [None if x is None else by_chunk(x) for x in cut], cut[0].shape[:2]


def _decay(log_decay_ref: Any, C: int) -> Decay:
    return no_decay(C) if log_decay_ref is None else decay(log_decay_ref[:], None)


class Chunk:
    """What the tokens of a chunk write, u, and what that is solved from: (I + A) U = R (see `kernels.delta_rule.chunked`)."""

    def __init__(self, k_CK: Array, v_CV: Array, beta_1C: Array, d: Decay, S_KV: Array, precise: int) -> None:
        C = k_CK.shape[0]
        solved = partial(dot, precise=precise)
        self.beta_C1, self.overlap_CC = column(beta_1C), solved(k_CK, k_CK, NT)
        self.weight_CC = jnp.where(token(C, 1) < token(C, 0), d.weight_CC, 0.0)
        self.inverse_CC = inverse_unit_lower(self.overlap_CC * self.weight_CC * self.beta_C1, precise=precise)
        self.held_CV = solved(k_CK, S_KV) * d.since_start_C1
        self.left_CV = v_CV.astype(jnp.float32) - self.held_CV
        self.u_CV = solved(self.inverse_CC, self.left_CV * self.beta_C1)


def _forward(q_ref, k_ref, v_ref, beta_ref, log_decay_ref, S_ref, o_ref, starts_ref, last_ref, *, scale, precise):
    @pl.when(pl.program_id(1) == 0)
    def _():
        last_ref[:] = S_ref[:]

    S_KV, k_CK = last_ref[:], k_ref[:]
    d = _decay(log_decay_ref, k_CK.shape[0])
    starts_ref[:] = S_KV
    u_CV = Chunk(k_CK, v_ref[:], beta_ref[:], d, S_KV, precise[1]).u_CV
    o_ref[:] = (scale * linear.read(q_ref[:], k_CK, u_CV, d, S_KV, precise[0])).astype(o_ref.dtype)
    last_ref[:] = linear.advance(k_CK, u_CV, d, S_KV, precise[0])


def _backward(
    q_ref, k_ref, v_ref, beta_ref, log_decay_ref, starts_ref, do_ref, dlast_ref, dq_ref, dk_ref, dv_ref, dbeta_ref, dlog_decay_ref, dS_ref,
    *, scale, precise,
):  # fmt: skip
    @pl.when(pl.program_id(1) == 0)
    def _():
        dS_ref[:] = dlast_ref[:]

    product, solved = (partial(dot, precise=parts) for parts in precise)
    q_CK, k_CK, do_CV, S_KV, dS_KV = q_ref[:], k_ref[:], do_ref[:], starts_ref[:], dS_ref[:]
    d = _decay(log_decay_ref, k_CK.shape[0])
    w = Chunk(k_CK, v_ref[:], beta_ref[:], d, S_KV, precise[1])
    q32, k32, do32 = (x.astype(jnp.float32) for x in (q_CK, k_CK, do_CV))
    score_CC = product(q_CK, k_CK, NT) * scale
    dscore_CC = product(do_CV, w.u_CV, NT) * d.weight_CC
    dq_start = product(do_CV, S_KV, NT) * d.since_start_C1
    dk_end = product(w.u_CV, dS_KV, NT) * d.to_end_C1
    du = product(score_CC * d.weight_CC, do_CV, TN) + product(k_CK, dS_KV) * d.to_end_C1

    # back through (I + A) U = R
    dR = solved(w.inverse_CC, du, TN)
    dheld = -dR * w.beta_C1
    dk_start = product(dheld, S_KV, NT) * d.since_start_C1
    dA_over_beta = -product(dR, w.u_CV, NT) * w.weight_CC
    doverlap = dA_over_beta * w.beta_C1
    dk = scale * product(dscore_CC, q_CK, TN) + dk_end + dk_start + product(doverlap, k_CK) + product(doverlap, k_CK, TN)
    dbeta_C1 = jnp.sum(dR * w.left_CV, axis=1, keepdims=True) + jnp.sum(dA_over_beta * w.overlap_CC, axis=1, keepdims=True)

    if log_decay_ref is not None:
        since_start_C1 = jnp.sum(scale * q32 * dq_start + k32 * dk_start, axis=1, keepdims=True)
        to_end_C1 = jnp.sum(k32 * dk_end, axis=1, keepdims=True)
        through_11 = d.through_11 * total(S_KV * dS_KV)
        dlog_decay_ref[:] = decay_gradient(dscore_CC * score_CC + doverlap * w.overlap_CC, since_start_C1, to_end_C1, through_11)
    from_reads = scale * product(q_CK, do32 * d.since_start_C1, TN)
    dS_ref[:] = d.through_11 * dS_KV + from_reads + product(k_CK, dheld * d.since_start_C1, TN)
    dq_ref[:] = (scale * (product(dscore_CC, k_CK) + dq_start)).astype(dq_ref.dtype)
    dk_ref[:] = dk.astype(dk_ref.dtype)
    dv_ref[:] = (dR * w.beta_C1).astype(dv_ref.dtype)
    dbeta_ref[:] = row(dbeta_C1)
