"""The delta rule in Triton: what a chunk does by itself, and a walk over the states between chunks, forwards and backwards.

In a chunk with starting state S, with D the decay between its tokens, c from its start and z to its end, the error e that a token corrects
solves a unit lower triangle (`kernels.delta_rule.chunked`, with u = beta e and so without a division by beta anywhere):

    (I + L beta) E = V - c (K S)        L = K K^T * D below the diagonal        U = beta E
    S' = c_C S + (z K)^T U              P = scale Q K^T * D                     O = scale c (Q S) + P U

`_triangles` makes the inverse for every chunk at once, `_walk` runs through the chunks with S in registers, `_read` makes the outputs, again
every chunk at once. Backward, `_walk_back` carries dS the other way and leaves dV; `_within_back` has everything else:

    dU = P^T dO + z (K dS')             dV = (I + L beta)^-T beta dU            dS = c_C dS' + (scale c Q)^T dO - (c K)^T dV
    X = P * dO E^T - L * dV E^T         dbeta = sum_t X + z k (E dS'^T)         d log D = X beta

Kept for the gradient: L, the inverse, P, E and the chunks' starting states, in q's dtype; products are of q's dtype and sums float32.

Shapes: B batch, T time, H heads, K key size, V value size, N chunks, C chunk length, M = B H. BK is K filled up to a power of two or a tile
of it, BV a tile of V. A chunk's gates are five rows of C: beta, c, z, the running sum of log decays, and where a
token's document begins in the chunk.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton import next_power_of_2

from kernels import arrays
from kernels.delta_rule import chunked
from kernels.launch import divide_up, dot_precision, launch
from kernels.linear_attention.reference import State
from kernels.tiles import decay_sums

Array = Any  # torch.Tensor
GATES = tl.constexpr(5)

CHUNK = {torch.bfloat16: 64, torch.float32: 32}
INVERSE = {torch.bfloat16: "tf32", torch.float32: "tf32x3"}
TILES = {  # BK, BV: the largest tile of keys and of values; without BK, keys are whole, and past 128 of them BV is half
    ("triangles", torch.bfloat16): {"warps": 4, "stages": 1},
    ("walk", torch.bfloat16): {"BV": 64, "warps": 4, "stages": 2},
    ("read", torch.bfloat16): {"BV": 64, "warps": 4, "stages": 1},
    ("walk_back", torch.bfloat16): {"BV": 128, "warps": 8, "stages": 2},
    ("within_back", torch.bfloat16): {"BK": 64, "BV": 64, "warps": 4, "stages": 2},
    ("triangles", torch.float32): {"warps": 4, "stages": 1},
    ("walk", torch.float32): {"BV": 32, "warps": 4, "stages": 1},
    ("read", torch.float32): {"BV": 32, "warps": 4, "stages": 1},
    ("walk_back", torch.float32): {"BV": 32, "warps": 4, "stages": 1},
    ("within_back", torch.float32): {"BK": 64, "BV": 32, "warps": 4, "stages": 1},
}


@triton.jit
def _rows(n, m, T, H: tl.constexpr, C: tl.constexpr):
    """(first, row_C, there_C): where the tokens of chunk n of head m lie in [B, T, H], from the chunk's first on, and which exist."""
    token_C = tl.arange(0, C)
    first = ((m // H).to(tl.int64) * T + n * C) * H + m % H
    return first, token_C * H, token_C < T - n * C


@triton.jit
def _tile(x, row_C, there_C, begin, size: tl.constexpr, B: tl.constexpr):
    """[C, B]: columns `begin` on of rows of `size` numbers; 0 where there is none."""
    column_B = begin + tl.arange(0, B)
    return tl.load(x + (row_C[:, None] * size + column_B[None, :]), mask=there_C[:, None] & (column_B < size)[None, :], other=0.0)


@triton.jit
def _put(x, row_C, there_C, begin, size: tl.constexpr, value_CB):
    column_B = begin + tl.arange(0, value_CB.shape[1])
    mask = there_C[:, None] & (column_B < size)[None, :]
    tl.store(x + (row_C[:, None] * size + column_B[None, :]), value_CB.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _square(x, chunk, C: tl.constexpr):
    """Pointers to [C, C] of one chunk."""
    return x + chunk * C * C + (tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :])


@triton.jit
def _between(sum_C, begin_C):
    """D [C, C], row t, column s: the decay from s to t >= s, 0 before the document that begins at t's `begin`. As `tiles.decay_between` with fewer
    numbers a column."""
    i = tl.arange(0, sum_C.shape[0])
    seen = (i[:, None] >= i[None, :]) & (i[None, :] >= begin_C[:, None])
    return tl.where(seen, tl.exp(tl.where(seen, sum_C[:, None] - sum_C[None, :], 0.0)), 0.0)


@triton.jit
def _product(a, b, precision: tl.constexpr):
    """float32 operands: as tl.dot has it, or with both split in two bfloat16 numbers (relative errors of 2^-16)."""
    if precision == "bf16x3":
        a_high, b_high = a.to(tl.bfloat16), b.to(tl.bfloat16)
        a_low, b_low = (a - a_high.to(tl.float32)).to(tl.bfloat16), (b - b_high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(a_high, b_high, acc=tl.dot(a_high, b_low, acc=tl.dot(a_low, b_high)))
    else:
        return tl.dot(a, b, input_precision=precision)


@triton.jit
def _halves_joined(x, a, size: tl.constexpr, precision: tl.constexpr):
    """Inverses of the unit lower triangles I + a, by diagonal blocks of `size`, to those by blocks of twice the size.

    [[A, 0], [B, C]]^-1 = [[A^-1, 0], [-C^-1 B A^-1, C^-1]]: no entry grows on the way, unlike in powers of `a`.
    """
    i = tl.arange(0, x.shape[-1]) // size
    below = (i[:, None] % 2 == 1) & (i[None, :] == i[:, None] - 1)
    return x - _product(_product(x, tl.where(below, a, 0.0), precision), x, precision)


@triton.jit
def _inverse_unit_lower(a_CC, precision: tl.constexpr):
    """(I + a)^-1 for a below the diagonal: by doubling blocks, the first four times in 16 x 16 tiles side by side."""
    C: tl.constexpr = a_CC.shape[0]
    J: tl.constexpr = C // 16
    i, j = tl.arange(0, 16), tl.arange(0, J)
    diagonal = (j[:, None] == j[None, :])[:, None, :, None]
    a = tl.sum(tl.where(diagonal, a_CC.reshape(J, 16, J, 16), 0.0), 2)
    below = (i[:, None] % 2 == 1) & (i[None, :] == i[:, None] - 1)
    x = tl.where(i[:, None] == i[None, :], 1.0, 0.0)[None] - tl.where(below[None], a, 0.0)
    x = _halves_joined(x, a, 2, precision)
    x = _halves_joined(x, a, 4, precision)
    x = _halves_joined(x, a, 8, precision)
    x = tl.where(diagonal, x[:, :, None, :], 0.0).reshape(C, C)
    if C > 16:
        x = _halves_joined(x, a_CC, 16, precision)
    if C > 32:
        x = _halves_joined(x, a_CC, 32, precision)
    return x


@triton.jit
def _triangles(
    k, beta, log_decay, overlaps, inverse, gates, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, DECAYS: tl.constexpr, PRECISION: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    n, m = tl.program_id(0), tl.program_id(1)
    chunk = m.to(tl.int64) * tl.num_programs(0) + n
    i = tl.arange(0, C)
    token, row_C, there_C = _rows(n, m, T, H, C)
    k_CK = _tile(k + token * K, row_C, there_C, 0, K, BK)
    beta_C = tl.load(beta + token + row_C, mask=there_C, other=0.0)
    gate = gates + chunk * GATES * C + i
    tl.store(gate, beta_C)

    overlap_CC = tl.dot(k_CK, tl.trans(k_CK), input_precision=PRECISION)
    if DECAYS:
        # The first token's decay is in c alone: what else happens in the chunk does not depend on whether it drops the state.
        log_C = tl.load(log_decay + token + row_C, mask=there_C, other=0.0)
        first = tl.sum(tl.where(i == 0, log_C, 0.0))
        sum_C, document_C = decay_sums(tl.where(i == 0, 0.0, log_C))
        last = i == C - 1
        all_sum, all_document = tl.sum(tl.where(last, sum_C, 0.0)), tl.sum(tl.where(last, document_C, 0))
        kept = document_C == all_document
        begin_C = tl.sum((document_C[None, :] < document_C[:, None]).to(tl.float32), 1)
        tl.store(gate + C, tl.where(document_C == 0, tl.exp(first + sum_C), 0.0))
        tl.store(gate + 2 * C, tl.where(kept, tl.exp(tl.where(kept, all_sum - sum_C, 0.0)), 0.0))
        tl.store(gate + 3 * C, sum_C)
        tl.store(gate + 4 * C, begin_C)
        overlap_CC *= _between(sum_C, begin_C)

    overlap_CC = tl.where(i[:, None] > i[None, :], overlap_CC, 0.0)
    tl.store(_square(overlaps, chunk, C), overlap_CC.to(overlaps.dtype.element_ty))
    inverse_CC = _inverse_unit_lower(overlap_CC * beta_C[None, :], INVERSE)
    # The diagonal of 1 is left out: what it multiplies is added unrounded.
    inverse_CC = tl.where(i[:, None] > i[None, :], inverse_CC, 0.0)
    tl.store(_square(inverse, chunk, C), inverse_CC.to(inverse.dtype.element_ty))


@triton.jit
def _walk(
    k, v, inverse, gates, first, e, starts, last, T, N,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DECAYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    v0, m = tl.program_id(0) * BV, tl.program_id(1)
    head = m.to(tl.int64)
    i, row_K = tl.arange(0, C), tl.arange(0, BK)
    there_K = row_K < K
    S_KV = _tile(first + head * K * V, row_K, there_K, v0, V, BV)
    for n in range(N):
        chunk = head * N + n
        token, row_C, there_C = _rows(n, m, T, H, C)
        gate = gates + chunk * GATES * C + i
        k_CK = _tile(k + token * K, row_C, there_C, 0, K, BK)
        v_CV = _tile(v + token * V, row_C, there_C, v0, V, BV)
        start_KV = S_KV.to(k_CK.dtype)
        _put(starts + chunk * K * V, row_K, there_K, v0, V, start_KV)
        held_CV = tl.dot(k_CK, start_KV, input_precision=PRECISION)
        if DECAYS:
            held_CV *= tl.load(gate + C)[:, None]
        r_CV = v_CV.to(tl.float32) - held_CV
        e_CV = tl.dot(tl.load(_square(inverse, chunk, C)), r_CV.to(k_CK.dtype), acc=r_CV, input_precision=PRECISION)
        _put(e + token * V, row_C, there_C, v0, V, e_CV)
        u_CV = e_CV * tl.load(gate)[:, None]
        if DECAYS:
            u_CV *= tl.load(gate + 2 * C)[:, None]
            S_KV *= tl.load(gates + chunk * GATES * C + 2 * C - 1)
        S_KV = tl.dot(tl.trans(k_CK), u_CV.to(k_CK.dtype), acc=S_KV, input_precision=PRECISION)
    _put(last + head * K * V, row_K, there_K, v0, V, S_KV)


@triton.jit
def _read(
    q, k, e, starts, gates, scores, o, T, N, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DECAYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    v0, n, m = tl.program_id(0) * BV, tl.program_id(1), tl.program_id(2)
    chunk = m.to(tl.int64) * N + n
    i, row_K = tl.arange(0, C), tl.arange(0, BK)
    token, row_C, there_C = _rows(n, m, T, H, C)
    gate = gates + chunk * GATES * C + i
    q_CK = _tile(q + token * K, row_C, there_C, 0, K, BK)
    k_CK = _tile(k + token * K, row_C, there_C, 0, K, BK)
    score_CC = tl.dot(q_CK, tl.trans(k_CK), input_precision=PRECISION) * scale
    if DECAYS:
        score_CC *= _between(tl.load(gate + 3 * C), tl.load(gate + 4 * C))
    else:
        score_CC = tl.where(i[:, None] >= i[None, :], score_CC, 0.0)
    score_CC = score_CC.to(q_CK.dtype)
    if tl.program_id(0) == 0:
        tl.store(_square(scores, chunk, C), score_CC)
    o_CV = tl.dot(q_CK, _tile(starts + chunk * K * V, row_K, row_K < K, v0, V, BV), input_precision=PRECISION) * scale
    if DECAYS:
        o_CV *= tl.load(gate + C)[:, None]
    u_CV = _tile(e + token * V, row_C, there_C, v0, V, BV).to(tl.float32) * tl.load(gate)[:, None]
    o_CV = tl.dot(score_CC, u_CV.to(q_CK.dtype), acc=o_CV, input_precision=PRECISION)
    _put(o + token * V, row_C, there_C, v0, V, o_CV)


@triton.jit
def _walk_back(
    q, k, do, inverse, scores, gates, dlast, dv, dends, dfirst, T, N, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DECAYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    v0, m = tl.program_id(0) * BV, tl.program_id(1)
    head = m.to(tl.int64)
    i, row_K = tl.arange(0, C), tl.arange(0, BK)
    there_K = row_K < K
    dS_KV = _tile(dlast + head * K * V, row_K, there_K, v0, V, BV)
    for back in range(N):
        n = N - 1 - back
        chunk = head * N + n
        token, row_C, there_C = _rows(n, m, T, H, C)
        gate = gates + chunk * GATES * C + i
        k_CK = _tile(k + token * K, row_C, there_C, 0, K, BK)
        do_CV = _tile(do + token * V, row_C, there_C, v0, V, BV)
        dend_KV = dS_KV.to(k_CK.dtype)
        _put(dends + chunk * K * V, row_K, there_K, v0, V, dend_KV)
        du_CV = tl.dot(k_CK, dend_KV, input_precision=PRECISION)
        if DECAYS:
            du_CV *= tl.load(gate + 2 * C)[:, None]
        du_CV = tl.dot(tl.trans(tl.load(_square(scores, chunk, C))), do_CV, acc=du_CV, input_precision=PRECISION)
        du_CV *= tl.load(gate)[:, None]
        transposed_CC = tl.trans(tl.load(_square(inverse, chunk, C)))
        dv_CV = tl.dot(transposed_CC, du_CV.to(k_CK.dtype), acc=du_CV, input_precision=PRECISION)
        _put(dv + token * V, row_C, there_C, v0, V, dv_CV)

        q_CK = _tile(q + token * K, row_C, there_C, 0, K, BK)
        do_CV = do_CV.to(tl.float32) * scale
        dv_CV = -dv_CV
        if DECAYS:
            c_C = tl.load(gate + C)
            do_CV *= c_C[:, None]
            dv_CV *= c_C[:, None]
            dS_KV *= tl.load(gates + chunk * GATES * C + 2 * C - 1)
        dS_KV = tl.dot(tl.trans(q_CK), do_CV.to(k_CK.dtype), acc=dS_KV, input_precision=PRECISION)
        dS_KV = tl.dot(tl.trans(k_CK), dv_CV.to(k_CK.dtype), acc=dS_KV, input_precision=PRECISION)
    _put(dfirst + head * K * V, row_K, there_K, v0, V, dS_KV)


@triton.jit
def _within_back(
    q, k, do, dv, e, starts, dends, overlaps, scores, gates, dq, dk, dbeta, dlog_decay, T, N, part_size, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, TILES: tl.constexpr, DECAYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    part, n, m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    chunk = m.to(tl.int64) * N + n
    i, row_K = tl.arange(0, C), part * BK + tl.arange(0, BK)
    there_K = row_K < K
    token, row_C, there_C = _rows(n, m, T, H, C)

    read_CC = tl.zeros((C, C), tl.float32)
    solved_CC = tl.zeros((C, C), tl.float32)
    dq_CK = tl.zeros((C, BK), tl.float32)
    dk_start_CK = tl.zeros((C, BK), tl.float32)
    dk_end_CK = tl.zeros((C, BK), tl.float32)
    for tile in range(TILES):
        v0 = tile * BV
        do_CV = _tile(do + token * V, row_C, there_C, v0, V, BV)
        e_CV = _tile(e + token * V, row_C, there_C, v0, V, BV)
        dv_CV = _tile(dv + token * V, row_C, there_C, v0, V, BV)
        start_KV = _tile(starts + chunk * K * V, row_K, there_K, v0, V, BV)
        dend_KV = _tile(dends + chunk * K * V, row_K, there_K, v0, V, BV)
        read_CC = tl.dot(do_CV, tl.trans(e_CV), acc=read_CC, input_precision=PRECISION)
        solved_CC = tl.dot(dv_CV, tl.trans(e_CV), acc=solved_CC, input_precision=PRECISION)
        dq_CK = tl.dot(do_CV, tl.trans(start_KV), acc=dq_CK, input_precision=PRECISION)
        dk_start_CK = tl.dot(dv_CV, tl.trans(start_KV), acc=dk_start_CK, input_precision=PRECISION)
        dk_end_CK = tl.dot(e_CV, tl.trans(dend_KV), acc=dk_end_CK, input_precision=PRECISION)

    k_CK = _tile(k + token * K, row_C, there_C, part * BK, K, BK)
    gate = gates + chunk * GATES * C + i
    beta_C = tl.load(gate)
    if DECAYS:
        dk_end_CK *= tl.load(gate + 2 * C)[:, None]
    through_C = tl.sum(k_CK.to(tl.float32) * dk_end_CK, 1)
    if DECAYS:
        c_C = tl.load(gate + C)
        dk_start_CK *= c_C[:, None]
        since_C = -tl.sum(k_CK.to(tl.float32) * dk_start_CK, 1)
    dk_CK = dk_end_CK * beta_C[:, None] - dk_start_CK
    q_CK = _tile(q + token * K, row_C, there_C, part * BK, K, BK)
    if DECAYS:
        dq_CK *= (scale * c_C)[:, None]
        since_C += tl.sum(q_CK.to(tl.float32) * dq_CK, 1)
    else:
        dq_CK *= scale

    # What reaches Q K^T and K K^T
    if DECAYS:
        between_CC = _between(tl.load(gate + 3 * C), tl.load(gate + 4 * C)) * beta_C[None, :]
    else:
        between_CC = tl.where(i[:, None] >= i[None, :], beta_C[None, :], 0.0)
    dscore_CC = (read_CC * between_CC * scale).to(k_CK.dtype)
    dq_CK = tl.dot(dscore_CC, k_CK, acc=dq_CK, input_precision=PRECISION)
    _put(dq + token * K, row_C, there_C, part * BK, K, dq_CK)
    dk_CK = tl.dot(tl.trans(dscore_CC), q_CK, acc=dk_CK, input_precision=PRECISION)
    doverlap_CC = tl.where(i[:, None] > i[None, :], -solved_CC * between_CC, 0.0).to(k_CK.dtype)
    dk_CK = tl.dot(doverlap_CC, k_CK, acc=dk_CK, input_precision=PRECISION)
    dk_CK = tl.dot(tl.trans(doverlap_CC), k_CK, acc=dk_CK, input_precision=PRECISION)
    _put(dk + token * K, row_C, there_C, part * BK, K, dk_CK)

    # Gates: every part has its share of sums over keys; sums over pairs of tokens are the first part's.
    dbeta_C = through_C
    if DECAYS:
        # Token j is in the decay from s to t when s < j <= t: sums over what it is in, and no differences, so 0 stays 0.
        reached_CC = tl.where(i[:, None] >= i[None, :], since_C[:, None], (through_C * beta_C)[:, None])
    if part == 0:
        pairs_CC = tl.load(_square(scores, chunk, C)).to(tl.float32) * read_CC
        pairs_CC -= tl.load(_square(overlaps, chunk, C)).to(tl.float32) * solved_CC
        dbeta_C += tl.sum(pairs_CC, 0)
        if DECAYS:
            pairs_CC = tl.where(i[:, None] > i[None, :], pairs_CC * beta_C[None, :], 0.0)
            reached_CC += tl.where(i[:, None] >= i[None, :], tl.cumsum(pairs_CC, 1) - pairs_CC, 0.0)
    tl.store(dbeta + part * part_size + token + row_C, dbeta_C, mask=there_C)
    if DECAYS:
        kept_KV = tl.zeros((BK, BV), tl.float32)
        for tile in range(TILES):
            start_KV = _tile(starts + chunk * K * V, row_K, there_K, tile * BV, V, BV)
            dend_KV = _tile(dends + chunk * K * V, row_K, there_K, tile * BV, V, BV)
            kept_KV += start_KV.to(tl.float32) * dend_KV.to(tl.float32)
        kept = tl.sum(kept_KV) * tl.load(gates + chunk * GATES * C + 2 * C - 1)
        tl.store(dlog_decay + part * part_size + token + row_C, tl.sum(reached_CC, 0) + kept, mask=there_C)


def forward(q, k, v, beta, log_decay, S_BHKV, *, scale, chunk):
    dtype = v.dtype
    q, k, v = operands(q, k, v)
    beta, S_BHKV = beta.contiguous(), S_BHKV.contiguous()
    log_decay = None if log_decay is None else log_decay.contiguous()
    (B, T, H, K), V, C = q.shape, v.shape[-1], chunk
    M, N = B * H, divide_up(T, C)
    overlaps, inverse, scores = (q.new_empty(M, N, C, C) for _ in range(3))
    gates, starts = q.new_empty(M, N, GATES.value, C, dtype=torch.float32), q.new_empty(M, N, K, V)
    o, e, last = torch.empty_like(v), torch.empty_like(v), torch.empty_like(S_BHKV)
    shared = {"H": H, "K": K, "V": V, "C": C, "DECAYS": log_decay is not None, "PRECISION": dot_precision(q.dtype)}

    tile = fitted("triangles", q.dtype, K, V)
    launch(_triangles, (N, M), k, beta, log_decay, overlaps, inverse, gates, T, INVERSE=INVERSE[q.dtype], **shared, **tile)
    tile = fitted("walk", q.dtype, K, V)
    launch(_walk, (divide_up(V, tile["BV"]), M), k, v, inverse, gates, S_BHKV, e, starts, last, T, N, **shared, **tile)
    tile = fitted("read", q.dtype, K, V)
    grid = (divide_up(V, tile["BV"]), N, M)
    launch(_read, grid, q, k, e, starts, gates, scores, o, T, N, scale, **shared, **tile)
    return (o.to(dtype), last), (overlaps, inverse, scores, gates, e, starts)


def backward(inputs, residuals, gradients, *, scale, chunk):
    q, k, v, beta, log_decay, S_BHKV = inputs
    overlaps, inverse, scores, gates, e, starts = residuals
    dtypes = q.dtype, k.dtype, v.dtype
    do, dlast = gradients[0], gradients[1].contiguous()
    q, k, do = (x.to(e.dtype).contiguous() for x in (q, k, do))
    (B, T, H, K), V, C = q.shape, v.shape[-1], chunk
    M, N = B * H, divide_up(T, C)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(do)
    dends, dfirst = torch.empty_like(starts), torch.empty_like(dlast)
    shared = {"H": H, "K": K, "V": V, "C": C, "DECAYS": log_decay is not None, "PRECISION": dot_precision(q.dtype)}

    tile = fitted("walk_back", q.dtype, K, V)
    grid = (divide_up(V, tile["BV"]), M)
    launch(_walk_back, grid, q, k, do, inverse, scores, gates, dlast, dv, dends, dfirst, T, N, scale, **shared, **tile)
    tile = fitted("within_back", q.dtype, K, V)
    parts = divide_up(K, tile["BK"])
    dbeta = torch.empty(parts, B, T, H, dtype=torch.float32, device=q.device)
    dlog_decay = None if log_decay is None else torch.empty_like(dbeta)
    given = (q, k, do, dv, e, starts, dends, overlaps, scores, gates, dq, dk, dbeta, dlog_decay)
    options = {"TILES": divide_up(V, tile["BV"]), **shared, **tile}
    launch(_within_back, (parts, N, M), *given, T, N, B * T * H, scale, **options)
    dq, dk, dv = (x.to(dtype) for x, dtype in zip((dq, dk, dv), dtypes, strict=True))
    return dq, dk, dv, dbeta.sum(0), None if log_decay is None else dlog_decay.sum(0), dfirst


differentiable = arrays.custom_gradient(forward, backward, outputs=2)


def operands(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """In one dtype: bfloat16 where all of them are, else float32."""
    dtype = torch.bfloat16 if all(x.dtype == torch.bfloat16 for x in tensors) else torch.float32
    return [x.to(dtype).contiguous() for x in tensors]


@functools.cache
def fitted(kernel: str, dtype: torch.dtype, K: int, V: int) -> dict[str, int]:
    """The kernel's tiles and how it is compiled, for these sizes: powers of two, at least what tl.dot takes."""
    tile = {"BK": 256} | TILES[kernel, dtype]
    filled = {"BK": max(16, next_power_of_2(K)), "BV": max(16, next_power_of_2(V))}
    if min(tile["BK"], filled["BK"]) > 128 and "BV" in tile:
        tile["BV"] //= 2
    return {name: min(size, filled.get(name, size)) for name, size in tile.items()}


def delta_rule(q, k, v, beta, log_decay=None, *, scale=1.0, state=None, segments=None) -> tuple[Array, State]:
    """See `kernels.delta_rule.delta_rule`."""
    options = {"scale": scale, "state": state, "segments": segments, "chunk": CHUNK[operands(q, k, v)[0].dtype]}
    return chunked.delta_rule(q, k, v, beta, log_decay, **options, run=differentiable)
