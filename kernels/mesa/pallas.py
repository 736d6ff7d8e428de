"""Mesa for TPUs: all tokens of a program's chunks solved at once, G and H in fast memory from one chunk of a row to the next.

The maths is `kernels.mesa.chunked`'s, the solver `kernels.mesa.solver`'s: each token stops by itself, the loop when all of a program's have.
A step of the solver is a chain of products, each waiting for the one before it; two chunks in one loop fill each other's waiting (the
states at their starts do not need what is solved for).
Products of the solver and of what it is read with have float32's precision for float32 q, k and v. For bfloat16 ones, keys and values
are exact as they are, and everything else is cut into a high and a low bfloat16 part (16 bits).

Shapes: B batch, T time, H heads, K key size, V value size, G = B H, N chunks, C chunk length, R chunks of a program; the statistics are
G [K, V] and H [K, K].
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels import arrays, mosaic
from kernels.linear_attention import pallas as linear
from kernels.mesa import chunked, solver
from kernels.mesa.reference import State
from kernels.mosaic import by_chunk, by_head, by_row, new
from kernels.mosaic_tiles import NT, TN, Decay, column, decay, decay_gradient, dot, parts, row, token, total

Array = Any  # jax.Array
TOGETHER = 2
"""Chunks of a program."""


def mesa(
    q, k, v, log_decay, beta, lam, *,
    sign=None, steps=30, eps=0.0, criterion="b", solve=True, start="jacobi", gradient="implicit", state=None, segments=None,
    chunk: int | None = None, together: int = TOGETHER,
) -> tuple[Array, State, dict[str, Array]]:  # fmt: skip
    """See `kernels.mesa.mesa`; `chunk` is the chunk's length."""
    options = {"steps": steps, "eps": eps, "criterion": criterion, "solve": solve, "start": start, "gradient": gradient}
    options |= {"sign": sign, "state": state, "segments": segments, "chunk": chunk or mosaic.chunk_length(q.shape[1])}
    run = partial(differentiable, together=min(together, -(-q.shape[1] // options["chunk"])))
    return chunked.mesa(q, k, v, log_decay, beta, lam, **options, run=run, read=linear.differentiable)


def forward(q, k, v, log_decay, beta, lam, sign, S_BHKX, *, steps, eps, criterion, start, chunk, together):
    (B, T, H, K), V, many = q.shape, v.shape[-1], partial(by_chunk, many=together)
    operands, (G, N) = _cut(q, k, v, log_decay, beta, sign, lam, chunk, together)
    f32, gate = jnp.float32, many(new((G, N, 1, chunk), jnp.float32))
    statistics = [by_row(x.reshape(G, K, -1)) for x in (S_BHKX[..., :V], S_BHKX[..., V:])]
    outputs = [many(new((G, N, chunk, V), v.dtype)), gate, gate, many(new((G, N, chunk, K), f32))]
    outputs += [many(new((G, N, K, size), f32)) for size in (V, K)] + [by_row(new((G, K, size), f32)) for size in (V, K)]
    o, taken, residual, x, G_starts, H_starts, G_last, H_last = mosaic.launch(
        _forward, G, N // together, [*operands, *statistics], outputs,
        products=together * (_solve_cost(chunk, K, steps) + 2 * chunk * K * (chunk + K + 2 * V)),
        like=q, precise=_precise(q), solve={"steps": steps, "eps": eps, "criterion": criterion, "start": start},
    )  # fmt: skip
    last = jnp.concatenate((G_last, H_last), -1).reshape(B, H, K, V + K)
    o, taken, residual = (mosaic.join(y, B, T) for y in (o, taken, residual))
    return (o, last, taken.astype(jnp.int32), residual), (x, G_starts, H_starts)


def backward(inputs, residuals, gradients, *, steps, eps, criterion, start, chunk, together):
    q, k, v, log_decay, beta, lam, sign, S_BHKX = inputs
    (x, G_starts, H_starts), (do, dlast) = residuals, gradients[:2]
    (B, T, H, K), V, many = q.shape, v.shape[-1], partial(by_chunk, many=together)
    (_, *operands), (G, N) = _cut(q, k, v, log_decay, beta, sign, lam, chunk, together)
    f32, gate = jnp.float32, many(new((G, N, 1, chunk), jnp.float32))
    given = [*operands, *map(many, (x, G_starts, H_starts, mosaic.split(do, chunk, many=together)))]
    given += [by_row(y.reshape(G, K, -1)) for y in (dlast[..., :V], dlast[..., V:])]
    outputs = [many(new((G, N, chunk, y.shape[-1]), y.dtype)) for y in (q, k, v)] + [gate, gate]
    outputs += [by_row(new((G, *shape), f32)) for shape in ((1, K), (K, V), (K, K))]
    *results, dlam, dG, dH = mosaic.launch(
        _backward, G, N // together, given, outputs,
        products=together * (_solve_cost(chunk, K, steps) + chunk * (chunk * (6 * K + 2 * V) + K * (5 * V + 4 * K))),
        reverse=True, like=q, precise=_precise(q), solve={"steps": steps, "eps": eps, "criterion": criterion, "start": start},
    )  # fmt: skip
    dq, dk, dv, dlog_decay, dbeta = (mosaic.join(y, B, T) for y in results)
    dlam = jnp.sum(dlam.reshape(B, H, K), 0).astype(lam.dtype)
    dH = (dH + jnp.swapaxes(dH, -1, -2)) / 2  # H is symmetric, and so is its gradient
    return dq, dk, dv, dlog_decay, dbeta, dlam, None, jnp.concatenate((dG, dH), -1).reshape(S_BHKX.shape)


differentiable = arrays.custom_gradient(forward, backward, outputs=4)


def _precise(q: Array) -> int:
    return 2 if q.dtype == jnp.bfloat16 else 3


def _solve_cost(C: int, K: int, steps: int) -> int:
    """Multiply-adds of a chunk's solve: with its start, and as if every token took all its steps."""
    return (steps + 1) * C * K * (2 * C + K)


def _cut(q, k, v, log_decay, beta, sign, lam, chunk, together) -> tuple[list, tuple[int, int]]:
    split, many = partial(mosaic.split, C=chunk, many=together), partial(by_chunk, many=together)
    q, k, v = (split(x) for x in (q, k, v))
    gates = [None if x is None else many(split(x, fill=fill)) for x, fill in ((log_decay, 0), (beta, 0), (sign, 1))]
    return [many(q), many(k), many(v), *gates, by_head(lam.astype(jnp.float32)[..., None])], q.shape[:2]


class System:
    """H_t + Lambda of every token t of a chunk. Tokens lie along lanes in here: what each has one number of is a row, a sixteenth of a column."""

    def __init__(self, k_CK: Array, d: Decay, beta_1C: Array, lam_K1: Array, H_KK: Array, precise: int) -> None:
        self.lam_K1, self.precise, self.weight_CC = lam_K1, precise, d.weight_CC * beta_1C
        self.since_start_1C, self.seen_SC = row(d.since_start_C1), self.weight_CC.T
        k_KC = k_CK.astype(jnp.float32).T
        diagonal_K1 = jnp.sum(jnp.where(token(H_KK.shape[0], 0) == token(H_KK.shape[0], 1), H_KK, 0.0), axis=1, keepdims=True)
        self.diagonal_KC = dot(k_KC * k_KC, self.seen_SC, precise=precise) + diagonal_K1 * self.since_start_1C + lam_K1
        self.k_SK, self.k_KS, self.H_KK = k_CK, k_KC.astype(k_CK.dtype), H_KK
        if precise == 2:
            self.stacked = jnp.concatenate((*parts(k_CK, 1), *parts(H_KK, 2)), 0)

    def apply(self, x_KC: Array) -> Array:
        product = partial(dot, precise=self.precise)
        score_SC, from_start_KC = self._with_keys_and_start(x_KC)
        return product(self.k_KS, score_SC * self.seen_SC) + from_start_KC * self.since_start_1C + self.lam_K1 * x_KC

    def _with_keys_and_start(self, x_KC: Array) -> tuple[Array, Array]:
        """(k x, H x); with two parts, one product for each part of x, which a matrix unit then takes in once."""
        C, K = self.seen_SC.shape[0], x_KC.shape[0]
        if self.precise == 3 or C % 16 or K % 16:
            product = partial(dot, precise=self.precise)
            return product(self.k_SK, x_KC), product(self.H_KK, x_KC)
        high, low = parts(x_KC, 2)
        by_high, by_low = dot(self.stacked, high, precise=1), dot(self.stacked[: C + K], low, precise=1)
        return by_high[:C] + by_low[:C], by_high[C : C + K] + by_high[C + K :] + by_low[C:]


def solve_together(systems: list[System], rhs_KC: list[Array], **options: Any) -> tuple[list[Array], list[Array]]:
    """The solutions of several chunks' systems and the steps that their tokens took, in one loop."""
    C = rhs_KC[0].shape[1]

    def cut(x: Array) -> list[Array]:
        return [x[:, r * C : (r + 1) * C] for r in range(len(systems))]

    def apply(x: Array) -> Array:
        return _joined([system.apply(part) for system, part in zip(systems, cut(x), strict=True)])

    x, taken = solver.iterate(apply, _joined(rhs_KC), _joined([system.diagonal_KC for system in systems]), axis=0, **options)
    return cut(x), cut(taken)


def _joined(arrays: list[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, 1)


def _decay(log_decay_ref: Any, sign_ref: Any, r: int) -> Decay:
    return decay(log_decay_ref[r], None if sign_ref is None else sign_ref[r])


def _forward(
    q_ref, k_ref, v_ref, log_decay_ref, beta_ref, sign_ref, lam_ref, G_ref, H_ref,
    o_ref, taken_ref, residual_ref, x_ref, G_starts_ref, H_starts_ref, G_last_ref, H_last_ref, *, precise, solve,
):  # fmt: skip
    @pl.when(pl.program_id(1) == 0)
    def _():
        G_last_ref[:] = G_ref[:]
        H_last_ref[:] = H_ref[:]

    systems, decays = [], []
    for r in range(q_ref.shape[0]):
        k_CK, beta_1C = k_ref[r], beta_ref[r]
        G_KV, H_KK = G_last_ref[:], H_last_ref[:]
        G_starts_ref[r], H_starts_ref[r] = G_KV, H_KK
        d = _decay(log_decay_ref, sign_ref, r)
        systems.append(System(k_CK, d, beta_1C, lam_ref[:], H_KK, precise))
        decays.append(d._replace(weight_CC=systems[r].weight_CC, to_end_C1=d.to_end_C1 * column(beta_1C)))
        G_last_ref[:] = linear.advance(k_CK, v_ref[r], decays[r], G_KV, precise)
        H_last_ref[:] = linear.advance(k_CK, k_CK, decays[r], H_KK, precise)

    queries = [q_ref[r].astype(jnp.float32).T for r in range(len(systems))]
    solutions, taken = solve_together(systems, queries, **solve)
    for r, (system, q_KC, x_KC) in enumerate(zip(systems, queries, solutions, strict=True)):
        taken_ref[r] = taken[r].astype(jnp.float32)
        residual_ref[r] = solver.relative_residual(q_KC, q_KC - system.apply(x_KC), axis=0, keepdims=True)
        x_CK = x_KC.T
        x_ref[r] = x_CK
        o_ref[r] = linear.read(x_CK, k_ref[r], v_ref[r], decays[r], G_starts_ref[r], precise).astype(o_ref.dtype)


def _backward(
    k_ref, v_ref, log_decay_ref, beta_ref, sign_ref, lam_ref, x_ref, G_starts_ref, H_starts_ref, do_ref, dG_last_ref, dH_last_ref,
    dq_ref, dk_ref, dv_ref, dlog_decay_ref, dbeta_ref, dlam_ref, dG_ref, dH_ref, *, precise, solve,
):  # fmt: skip
    @pl.when(pl.program_id(1) == 0)
    def _():
        dG_ref[:] = dG_last_ref[:]
        dH_ref[:] = dH_last_ref[:]
        dlam_ref[:] = jnp.zeros_like(dlam_ref)

    product = partial(dot, precise=precise)
    systems, decays, read_values, read_starts, written_back = [], [], [], [], []
    for r in range(k_ref.shape[0]):
        d = _decay(log_decay_ref, sign_ref, r)
        system = System(k_ref[r], d, beta_ref[r], lam_ref[:], H_starts_ref[r], precise)
        do_v, do_G = product(do_ref[r], v_ref[r], NT), product(do_ref[r], G_starts_ref[r], NT) * d.since_start_C1
        systems.append(system)
        decays.append(d)
        read_values.append(do_v)
        read_starts.append(do_G)
        written_back.append((product(do_v * system.weight_CC, k_ref[r]) + do_G).T)  # G_t do_t
    backs, _ = solve_together(systems, written_back, **solve)  # e*

    # S = [G | H], written with [v | k] and read by x, under the output's gradient [do | -back]
    for r in reversed(range(len(systems))):
        d, weight_CC, beta_C1, back_CK = decays[r], systems[r].weight_CC, column(beta_ref[r]), backs[r].T
        k_CK, v_CV, do_CV, x_CK = k_ref[r], v_ref[r], do_ref[r], x_ref[r]
        G_KV, H_KK, dG_KV, dH_KK = G_starts_ref[r], H_starts_ref[r], dG_ref[:], dH_ref[:]
        score_CC = product(x_CK, k_CK, NT)
        dscore_CC = (read_values[r] - product(back_CK, k_CK, NT)) * weight_CC
        read_CC = score_CC * d.weight_CC
        dx_start = read_starts[r] - product(back_CK, H_KK, NT) * d.since_start_C1
        dk_end = (product(v_CV, dG_KV, NT) + product(k_CK, dH_KK, NT)) * (d.to_end_C1 * beta_C1)
        dv = product(read_CC, do_CV, TN) + product(k_CK, dG_KV) * d.to_end_C1
        dk_written = product(k_CK, dH_KK) * d.to_end_C1 - product(read_CC, back_CK, TN)
        dk = product(dscore_CC, x_CK, TN) + dk_end + dk_written * beta_C1
        k32, v32, do32 = (y.astype(jnp.float32) for y in (k_CK, v_CV, do_CV))

        since_start_C1 = jnp.sum(x_CK * dx_start, axis=1, keepdims=True)
        to_end_C1 = jnp.sum(k32 * dk_end, axis=1, keepdims=True)
        through_11 = d.through_11 * (total(G_KV * dG_KV) + total(H_KK * dH_KK))
        dlog_decay_ref[r] = decay_gradient(dscore_CC * score_CC, since_start_C1, to_end_C1, through_11)
        dbeta_ref[r] = row(jnp.sum(dv * v32, axis=1, keepdims=True) + jnp.sum(dk_written * k32, axis=1, keepdims=True))
        dlam_ref[:] -= jnp.sum(x_CK * back_CK, axis=0, keepdims=True)
        dG_ref[:] = d.through_11 * dG_KV + product(x_CK, do32 * d.since_start_C1, TN)
        dH_ref[:] = d.through_11 * dH_KK - product(x_CK, back_CK * d.since_start_C1, TN)
        dq_ref[r] = back_CK.astype(dq_ref.dtype)
        dk_ref[r] = dk.astype(dk_ref.dtype)
        dv_ref[r] = (dv * beta_C1).astype(dv_ref.dtype)
