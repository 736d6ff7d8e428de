"""Linear attention inside its chunks, in Triton: one program a chunk and head, given the states between chunks (`walks.py`).

With D the decay inside a chunk, c since its start, e to its end, S the state at its start, D_S the gradient of the one at its end:

    O = scale ((Q K^T * D beta) V + c (Q S))
    dQ = dA K + scale c (dO S^T)      dK = dA^T Q + beta e (V D_S^T)      dV = beta (scale (Q K^T * D)^T dO + e (K D_S))
    dA = scale dO V^T * D beta

The gradient of a log decay is a sum over the pairs of tokens that it lies between, of what each pair adds; never a difference of sums.

With a `Normaliser` (mLSTM) the values have one more column of ones: its read-out w, and o divided by max(|w|, exp(-m)). Backwards every
row of do then has a factor, and w a gradient of its own.

Shapes: B batch, T time, H heads, K key size, V value size, N chunks, C chunk length.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.launch import divide_up, dot_precision, launch
from kernels.linear_attention.walks import Gates, between, since_start, tile, to_end

# By the inputs' dtype: tiles of K and V, warps and stages to read; tiles of K, warps and stages for the gradients of so many values at most.
READ = {torch.bfloat16: (128, 128, 4, 1), torch.float32: (64, 64, 8, 1)}
GRADIENTS = {torch.bfloat16: {128: (64, 4, 2), 256: (64, 8, 1)}, torch.float32: {128: (32, 8, 1)}}


def operands(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """In one dtype: bfloat16 where all of them are, else float32."""
    dtype = torch.bfloat16 if all(x.dtype == torch.bfloat16 for x in tensors) else torch.float32
    return [x.to(dtype).contiguous() for x in tensors]


def parts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[slice]:
    """The values, in as many parts as `gradients` needs."""
    dtype = torch.bfloat16 if q.dtype == k.dtype == v.dtype == torch.bfloat16 else torch.float32
    V, most = v.shape[-1], max(GRADIENTS[dtype])
    return [slice(first, min(first + most, V)) for first in range(0, V, most)]


class Normaliser(NamedTuple):
    """What divides the output: the states of the column of ones at the chunks' starts, and the running maxima."""

    n_starts_BNHK: torch.Tensor
    m_BTH: torch.Tensor


class NormaliserGradient(NamedTuple):
    """Backwards: each token's factor of do, the gradient of w, and the column's states and gradients between the chunks."""

    factor_BTH: torch.Tensor
    dweight_BTH: torch.Tensor
    n_starts_BNHK: torch.Tensor
    dn_ends_BNHK: torch.Tensor


def read(q, k, v, gates: Gates, beta, starts_BNHKV, *, scale: float, chunk: int, normaliser: Normaliser | None = None):
    """o [B, T, H, V] in v's dtype; with a normaliser (o, what o's rounding to bfloat16 lost or None, w [B, T, H] float32)."""
    B, T, H, K = q.shape
    V, N = v.shape[-1], divide_up(T, chunk)
    o = torch.empty_like(v)
    weight = None if normaliser is None else torch.empty_like(normaliser.m_BTH)
    lost = None if normaliser is None or v.dtype == torch.float32 else torch.empty_like(v)
    BK, BV, warps, stages = READ[q.dtype]
    BV = tile(V, BV)
    launch(
        _read,
        (divide_up(V, BV) * N, B * H),
        *(q, k, v, *gates, beta, starts_BNHKV, o, *(normaliser or (None, None)), weight, lost, scale, T),
        **{"H": H, "K": K, "V": V, "C": chunk, "BK": tile(K, BK), "BV": BV, "BETA": beta is not None, "NORMALISED": normaliser is not None},
        **{"DOT": dot_precision(q.dtype), "warps": warps, "stages": stages},
    )
    return o if normaliser is None else (o, lost, weight)


def gradients(
    q, k, v, do, gates: Gates, beta, starts_BNHKV, dends_BNHKV, *, scale: float, chunk: int, normaliser: NormaliserGradient | None = None
):
    """(dq, dk, dv, dlog_decay [B, T, H], dbeta [B, T, H] or None), given the states' gradients at the chunks' ends."""
    B, T, H, K = q.shape
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    dlog_decay = q.new_empty((B, T, H), dtype=torch.float32)
    dbeta = None if beta is None else torch.empty_like(dlog_decay)
    BV = tile(v.shape[-1], 256)
    BK, warps, stages = next(options for most, options in GRADIENTS[q.dtype].items() if BV <= most)
    launch(
        _gradients,
        (divide_up(T, chunk), B * H),
        *(q, k, v, do, *gates, beta, starts_BNHKV, dends_BNHKV, dq, dk, dv, dlog_decay, dbeta, *(normaliser or [None] * 4), scale, T),
        **{"H": H, "K": K, "V": v.shape[-1], "C": chunk, "BK": tile(K, BK), "BV": BV},
        **{"BETA": beta is not None, "NORMALISED": normaliser is not None, "DOT": dot_precision(q.dtype), "warps": warps, "stages": stages},
    )
    return dq, dk, dv, dlog_decay, dbeta


@triton.jit
def _read(
    q, k, v, sums, tags, firsts, beta, starts, o, n_starts, m, weight, lost, scale, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BETA: tl.constexpr, NORMALISED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    tiles_V: tl.constexpr = (V + BV - 1) // BV
    part, n, head = tl.program_id(0) % tiles_V, tl.program_id(0) // tiles_V, tl.program_id(1).to(tl.int64)
    batch, N = head // H, tl.num_programs(0) // tiles_V
    c_C, v_V = tl.arange(0, C), part * BV + tl.arange(0, BV)
    token, state = (batch * T + n * C) * H + head % H, (batch * N + n) * H + head % H
    is_token_C = c_C < T - n * C
    place_CV, inside_CV = c_C[:, None] * (H * V) + v_V[None, :], is_token_C[:, None] & (v_V < V)[None, :]
    v_CV = tl.load(v + token * V + place_CV, mask=inside_CV, other=0.0)

    score_CC = tl.zeros((C, C), tl.float32)
    o_CV = tl.zeros((C, BV), tl.float32)
    if NORMALISED:
        weight_C = tl.zeros((C,), tl.float32)
    for k_first in tl.static_range(0, K, BK):
        k_K = k_first + tl.arange(0, BK)
        place_CK, inside_CK = c_C[:, None] * (H * K) + k_K[None, :], is_token_C[:, None] & (k_K < K)[None, :]
        q_CK = tl.load(q + token * K + place_CK, mask=inside_CK, other=0.0)
        k_CK = tl.load(k + token * K + place_CK, mask=inside_CK, other=0.0)
        S_KV = tl.load(starts + state * K * V + k_K[:, None] * V + v_V[None, :], mask=(k_K < K)[:, None] & (v_V < V)[None, :], other=0.0)
        score_CC = tl.dot(q_CK, tl.trans(k_CK), score_CC, input_precision=DOT)
        o_CV = tl.dot(q_CK, S_KV, o_CV, input_precision=DOT)
        if NORMALISED:
            n_K = tl.load(n_starts + state * K + k_K, mask=k_K < K, other=0.0)
            weight_C += tl.sum(q_CK.to(tl.float32) * n_K[None, :], 1)

    chunk = head * N + n
    sum_C, tag_C, first = tl.load(sums + chunk * C + c_C), tl.load(tags + chunk * C + c_C), tl.load(firsts + chunk)
    since_C = scale * since_start(sum_C, tag_C, first)
    score_CC *= scale * between(sum_C, tag_C)
    if BETA:
        score_CC *= tl.load(beta + token + c_C * H, mask=is_token_C, other=0.0)[None, :]
    high_CC = score_CC.to(v_CV.dtype)
    o_CV = tl.dot(high_CC, v_CV, o_CV * since_C[:, None], input_precision=DOT)
    if lost is not None:  # the gradient of n . q takes o as exact as it can be had
        o_CV = tl.dot((score_CC - high_CC.to(tl.float32)).to(v_CV.dtype), v_CV, o_CV, input_precision=DOT)
    if NORMALISED:
        weight_C = weight_C * since_C + tl.sum(score_CC, 1)
        floor_C = tl.exp(-tl.load(m + token + c_C * H, mask=is_token_C, other=0.0))
        o_CV /= tl.maximum(tl.abs(weight_C), floor_C)[:, None]
        tl.store(weight + token + c_C * H, weight_C, mask=is_token_C & (part == 0))
    high_CV = o_CV.to(o.dtype.element_ty)
    tl.store(o + token * V + place_CV, high_CV, mask=inside_CV)
    if lost is not None:
        tl.store(lost + token * V + place_CV, (o_CV - high_CV.to(tl.float32)).to(lost.dtype.element_ty), mask=inside_CV)


@triton.jit
def _gradients(
    q, k, v, do, sums, tags, firsts, beta, starts, dends, dq, dk, dv, dlog_decay, dbeta, factor, dweight, n_starts, dn_ends, scale, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BETA: tl.constexpr, NORMALISED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    n, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, N = head // H, tl.num_programs(0)
    c_C, v_V = tl.arange(0, C), tl.arange(0, BV)
    token, state = (batch * T + n * C) * H + head % H, (batch * N + n) * H + head % H
    is_token_C = c_C < T - n * C
    place_CV, inside_CV = c_C[:, None] * (H * V) + v_V[None, :], is_token_C[:, None] & (v_V < V)[None, :]
    v_CV = tl.load(v + token * V + place_CV, mask=inside_CV, other=0.0)
    do_CV = tl.load(do + token * V + place_CV, mask=inside_CV, other=0.0)
    score_CC, written_CV = tl.zeros((C, C), tl.float32), tl.zeros((C, BV), tl.float32)
    for k_first in range(0, K, BK):
        k_K = k_first + tl.arange(0, BK)
        place_CK, inside_CK = c_C[:, None] * (H * K) + k_K[None, :], is_token_C[:, None] & (k_K < K)[None, :]
        place_KV, inside_KV = k_K[:, None] * V + v_V[None, :], (k_K < K)[:, None] & (v_V < V)[None, :]
        q_CK = tl.load(q + token * K + place_CK, mask=inside_CK, other=0.0)
        k_CK = tl.load(k + token * K + place_CK, mask=inside_CK, other=0.0)
        dS_KV = tl.load(dends + state * (K * V) + place_KV, mask=inside_KV, other=0.0)
        score_CC = tl.dot(q_CK, tl.trans(k_CK), score_CC, input_precision=DOT)
        written_CV = tl.dot(k_CK, dS_KV, written_CV, input_precision=DOT)

    chunk = head * N + n
    sum_C, tag_C, first = tl.load(sums + chunk * C + c_C), tl.load(tags + chunk * C + c_C), tl.load(firsts + chunk)
    sum_end, tag_end = tl.load(sums + chunk * C + C - 1), tl.load(tags + chunk * C + C - 1)
    since_C, end_C = scale * since_start(sum_C, tag_C, first), to_end(sum_C, tag_C, sum_end, tag_end)
    beta_C = tl.full((C,), 1.0, tl.float32)
    if BETA:
        beta_C = tl.load(beta + token + c_C * H, mask=is_token_C, other=0.0)
    decay_CC = scale * between(sum_C, tag_C)
    dscore_CC, read_CC = tl.dot(do_CV, tl.trans(v_CV), input_precision=DOT), score_CC * decay_CC
    if NORMALISED:
        factor_C = tl.load(factor + token + c_C * H, mask=is_token_C, other=0.0)
        dweight_C = tl.load(dweight + token + c_C * H, mask=is_token_C, other=0.0)
        dbeta_C = tl.sum(read_CC * dweight_C[:, None], 0)
        read_CC *= factor_C[:, None]
        dscore_CC = dscore_CC * factor_C[:, None] + dweight_C[:, None]
    dscore_CC = dscore_CC * decay_CC * beta_C[None, :]
    pairs_CC, dscore_CC = score_CC * dscore_CC, dscore_CC.to(q.dtype.element_ty)
    written_CV = tl.dot(tl.trans(read_CC.to(q.dtype.element_ty)), do_CV, written_CV * end_C[:, None], input_precision=DOT)
    if BETA:
        own_C = tl.sum(written_CV * tl.load(v + token * V + place_CV, mask=inside_CV, other=0.0).to(tl.float32), 1)
    tl.store(dv + token * V + place_CV, (written_CV * beta_C[:, None]).to(dv.dtype.element_ty), mask=inside_CV)
    dlog_decay_C = between_pairs(pairs_CC, DOT)

    after_C, before_C, through = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32), tl.zeros((BK,), tl.float32)
    for k_first in range(0, K, BK):
        k_K = k_first + tl.arange(0, BK)
        place_CK, inside_CK = c_C[:, None] * (H * K) + k_K[None, :], is_token_C[:, None] & (k_K < K)[None, :]
        place_KV, inside_KV = k_K[:, None] * V + v_V[None, :], (k_K < K)[:, None] & (v_V < V)[None, :]
        q_CK = tl.load(q + token * K + place_CK, mask=inside_CK, other=0.0)
        k_CK = tl.load(k + token * K + place_CK, mask=inside_CK, other=0.0)
        S_KV = tl.load(starts + state * (K * V) + place_KV, mask=inside_KV, other=0.0)
        dS_KV = tl.load(dends + state * (K * V) + place_KV, mask=inside_KV, other=0.0)
        through += tl.sum(S_KV.to(tl.float32) * dS_KV.to(tl.float32), 1)
        dq_CK = tl.dot(do_CV, tl.trans(S_KV), input_precision=DOT)
        dk_CK = tl.dot(v_CV, tl.trans(dS_KV), input_precision=DOT)
        if NORMALISED:
            n_K = tl.load(n_starts + state * K + k_K, mask=k_K < K, other=0.0)
            dn_K = tl.load(dn_ends + state * K + k_K, mask=k_K < K, other=0.0)
            through += n_K * dn_K
            dq_CK = dq_CK * factor_C[:, None] + dweight_C[:, None] * n_K[None, :]
            dk_CK += dn_K[None, :]
            dbeta_C += end_C * tl.sum(k_CK.to(tl.float32) * dn_K[None, :], 1)
        dq_CK *= since_C[:, None]
        dk_CK *= (end_C * beta_C)[:, None]
        after_C += tl.sum(q_CK.to(tl.float32) * dq_CK, 1)
        before_C += tl.sum(k_CK.to(tl.float32) * dk_CK, 1)
        dq_CK = tl.dot(dscore_CC, k_CK, dq_CK, input_precision=DOT)
        dk_CK = tl.dot(tl.trans(dscore_CC), q_CK, dk_CK, input_precision=DOT)
        tl.store(dq + token * K + place_CK, dq_CK.to(dq.dtype.element_ty), mask=inside_CK)
        tl.store(dk + token * K + place_CK, dk_CK.to(dk.dtype.element_ty), mask=inside_CK)

    if BETA:
        tl.store(dbeta + token + c_C * H, dbeta_C + own_C if NORMALISED else own_C, mask=is_token_C)
    dlog_decay_C += across_chunks(after_C, before_C) + since_start(sum_end, tag_end, first) * tl.sum(through, 0)
    tl.store(dlog_decay + token + c_C * H, dlog_decay_C, mask=is_token_C)


@triton.jit
def between_pairs(pairs_CC, DOT: tl.constexpr):
    """[C]: for each token i the sum of the pairs (t, s) with s < i <= t, those that its decay lies between."""
    C: tl.constexpr = pairs_CC.shape[0]
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    if DOT == "ieee":  # bfloat16 inputs: the pairs in two parts, so that the sum is nearly float32's
        earlier_CC = tl.where(row < column, 1.0, 0.0).to(tl.bfloat16)
        high_CC = pairs_CC.to(tl.bfloat16)
        within_CC = tl.dot((pairs_CC - high_CC.to(tl.float32)).to(tl.bfloat16), earlier_CC, tl.dot(high_CC, earlier_CC))
    else:
        within_CC = tl.dot(pairs_CC, tl.where(row < column, 1.0, 0.0), input_precision=DOT)
    return tl.sum(tl.where(row >= column, within_CC, 0.0), 0)


@triton.jit
def across_chunks(after_C, before_C):
    """[C]: for each token i what tokens t >= i read of the chunk's start, and what tokens s < i wrote for its end."""
    C: tl.constexpr = after_C.shape[0]
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return tl.sum(tl.where(row >= column, after_C[:, None], before_C[:, None]), 0)
