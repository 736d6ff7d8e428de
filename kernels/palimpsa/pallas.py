"""Palimpsa for TPUs, exact: token by token, the state in registers or fast memory, keys along sublanes and values along lanes.

What a token needs of its key and query over all lanes, a product with a one-hot gives: the matrix units are otherwise idle. The backward
pass first goes over its chunk forwards, keeping what is left at every token of what was there before, then backwards (the gradients are
`kernels.palimpsa.chunked`'s, in which no division is by a decay). Everything is float32 but those products: bfloat16 keys and queries are
exact, sums over values of a gradient times bfloat16 have 16 bits; with float32 inputs all is float32.

Shapes: B batch, T time, H heads, K key size, V value size, G = B H, N chunks, C chunk length.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels import arrays, mosaic
from kernels.mosaic import by_chunk, by_head, by_row, new
from kernels.mosaic_tiles import NT, column, dot, row
from kernels.palimpsa import chunked
from kernels.palimpsa.reference import State

Array = Any  # jax.Array
KEPT = 8 * 2**20
"""Bytes of fast memory for the states of a chunk's tokens."""


def palimpsa(q, k, v, beta, log_decay, prior, *, scale=1.0, state=None, segments=None, chunk: int | None = None) -> tuple[Array, State]:
    """See `kernels.palimpsa.palimpsa`; `chunk` is the chunk's length."""
    chunk = chunk or chunk_length(q.shape[1], q.shape[-1], v.shape[-1])
    return chunked.gated(differentiable, q, k, v, beta, log_decay, prior, state, segments, scale=float(scale), chunk=chunk)


def chunk_length(T: int, K: int, V: int) -> int:
    """As many tokens as two states each fit into `KEPT`, in whole tiles of bfloat16, 64 at most."""
    state = 4 * (-(-K // 8) * 8) * (-(-V // 128) * 128)
    return min(64, max(KEPT // (2 * state) // 16, 1) * 16, -(-T // 16) * 16)


def forward(q, k, v, beta, log_decay, prior, M_BHKV, J_BHKV, *, scale, chunk):
    (B, T, _, K), V = q.shape, v.shape[-1]
    inputs, (G, N) = _cut(q, k, v, beta, log_decay, prior, chunk)
    state, start = by_row(new((G, K, V), jnp.float32)), by_chunk(new((G, N, K, V), jnp.float32))
    outputs = [by_chunk(new((G, N, chunk, V), v.dtype)), start, start, state, state]
    o, *starts, M, J = mosaic.launch(
        _forward, G, N, [*inputs, by_row(M_BHKV.reshape(G, K, V)), by_row(J_BHKV.reshape(G, K, V))], outputs,
        products=chunk * K * V * (2 * chunk + 6), exponentials=chunk * K * V, scratch=[(chunk, V)] * 3, like=q, scale=scale,
    )  # fmt: skip
    return (mosaic.join(o, B, T), M.reshape(M_BHKV.shape), J.reshape(J_BHKV.shape)), tuple(starts)


def backward(inputs, residuals, gradients, *, scale, chunk):
    q, k, v, beta, log_decay, prior, M_BHKV, J_BHKV = inputs
    (do, dM, dJ), (M_starts, J_starts) = gradients, residuals
    (B, T, H, K), V = q.shape, v.shape[-1]
    operands, (G, N) = _cut(q, k, v, beta, log_decay, prior, chunk)
    f32, state = jnp.float32, by_row(new((G, K, V), jnp.float32))
    given = [*operands, by_chunk(M_starts), by_chunk(J_starts), by_chunk(mosaic.split(do, chunk))]
    given += [by_row(x.reshape(G, K, V)) for x in (dM, dJ)]
    outputs = [by_chunk(new((G, N, chunk, x.shape[-1]), x.dtype)) for x in (q, k, v)] + [by_chunk(new((G, N, chunk, V), f32))]
    outputs += [by_chunk(new((G, N, 1, chunk), f32)), by_row(new((G, 1, V), f32)), state, state]
    *results, dprior, dM, dJ = mosaic.launch(
        _backward, G, N, given, outputs, products=chunk * K * V * (6 * chunk + 20), exponentials=2 * chunk * K * V,
        scratch=[(chunk, V)] * 6 + [(chunk, K, V)] * 2, reverse=True, like=q, scale=scale, precise=2 if q.dtype == jnp.bfloat16 else 3,
    )  # fmt: skip
    dprior = jnp.sum(dprior.reshape(B, H, V), (0, 2))
    return *(mosaic.join(x, B, T) for x in results), dprior, dM.reshape(M_BHKV.shape), dJ.reshape(J_BHKV.shape)


differentiable = arrays.custom_gradient(forward, backward, outputs=3)


def _cut(q, k, v, beta, log_decay, prior, chunk) -> tuple[list, tuple[int, int]]:
    cut = [mosaic.split(x, chunk) for x in (q, k, v, beta, log_decay)]
    return [*map(by_chunk, cut), by_head(prior[:, None, None])], cut[0].shape[:2]


class Tokens:
    """A chunk's keys and queries, one token at a time over all lanes."""

    def __init__(self, q_CK: Array, k_CK: Array, V: int) -> None:
        self.q_KC, self.k_KC = (x.astype(jnp.float32).T.astype(x.dtype) for x in (q_CK, k_CK))
        self.place_CV = jax.lax.broadcasted_iota(jnp.int32, (q_CK.shape[0], V), 0)

    def alone(self, t: Array, x_CV: Array | float) -> Array:
        """float32 x of token t, 0 for all others."""
        return jnp.where(self.place_CV == t, x_CV, 0.0)

    def key(self, t: Array) -> Array:
        """[K, V]: the key, the same for every value."""
        return dot(self.k_KC, self.alone(t, 1.0).astype(self.k_KC.dtype), precise=3)

    def query(self, t: Array) -> Array:
        return dot(self.q_KC, self.alone(t, 1.0).astype(self.q_KC.dtype), precise=3)


def _rows(v_ref, log_decay_ref, v_rows, decay_rows) -> None:
    """Values and decays as rows that a token can be read from."""
    v_rows[:] = v_ref[:].astype(jnp.float32)
    decay_rows[:] = jnp.broadcast_to(jnp.exp(column(log_decay_ref[:])), decay_rows.shape)


def _forward(
    q_ref, k_ref, v_ref, beta_ref, log_decay_ref, prior_ref, M_ref, J_ref, o_ref, M_starts_ref, J_starts_ref, M_last_ref, J_last_ref,
    v_rows, decay_rows, o_rows, *, scale,
):  # fmt: skip
    @pl.when(pl.program_id(1) == 0)
    def _():
        M_last_ref[:] = M_ref[:]
        J_last_ref[:] = J_ref[:]

    M_starts_ref[:], J_starts_ref[:] = M_last_ref[:], J_last_ref[:]
    _rows(v_ref, log_decay_ref, v_rows, decay_rows)
    tokens, prior_11 = Tokens(q_ref[:], k_ref[:], v_ref.shape[1]), prior_ref[:]

    def token(t: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        here = pl.ds(t, 1)
        key, decay = tokens.key(t), decay_rows[here, :]
        M, J = decay * state[0] + key * v_rows[here, :], decay * state[1] + key * key * beta_ref[here, :]
        o_rows[here, :] = jnp.sum(tokens.query(t) * (M / (prior_11 + J)), axis=0, keepdims=True)
        return M, J

    M_last_ref[:], J_last_ref[:] = jax.lax.fori_loop(0, q_ref.shape[0], token, (M_last_ref[:], J_last_ref[:]))
    o_ref[:] = (scale * o_rows[:]).astype(o_ref.dtype)


def _backward(
    q_ref, k_ref, v_ref, beta_ref, log_decay_ref, prior_ref, M_starts_ref, J_starts_ref, do_ref, dM_last_ref, dJ_last_ref,
    dq_ref, dk_ref, dv_ref, dbeta_ref, dlog_decay_ref, dprior_ref, dM_ref, dJ_ref,
    v_rows, decay_rows, do_rows, dv_rows, decayed_rows, prior_rows, M_kept, J_kept, *, scale, precise,
):  # fmt: skip
    @pl.when(pl.program_id(1) == 0)
    def _():
        dM_ref[:] = dM_last_ref[:]
        dJ_ref[:] = dJ_last_ref[:]
        dprior_ref[:] = jnp.zeros_like(dprior_ref)

    C, K = q_ref.shape
    _rows(v_ref, log_decay_ref, v_rows, decay_rows)
    do_rows[:] = do_ref[:].astype(jnp.float32)
    tokens, prior_11 = Tokens(q_ref[:], k_ref[:], v_ref.shape[1]), prior_ref[:]

    def onwards(t: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        here = pl.ds(t, 1)
        key, decay = tokens.key(t), decay_rows[here, :]
        M, J = decay * state[0], decay * state[1]
        M_kept[t], J_kept[t] = M, J
        return M + key * v_rows[here, :], J + key * key * beta_ref[here, :]

    jax.lax.fori_loop(0, C, onwards, (M_starts_ref[:], J_starts_ref[:]))

    def back(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        P, Q, dq, dk, dk_squared = carry
        t = C - 1 - i
        here = pl.ds(t, 1)
        key, query, M_left, J_left = tokens.key(t), tokens.query(t), M_kept[t], J_kept[t]
        squared = key * key
        R = 1.0 / (prior_11 + (J_left + squared * beta_ref[here, :]))
        X = (M_left + key * v_rows[here, :]) * R
        L = scale * query * do_rows[here, :] * R
        LX = L * X
        P, Q = P + L, Q - LX
        total = lambda x: jnp.sum(x, axis=0, keepdims=True)  # noqa: E731
        dv_rows[here, :] = total(P * key)
        dbeta_ref[here, :] = total(Q * squared)
        decayed_rows[here, :] = total(M_left * P + J_left * Q)
        prior_rows[here, :] = total(LX)
        # rows of [C, K], one token's each
        dq = dq + dot(tokens.alone(t, do_rows[:]).astype(do_ref.dtype), X, NT, precise=precise)
        dk = dk + dot(tokens.alone(t, v_rows[:]).astype(v_ref.dtype), P, NT, precise=precise)
        dk_squared = dk_squared + dot(tokens.alone(t, beta_ref[:]), Q, NT, precise=precise)
        decay = decay_rows[here, :]
        return decay * P, decay * Q, dq, dk, dk_squared

    none = jnp.zeros((C, K), jnp.float32)
    dM_ref[:], dJ_ref[:], dq, dk, dk_squared = jax.lax.fori_loop(0, C, back, (dM_ref[:], dJ_ref[:], none, none, none))
    dq_ref[:] = (scale * dq).astype(dq_ref.dtype)
    dk_ref[:] = (dk + 2.0 * k_ref[:].astype(jnp.float32) * dk_squared).astype(dk_ref.dtype)
    dv_ref[:] = dv_rows[:].astype(dv_ref.dtype)
    dlog_decay_ref[:] = row(jnp.sum(decayed_rows[:], axis=1, keepdims=True))
    dprior_ref[:] -= jnp.sum(prior_rows[:], axis=0, keepdims=True)
