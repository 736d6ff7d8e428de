"""Palimpsa in Triton, exact: every token's whole state, a few keys and 16 tokens at a time, on tensor cores and never in memory.

States are stored at the starts of chunks of C tokens only. A block of S tokens (its first t is c_t after the start of the block, D_ts
is the decay from s to t) rebuilds, for BK keys at a time, what each of its tokens reads: with M0 the state that the block starts with,

    M_t[k, v] = c_t M0[k, v] + sum_s D_ts k_s[k] v_s[v]       one product [V, s] [s, (k, t)], J likewise with k^2 and beta
    o_t[v] = scale sum_k q_t[k] M_t[k, v] / (prior + J_t[k, v])

Forward all chunks run at once. Backward goes from the last block to the first, with P and Q, the gradients of the states M and J behind
the block, in memory. With r = 1 / (prior + J), L_t = scale do_t r and Z_t = -L_t M_t r, the gradient of M_t by what t itself reads is
q_t L_t, that of J_t q_t Z_t. The block has one slot more than tokens: its end, with L = P, Z = Q, q = 1 and no write, so that

    dv_s = sum_{k, t} q_t D_ts k_s L_t    dbeta_s = sum_{k, t} q_t D_ts k_s^2 Z_t    P <- sum_t q_t c_t L_t    Q <- sum_t q_t c_t Z_t
    N_ts[k] = sum_v L_t v_s    O_ts[k] = sum_v Z_t beta_s    dk_s = sum_t q_t D_ts (N_ts + 2 k_s O_ts)
    dq_t = c_t sum_v L_t M0 + sum_s D_ts k_s N_ts
    G_ts = sum_k q_t D_ts k_s (N_ts + k_s O_ts)    g_t = sum_k q_t c_t sum_v (L_t M0 + Z_t J0)

hold the state's gradient too, and the log decay of token i gets sum_{s < i <= t} G_ts + sum_{i <= t} g_t: only what crosses i, so that
nothing cancels.
What a block starts with is made for all keys beforehand, from the chunk's start, and kept in memory for the block's time.
Decays are masked where a document ends (`kernels.tiles`). bfloat16: the products' operands are rounded to it, sums and states are float32.

Shapes: B batch, T time, H heads, K key size, V value size (tiles of BV), N chunks, C chunk length, S slots of a block, BK keys at
once (WK: of a block's first states).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import arrays, launch
from kernels.palimpsa import chunked
from kernels.palimpsa.reference import State
from kernels.tiles import decay_sums

C, S = 32, 16
KEYS = {torch.bfloat16: (8, 4), torch.float32: (4, 2)}  # at once, forward and backward: what registers hold


@triton.jit
def _reciprocal(x, INTERPRETED: tl.constexpr):
    """1 / x for x of any normal size, to an ulp: one instruction, where a division takes eight."""
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _since_first(log_decay_C):
    """(sum_C, document_C, first): `decay_sums` behind the first token, whose own log decay is apart: no decay between tokens has it."""
    is_first = tl.arange(0, log_decay_C.shape[0]) == 0
    sum_C, document_C = decay_sums(tl.where(is_first, 0.0, log_decay_C))
    return sum_C, document_C, tl.sum(tl.where(is_first, log_decay_C, 0.0), 0)


@triton.jit
def _to_end(log_decay_C):
    """(weight_C, all): the decay from each token to the last one, and from before the first."""
    sum_C, document_C, first = _since_first(log_decay_C)
    is_last = tl.arange(0, log_decay_C.shape[0]) == log_decay_C.shape[0] - 1
    last = tl.sum(tl.where(is_last, sum_C, 0.0), 0)
    document = tl.sum(tl.where(is_last, document_C, 0), 0)
    lives = document_C == document
    return tl.where(lives, tl.exp(tl.where(lives, last - sum_C, 0.0)), 0.0), tl.where(document == 0, tl.exp(first + last), 0.0)


@triton.jit
def _inside(log_decay_S):
    """(D_ST, c_T): the decay from slot s (row) to slot t, 0 for s > t; and from before the first slot to t."""
    sum_S, document_S, first = _since_first(log_decay_S)
    slot = tl.arange(0, log_decay_S.shape[0])
    seen = (slot[:, None] <= slot[None, :]) & (document_S[:, None] == document_S[None, :])
    D_ST = tl.where(seen, tl.exp(tl.where(seen, sum_S[None, :] - sum_S[:, None], 0.0)), 0.0)
    return D_ST, tl.where(document_S == 0, tl.exp(first + sum_S), 0.0)


@triton.jit
def _spread(D_ST, BK: tl.constexpr):
    """[BK, S, S]: D_ts for every key. A product with the identity: it lies in registers as products do, and what it multiplies too."""
    S: tl.constexpr = D_ST.shape[0]
    D_XS = tl.reshape(tl.broadcast_to(tl.trans(D_ST)[None, :, :], [BK, S, S]), [BK * S, S])
    one_SS = tl.where(tl.arange(0, S)[:, None] == tl.arange(0, S)[None, :], 1.0, 0.0)
    return tl.reshape(tl.dot(D_XS, one_SS, input_precision="tf32x3"), [BK, S, S])


@triton.jit
def _moved(M_VK, J_VK, v_VC, beta_VC, k_CK, weight_C, kept, PRECISION: tl.constexpr):
    """Both states after tokens that write k v and k^2 beta, each decayed by weight_C until then, and what was before by `kept`."""
    written_CK = k_CK * weight_C[:, None]
    M_VK = tl.dot(v_VC, written_CK.to(v_VC.dtype), kept * M_VK, input_precision=PRECISION)
    J_VK = tl.dot(beta_VC, (written_CK * k_CK).to(v_VC.dtype), kept * J_VK, input_precision=PRECISION)
    return M_VK, J_VK


@triton.jit
def _importance(v_VS, beta_VS, W_KTS, W2_KTS, M0_VK, J0_VK, c_T, prior, PRECISION: tl.constexpr):
    """M_t and prior + J_t [BV, BK, S] of every slot t of a block."""
    BV: tl.constexpr = v_VS.shape[0]
    BK: tl.constexpr = W_KTS.shape[0]
    S: tl.constexpr = W_KTS.shape[2]
    M = tl.reshape(c_T[None, None, :] * M0_VK[:, :, None], [BV, BK * S])
    J = tl.reshape(c_T[None, None, :] * J0_VK[:, :, None] + prior, [BV, BK * S])
    M = tl.dot(v_VS, tl.trans(tl.reshape(W_KTS.to(v_VS.dtype), [BK * S, S])), M, input_precision=PRECISION)
    J = tl.dot(beta_VS, tl.trans(tl.reshape(W2_KTS.to(v_VS.dtype), [BK * S, S])), J, input_precision=PRECISION)
    return tl.reshape(M, [BV, BK, S]), tl.reshape(J, [BV, BK, S])


@triton.jit
def _wide(x_VK, S: tl.constexpr):
    """[BV, S]: key i in column 2 i, zeros between and behind: as many columns as the tensor cores want."""
    BV: tl.constexpr = x_VK.shape[0]
    BK: tl.constexpr = x_VK.shape[1]
    x = tl.reshape(tl.join(x_VK, tl.zeros_like(x_VK)), [BV, 2 * BK])
    if 2 * BK < S:
        x = tl.reshape(tl.trans(tl.join(x, tl.zeros_like(x)), 0, 2, 1), [BV, 4 * BK])
    if 4 * BK < S:
        x = tl.reshape(tl.trans(tl.join(x, tl.zeros_like(x)), 0, 2, 1), [BV, 8 * BK])
    return x


@triton.jit
def _narrow(x_VS, BK: tl.constexpr):
    """[BV, BK]: undoes `_wide`."""
    x = tl.reshape(x_VS, [x_VS.shape[0], x_VS.shape[1] // (2 * BK), BK, 2])
    return tl.sum(tl.sum(x, 3), 1)


@triton.jit
def _inside_of(x, N, SIZE: tl.constexpr):
    """x < N, known to be true where tiles of SIZE fill N."""
    if N % SIZE == 0:
        return x == x
    return x < N


@triton.jit
def starts_kernel(
    k, v, beta, log_decay, M_first, J_first, M_starts, J_starts, M_last, J_last, T, H, K, V, N,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The states at the start of every chunk [B, H, N, K, V], and the last ones."""
    bh = tl.program_id(2).to(tl.int64)
    row = bh // H * T * H + bh % H
    dtype = k.dtype.element_ty
    v_V, k_K = tl.program_id(0) * BV + tl.arange(0, BV), tl.program_id(1) * BK + tl.arange(0, BK)
    in_V, in_K = v_V < V, k_K < K
    place_VK, in_VK = k_K[None, :] * V + v_V[:, None], in_V[:, None] & in_K[None, :]
    M = tl.load(M_first + bh * K * V + place_VK, mask=in_VK, other=0.0)
    J = tl.load(J_first + bh * K * V + place_VK, mask=in_VK, other=0.0)
    for n in range(0, N):
        at = (bh * N + n) * K * V
        tl.store(M_starts + at + place_VK, M, mask=in_VK)
        tl.store(J_starts + at + place_VK, J, mask=in_VK)
        t_C = n * C + tl.arange(0, C)
        in_C = t_C < T
        rows_C = row + t_C.to(tl.int64) * H
        weight_C, kept = _to_end(tl.load(log_decay + rows_C, mask=in_C, other=0.0))
        k_CK = tl.load(k + rows_C[:, None] * K + k_K[None, :], mask=in_C[:, None] & in_K[None, :], other=0.0).to(tl.float32)
        v_VC = tl.load(v + rows_C[None, :] * V + v_V[:, None], mask=in_V[:, None] & in_C[None, :], other=0.0)
        beta_VC = tl.load(beta + rows_C[None, :] * V + v_V[:, None], mask=in_V[:, None] & in_C[None, :], other=0.0).to(dtype)
        M, J = _moved(M, J, v_VC, beta_VC, k_CK, weight_C, kept, PRECISION)
    tl.store(M_last + bh * K * V + place_VK, M, mask=in_VK)
    tl.store(J_last + bh * K * V + place_VK, J, mask=in_VK)


@triton.jit
def _begin(
    k, v, beta, log_decay, M_starts, J_starts, M_block, J_block, tokens, v_V, in_V, H, K, V,
    C: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes the states after `tokens` tokens of a chunk to M_block, J_block [K, V]; all pointers are those of the chunk."""
    chunk = tl.arange(0, C)
    before = chunk < tokens
    weight_C, kept = _to_end(tl.load(log_decay + chunk * H, mask=before, other=0.0))
    place_VC, in_VC = chunk[None, :] * (H * V) + v_V[:, None], in_V[:, None] & before[None, :]
    v_VC = tl.load(v + place_VC, mask=in_VC, other=0.0)
    beta_VC = tl.load(beta + place_VC, mask=in_VC, other=0.0).to(v_VC.dtype)
    for k0 in range(0, K, BK):
        k_K = k0 + tl.arange(0, BK)
        in_K = _inside_of(k_K, K, BK)
        place_VK, in_VK = k_K[None, :] * V + v_V[:, None], in_V[:, None] & in_K[None, :]
        M = tl.load(M_starts + place_VK, mask=in_VK, other=0.0)
        J = tl.load(J_starts + place_VK, mask=in_VK, other=0.0)
        k_CK = tl.load(k + chunk[:, None] * (H * K) + k_K[None, :], mask=before[:, None] & in_K[None, :], other=0.0).to(tl.float32)
        M, J = _moved(M, J, v_VC, beta_VC, k_CK, weight_C, kept, PRECISION)
        tl.store(M_block + place_VK, M, mask=in_VK)
        tl.store(J_block + place_VK, J, mask=in_VK)
    tl.debug_barrier()  # before other threads read them


@triton.jit
def _keys(q, k, M_block, J_block, in_S, v_V, in_V, k_K, in_K, H, K, V):
    """q, k [BK, S] of a block and the states M, J [BV, BK] that it starts with, for some keys."""
    place_KS, in_KS = tl.arange(0, in_S.shape[0])[None, :] * (H * K) + k_K[:, None], in_S[None, :] & in_K[:, None]
    place_VK, in_VK = k_K[None, :] * V + v_V[:, None], in_V[:, None] & in_K[None, :]
    q_KS, k_KS = tl.load(q + place_KS, mask=in_KS, other=0.0), tl.load(k + place_KS, mask=in_KS, other=0.0)
    return q_KS, k_KS, tl.load(M_block + place_VK, mask=in_VK, other=0.0), tl.load(J_block + place_VK, mask=in_VK, other=0.0)


@triton.jit
def outputs_kernel(
    q, k, v, beta, log_decay, prior, M_starts, J_starts, M_block, J_block, o, scale, T, N,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, S: tl.constexpr, BK: tl.constexpr, WK: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """o [B, T, H, V] of one chunk and one tile of values."""
    n, bh = tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = bh // H * T * H + bh % H + n.to(tl.int64) * C * H  # of the chunk's first token
    dtype = q.dtype.element_ty
    v_V = tl.program_id(0) * BV + tl.arange(0, BV)
    in_V = _inside_of(v_V, V, BV)
    at = (bh * N + n) * K * V
    prior_h = tl.load(prior + bh % H)
    slot = tl.arange(0, S)
    place_VS = slot[None, :] * (H * V) + v_V[:, None]
    for j in range(0, tl.cdiv(tl.minimum(C, T - n * C), S)):
        M_at, J_at = M_starts + at, J_starts + at
        if j > 0:
            M_at, J_at = M_block + at, J_block + at
            _begin(
                k + row * K, v + row * V, beta + row * V, log_decay + row, M_starts + at, J_starts + at, M_at, J_at, j * S, v_V, in_V,
                H, K, V, C, WK, PRECISION,
            )  # fmt: skip
        first = row + j * S * H
        in_S = slot < T - n * C - j * S
        in_VS = in_V[:, None] & in_S[None, :]
        D_ST, c_T = _inside(tl.load(log_decay + first + slot * H, mask=in_S, other=0.0))
        D_KTS = _spread(D_ST, BK)
        v_VS = tl.load(v + first * V + place_VS, mask=in_VS, other=0.0)
        beta_VS = tl.load(beta + first * V + place_VS, mask=in_VS, other=0.0).to(dtype)
        o_VT = tl.zeros([BV, S], tl.float32)
        k_K = tl.arange(0, BK)
        q_1, k_1, M_1, J_1 = _keys(q + first * K, k + first * K, M_at, J_at, in_S, v_V, in_V, k_K, k_K < K, H, K, V)
        for k0 in range(0, K, BK):
            q_KT, k_KS, M0, J0 = q_1.to(tl.float32), k_1.to(tl.float32), M_1, J_1
            k_K = k0 + BK + tl.arange(0, BK)  # the next ones, on their way meanwhile
            q_1, k_1, M_1, J_1 = _keys(q + first * K, k + first * K, M_at, J_at, in_S, v_V, in_V, k_K, k_K < K, H, K, V)
            W_KTS = D_KTS * k_KS[:, None, :]
            M, I = _importance(v_VS, beta_VS, W_KTS, W_KTS * k_KS[:, None, :], M0, J0, c_T, prior_h, PRECISION)
            o_VT += tl.sum(M * _reciprocal(I, INTERPRETED) * q_KT[None, :, :], 1)
        tl.store(o + first * V + place_VS, (scale * o_VT).to(dtype), mask=in_VS)
        tl.debug_barrier()  # M_block and J_block are read


@triton.jit
def gradients_kernel(
    q, k, v, beta, log_decay, prior, M_starts, J_starts, M_block, J_block, do, P, Q, dq, dk, dv, dbeta, dlog_decay, dprior,
    scale, T, N, BH, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, S: tl.constexpr, BK: tl.constexpr,
    WK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """All gradients for one tile of values, whose share of dq, dk, dlog_decay [tiles, B, T, H, ...] and dprior [tiles, B, H] it writes.

    P, Q [B, H, K, V]: gradients of the last state before, of the first one afterwards.
    """
    tile, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = bh // H * T * H + bh % H
    share = tile.to(tl.int64) * (BH // H) * T * H
    dtype = q.dtype.element_ty
    v_V = tile * BV + tl.arange(0, BV)
    in_V = _inside_of(v_V, V, BV)
    P += bh * K * V
    Q += bh * K * V
    M_block += bh * K * V
    J_block += bh * K * V
    prior_h = tl.load(prior + bh % H)
    TOKENS: tl.constexpr = S - 1
    slot = tl.arange(0, S)
    is_end = slot == TOKENS
    is_own = 2 * tl.arange(0, BK)[:, None, None] == slot[None, None, :]  # as `_wide` has it
    place_VS = slot[None, :] * (H * V) + v_V[:, None]
    dprior_h = 0.0
    for back in range(0, tl.cdiv(T, TOKENS)):
        t0 = (tl.cdiv(T, TOKENS) - 1 - back) * TOKENS
        n = t0 // C
        rows_C, rows_S = row + (n * C).to(tl.int64) * H, row + t0.to(tl.int64) * H  # of the chunk's and of the block's first token
        at = (bh * N + n) * K * V
        _begin(
            k + rows_C * K, v + rows_C * V, beta + rows_C * V, log_decay + rows_C, M_starts + at, J_starts + at, M_block, J_block,
            t0 - n * C, v_V, in_V, H, K, V, C, WK, PRECISION,
        )  # fmt: skip
        in_S = (slot < T - t0) & (slot < TOKENS)
        D_ST, c_T = _inside(tl.load(log_decay + rows_S + slot * H, mask=in_S, other=0.0))
        D_KTS = _spread(D_ST, BK)
        in_VS = in_V[:, None] & in_S[None, :]
        v_VS = tl.load(v + rows_S * V + place_VS, mask=in_VS, other=0.0)
        # the end's slot writes nothing (its k is 0), so its beta is free: with 1 there, O sums Z over the values, as dprior needs
        beta_VS = tl.where(is_end[None, :], 1.0, tl.load(beta + rows_S * V + place_VS, mask=in_VS, other=0.0)).to(dtype)
        do_VT = scale * tl.load(do + rows_S * V + place_VS, mask=in_VS, other=0.0).to(tl.float32)
        dv_VS, dbeta_VS = tl.zeros([BV, S], tl.float32), tl.zeros([BV, S], tl.float32)
        G_KTS, g_KT = tl.zeros([BK, S, S], tl.float32), tl.zeros([BK, S], tl.float32)
        for k0 in range(0, K, BK):
            k_K = k0 + tl.arange(0, BK)
            in_K = _inside_of(k_K, K, BK)
            place_VK, in_VK = k_K[None, :] * V + v_V[:, None], in_V[:, None] & in_K[None, :]
            P_VK = tl.load(P + place_VK, mask=in_VK, other=0.0)
            Q_VK = tl.load(Q + place_VK, mask=in_VK, other=0.0)
            q_KT, k_KS, M0, J0 = _keys(q + rows_S * K, k + rows_S * K, M_block, J_block, in_S, v_V, in_V, k_K, in_K, H, K, V)
            q_KT, k_KS = tl.where(is_end[None, :], 1.0, q_KT.to(tl.float32)), k_KS.to(tl.float32)
            k_K1S, q_KT1 = k_KS[:, None, :], q_KT[:, :, None]
            W_KTS = D_KTS * k_K1S
            M, I = _importance(v_VS, beta_VS, W_KTS, W_KTS * k_K1S, M0, J0, c_T, prior_h, PRECISION)

            r = _reciprocal(I, INTERPRETED)
            X = M * r
            L = do_VT[:, None, :] * r
            Z = -X * L
            L = tl.reshape(tl.where(is_end[None, None, :], P_VK[:, :, None], L).to(dtype), [BV, BK * S])
            Z = tl.reshape(tl.where(is_end[None, None, :], Q_VK[:, :, None], Z).to(dtype), [BV, BK * S])

            qW_KTS = q_KT1 * W_KTS
            dv_VS = tl.dot(L, tl.reshape(qW_KTS.to(dtype), [BK * S, S]), dv_VS, input_precision=PRECISION)
            dbeta_VS = tl.dot(Z, tl.reshape((qW_KTS * k_K1S).to(dtype), [BK * S, S]), dbeta_VS, input_precision=PRECISION)
            to_start = tl.where(is_own, (c_T[None, :] * q_KT)[:, :, None], 0.0 * qW_KTS)
            to_start = tl.reshape(to_start.to(dtype), [BK * S, S])
            tl.store(P + place_VK, _narrow(tl.dot(L, to_start, input_precision=PRECISION), BK), mask=in_VK)
            tl.store(Q + place_VK, _narrow(tl.dot(Z, to_start, input_precision=PRECISION), BK), mask=in_VK)

            L_TV, Z_TV = tl.trans(L), tl.trans(Z)
            N_KTS = tl.reshape(tl.dot(L_TV, v_VS, input_precision=PRECISION), [BK, S, S])
            O_KTS = tl.reshape(tl.dot(Z_TV, beta_VS, input_precision=PRECISION), [BK, S, S])
            NM_KTS = tl.reshape(tl.dot(L_TV, _wide(M0.to(dtype), S), input_precision=PRECISION), [BK, S, S])
            OJ_KTS = tl.reshape(tl.dot(Z_TV, _wide(J0.to(dtype), S), input_precision=PRECISION), [BK, S, S])
            NM_KT = c_T[None, :] * tl.sum(tl.where(is_own, NM_KTS, 0.0), 2)
            g_KT += q_KT * (NM_KT + c_T[None, :] * tl.sum(tl.where(is_own, OJ_KTS, 0.0), 2))
            kO_KTS = k_K1S * O_KTS
            G_KTS += tl.where(is_end[None, None, :], q_KT1 * O_KTS, qW_KTS * (N_KTS + kO_KTS))
            dq_KT = tl.sum(W_KTS * N_KTS, 2) + NM_KT
            dk_KS = tl.sum(D_KTS * q_KT1 * (N_KTS + 2.0 * kO_KTS), 1)
            place_KS, in_KS = slot[None, :] * (H * K) + k_K[:, None], in_S[None, :] & in_K[:, None]
            tl.store(dq + (share + rows_S) * K + place_KS, dq_KT, mask=in_KS)
            tl.store(dk + (share + rows_S) * K + place_KS, dk_KS, mask=in_KS)
        tl.store(dv + rows_S * V + place_VS, dv_VS.to(dtype), mask=in_VS)
        tl.store(dbeta + rows_S * V + place_VS, dbeta_VS, mask=in_VS)
        G_TS, g_T = tl.sum(G_KTS, 0), tl.sum(g_KT, 0)
        dprior_h += tl.sum(tl.where(is_end[None, :] & (slot[:, None] < TOKENS), G_TS, 0.0))
        # token s + 1 is in the decay from each token up to s, and from the block's start, to each slot behind s
        behind = tl.where(slot[:, None] > slot[None, :], tl.cumsum(tl.where(is_end[None, :], 0.0, G_TS), 1) + g_T[:, None], 0.0)
        place_T = share + rows_S + slot * H
        tl.store(dlog_decay + place_T + H, tl.sum(behind, 0), mask=(slot < T - t0 - 1) & (slot < TOKENS - 1))
        tl.store(dlog_decay + place_T, tl.sum(g_T, 0), mask=slot == 0)
        tl.debug_barrier()  # P and Q, before other threads read them
    tl.store(dprior + tile * BH + bh, dprior_h)


def palimpsa(q, k, v, beta, log_decay, prior, *, scale=1.0, state=None, segments=None) -> tuple[torch.Tensor, State]:
    """See `kernels.palimpsa.palimpsa`."""
    return chunked.gated(differentiable, q, k, v, beta, log_decay, prior, state, segments, scale=float(scale))


def forward(q, k, v, beta, log_decay, prior, M, J, *, scale):
    q, k, v, beta, log_decay, prior, M, J = (x.contiguous() for x in (q, k, v, beta, log_decay, prior, M, J))
    B, T, H, K, V, N, BV = _sizes(q, v)
    M_starts, J_starts = (M.new_empty((B, H, N, K, V)) for _ in range(2))
    o, M_last, J_last = torch.empty_like(v), torch.empty_like(M), torch.empty_like(J)
    precision = launch.dot_precision(q.dtype)
    wide, keys = min(32, _power(K)), KEYS[q.dtype][0]
    launch.launch(
        starts_kernel, (launch.divide_up(V, BV), launch.divide_up(K, wide), B * H),
        k, v, beta, log_decay, M, J, M_starts, J_starts, M_last, J_last, T, H, K, V, N, C=C, BK=wide, BV=BV, PRECISION=precision,
    )  # fmt: skip
    M_block, J_block = torch.empty_like(M_starts), torch.empty_like(J_starts)
    launch.launch(
        outputs_kernel, (launch.divide_up(V, BV), N, B * H),
        q, k, v, beta, log_decay, prior, M_starts, J_starts, M_block, J_block, o, scale, T, N,
        H=H, K=K, V=V, C=C, S=S, BK=keys, WK=wide, BV=BV, PRECISION=precision, INTERPRETED=launch.INTERPRETED, stages=1,
    )  # fmt: skip
    return (o, M_last, J_last), (M_starts, J_starts)


def backward(inputs, residuals, gradients, *, scale):
    q, k, v, beta, log_decay, prior, *_ = (x.contiguous() for x in inputs)
    do, P, Q = gradients[0].contiguous(), *(torch.empty_like(x).copy_(x) for x in gradients[1:])
    B, T, H, K, V, N, BV = _sizes(q, v)
    tiles = launch.divide_up(V, BV)
    shares = lambda *shape: P.new_empty((tiles, B, *shape))  # noqa: E731
    dq, dk, dlog_decay, dprior = shares(T, H, K), shares(T, H, K), shares(T, H), shares(H)
    dv, dbeta, M_block, J_block = (torch.empty_like(x) for x in (v, beta, P, Q))
    launch.launch(
        gradients_kernel, (tiles, B * H),
        q, k, v, beta, log_decay, prior, *residuals, M_block, J_block, do, P, Q, dq, dk, dv, dbeta, dlog_decay, dprior,
        scale, T, N, B * H, H=H, K=K, V=V, C=C, S=S, BK=KEYS[q.dtype][1], WK=min(64 if q.dtype == torch.bfloat16 else 16, _power(K)),
        BV=BV, PRECISION=launch.dot_precision(q.dtype), INTERPRETED=launch.INTERPRETED, stages=1,
    )  # fmt: skip
    return dq.sum(0).to(q.dtype), dk.sum(0).to(k.dtype), dv, dbeta, dlog_decay.sum(0), dprior.sum((0, 1)), P, Q


differentiable = arrays.custom_gradient(forward, backward, outputs=3)


def _sizes(q, v) -> tuple[int, ...]:
    """B, T, H, K, V, chunks, and values of a tile"""
    B, T, H, K = q.shape
    return B, T, H, K, v.shape[-1], launch.divide_up(T, C), min(64, _power(v.shape[-1]))


def _power(n: int) -> int:
    """The least power of two that is at least n and 16, tensor cores' smallest side."""
    return max(16, 1 << (n - 1).bit_length())
