"""Linear attention for TPUs: one program a chunk, the state in fast memory from one chunk of a row to the next.

The maths is `kernels.linear_attention.chunked`'s. With bfloat16 q, k and v, operands of products are rounded to bfloat16 and summed in
float32 (`precise` bfloat16 parts of each where it is given); with float32 all is float32. States and gates are float32.

Shapes: B batch, T time, H heads, K key size, V value size, G = B H, N chunks, C chunk length.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels import arrays, mosaic
from kernels.linear_attention import chunked
from kernels.linear_attention.reference import State
from kernels.mosaic import by_chunk, by_row, new
from kernels.mosaic_tiles import NT, TN, Decay, column, decay, decay_gradient, dot, row, total

Array = Any  # jax.Array


def linear_attention(
    q, k, v, log_decay, beta=None, *, sign=None, scale=1.0, state=None, segments=None, chunk: int | None = None
) -> tuple[Array, State]:
    """See `kernels.linear_attention.linear_attention`; `chunk` is the chunk's length."""
    options = {"sign": sign, "scale": scale, "state": state, "segments": segments, "chunk": chunk or mosaic.chunk_length(q.shape[1])}
    return chunked.linear_attention(q, k, v, log_decay, beta, **options, run=differentiable)


def forward(q, k, v, log_decay, beta, sign, S_BHKV, *, scale, chunk, precise=None):
    (B, T, H, K), V = q.shape, v.shape[-1]
    inputs, (G, N) = _cut(q, k, v, log_decay, beta, sign, chunk)
    f32 = jnp.float32
    outputs = [by_chunk(new((G, N, chunk, V), v.dtype)), by_chunk(new((G, N, K, V), f32)), by_row(new((G, K, V), f32))]
    o, starts, last = mosaic.launch(
        _forward, G, N, [*inputs, by_row(S_BHKV.reshape(G, K, V))], outputs, products=chunk * (chunk * (K + V) + 2 * K * V),
        like=q, scale=scale, precise=precise or _precise(q),
    )  # fmt: skip
    return (mosaic.join(o, B, T), last.reshape(B, H, K, V)), (starts,)


def backward(inputs, residuals, gradients, *, scale, chunk, precise=None):
    q, k, v, log_decay, beta, sign, S_BHKV = inputs
    (starts,), (do, dlast) = residuals, gradients
    (B, T, _, K), V = q.shape, v.shape[-1]
    operands, (G, N) = _cut(q, k, v, log_decay, beta, sign, chunk)
    f32, gate = jnp.float32, by_chunk(new((G, N, 1, chunk), jnp.float32))
    outputs = [by_chunk(new((G, N, chunk, x.shape[-1]), x.dtype)) for x in (q, k, v)]
    outputs += [gate, None if beta is None else gate, by_row(new((G, K, V), f32))]
    given = [*operands, by_chunk(starts), by_chunk(mosaic.split(do, chunk)), by_row(dlast.reshape(G, K, V))]
    results = mosaic.launch(
        _backward, G, N, given, outputs, products=chunk * (chunk * (3 * K + 2 * V) + 5 * K * V), reverse=True, like=q, scale=scale,
        precise=precise or _precise(q),
    )  # fmt: skip
    *results, dS = results
    dq, dk, dv, dlog_decay, dbeta = (None if x is None else mosaic.join(x, B, T) for x in results)
    return dq, dk, dv, dlog_decay, dbeta, None, dS.reshape(S_BHKV.shape)


differentiable = arrays.custom_gradient(forward, backward, outputs=2)


def _precise(q: Array) -> int:
    return 1 if q.dtype == jnp.bfloat16 else 3


def _cut(q, k, v, log_decay, beta, sign, chunk) -> tuple[list, tuple[int, int]]:
    q, k, v = (mosaic.split(x, chunk) for x in (q, k, v))
    gates = [None if x is None else by_chunk(mosaic.split(x, chunk, fill=fill)) for x, fill in ((log_decay, 0), (beta, 0), (sign, 1))]
    return [by_chunk(q), by_chunk(k), by_chunk(v), *gates], q.shape[:2]


def _forward(q_ref, k_ref, v_ref, log_decay_ref, beta_ref, sign_ref, S_ref, o_ref, starts_ref, last_ref, *, scale, precise):
    @pl.when(pl.program_id(1) == 0)
    def _():
        last_ref[:] = S_ref[:]

    d = decay(log_decay_ref[:], None if sign_ref is None else sign_ref[:])
    S_KV = last_ref[:]
    starts_ref[:] = S_KV
    q_CK, k_CK, v_CV = q_ref[:], k_ref[:], _written(v_ref, beta_ref)
    o = scale * read(q_CK, k_CK, v_CV, d, S_KV, precise)
    o_ref[:] = o.astype(o_ref.dtype)
    last_ref[:] = advance(k_CK, v_CV, d, S_KV, precise)


def _written(v_ref, beta_ref) -> Array:
    return v_ref[:] if beta_ref is None else v_ref[:].astype(jnp.float32) * column(beta_ref[:])


def read(q_CK: Array, k_CK: Array, v_CV: Array, d: Decay, S_KV: Array, precise: int) -> Array:
    """[C, V]: every token's query against its own state."""
    inside = dot(dot(q_CK, k_CK, NT, precise=precise) * d.weight_CC, v_CV, precise=precise)
    return inside + dot(q_CK, S_KV, precise=precise) * d.since_start_C1


def advance(k_CK: Array, v_CV: Array, d: Decay, S_KV: Array, precise: int) -> Array:
    """The state after the chunk."""
    return d.through_11 * S_KV + dot(k_CK, v_CV.astype(jnp.float32) * d.to_end_C1, TN, precise=precise)


def _backward(
    q_ref, k_ref, v_ref, log_decay_ref, beta_ref, sign_ref, starts_ref, do_ref, dlast_ref,
    dq_ref, dk_ref, dv_ref, dlog_decay_ref, dbeta_ref, dS_ref, *, scale, precise,
):  # fmt: skip
    @pl.when(pl.program_id(1) == 0)
    def _():
        dS_ref[:] = dlast_ref[:]

    d = decay(log_decay_ref[:], None if sign_ref is None else sign_ref[:])
    q_CK, k_CK, v_CV, do_CV, S_KV, dS_KV = q_ref[:], k_ref[:], _written(v_ref, beta_ref), do_ref[:], starts_ref[:], dS_ref[:]

    def product(a: Array, b: Array, *contract: tuple) -> Array:
        return dot(a, b, *contract, precise=precise)

    score_CC = product(q_CK, k_CK, NT) * scale
    dscore_CC = product(do_CV, v_CV, NT) * d.weight_CC
    dq_start = product(do_CV, S_KV, NT) * d.since_start_C1
    dk_end = product(v_CV, dS_KV, NT) * d.to_end_C1
    k32, v32, q32, do32 = (x.astype(jnp.float32) for x in (k_CK, v_ref[:], q_CK, do_CV))
    dq = product(dscore_CC, k_CK) + dq_start
    dk = scale * product(dscore_CC, q_CK, TN) + dk_end
    dv = product(score_CC * d.weight_CC, do_CV, TN) + product(k_CK, dS_KV) * d.to_end_C1

    since_start_C1 = scale * jnp.sum(q32 * dq_start, axis=1, keepdims=True)
    to_end_C1 = jnp.sum(k32 * dk_end, axis=1, keepdims=True)
    through_11 = d.through_11 * total(S_KV * dS_KV)
    dlog_decay_ref[:] = decay_gradient(dscore_CC * score_CC, since_start_C1, to_end_C1, through_11)
    dS_ref[:] = d.through_11 * dS_KV + scale * product(q_CK, do32 * d.since_start_C1, TN)
    if beta_ref is not None:
        dbeta_ref[:] = row(jnp.sum(dv * v32, axis=1, keepdims=True))
        dv = dv * column(beta_ref[:])
    dq_ref[:] = (scale * dq).astype(dq_ref.dtype)
    dk_ref[:] = dk.astype(dk_ref.dtype)
    dv_ref[:] = dv.astype(dv_ref.dtype)
