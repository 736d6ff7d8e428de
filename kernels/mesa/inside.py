"""Mesa's gradients inside a chunk: reading S = [G | H] with the solution x under the output gradient [do | -e], e = A^-1 G do.

See `kernels.linear_attention.chunked.inside`, which this is, and `kernels.chunks.decay_gradient`.

Shapes: C tokens of the chunk, K key size, V value size, X = V + K, M = chunks x B x H (chunk-major).
"""

import triton
import triton.language as tl

from kernels.mesa.products import decays, low_part, product, to_end
from kernels.tiles import decay_between


@triton.jit
def times(a, b, sum, MODE: tl.constexpr):
    """sum + a b for a in float32 or bfloat16, b exact."""
    if MODE == "exact":
        return product(a, b, None, sum, "exact")
    else:
        high = a.to(tl.bfloat16)
        return tl.dot(low_part(a, high), b, tl.dot(high, b, sum))


@triton.jit
def once(a, b, sum, MODE: tl.constexpr):
    if MODE == "exact":
        return product(a, b, None, sum, "exact")
    else:
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), sum)


@triton.jit(do_not_specialize=["T", "H", "BH"])
def gradients(
    x, back, do, k, v, log_decay, beta, sign, dhigh, dlow, since, dthrough, dk, dv, dbeta, dlog_decay, T, H, BH,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """One chunk of one head. dhigh, dlow [M, K, X], dthrough [M, 2]: of `walks.ends`; since [B, T, H]: of `solve`."""
    m = tl.program_id(0).to(tl.int64)
    n, bh = tl.program_id(0) // BH, tl.program_id(0) % BH
    b, h = (bh // H).to(tl.int64), bh % H
    i_K, j_V, i_C = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, C)
    t_C = n * C + i_C
    inside_C = t_C < T
    row_C = (b * T + t_C) * H + h
    at_CK, real_CK = row_C[:, None] * K + i_K[None, :], inside_C[:, None] & (i_K < K)[None, :]
    at_CV, real_CV = row_C[:, None] * V + j_V[None, :], inside_C[:, None] & (j_V < V)[None, :]
    at_KK, real_KK = m * K * (V + K) + i_K[:, None] * (V + K) + V + i_K[None, :], (i_K < K)[:, None] & (i_K < K)[None, :]
    at_KV, real_KV = m * K * (V + K) + i_K[:, None] * (V + K) + j_V[None, :], (i_K < K)[:, None] & (j_V < V)[None, :]

    sum_C, document_C, flip_C, first = decays(log_decay, sign, row_C, inside_C)
    beta_C = tl.load(beta + row_C, mask=inside_C, other=0.0)
    between_CC = decay_between(sum_C, document_C) * flip_C[:, None] * flip_C[None, :]
    to_end_C = to_end(sum_C, document_C, flip_C)
    k_CK = tl.load(k + at_CK, mask=real_CK, other=0.0)
    v_CV = tl.load(v + at_CV, mask=real_CV, other=0.0)
    do_CV = tl.load(do + at_CV, mask=real_CV, other=0.0)
    x_CK = tl.load(x + at_CK, mask=real_CK, other=0.0)
    e_CK = tl.load(back + at_CK, mask=real_CK, other=0.0)

    score_CC = times(x_CK, tl.trans(k_CK), None, MODE)
    dscore_CC = (once(do_CV, tl.trans(v_CV), None, MODE) - times(e_CK, tl.trans(k_CK), None, MODE)) * between_CC
    weight_CC = tl.trans(score_CC * between_CC)

    dG_KV = tl.load(dhigh + at_KV, mask=real_KV, other=0.0)
    kD_CV = once(k_CK, dG_KV, None, MODE)
    vD_CK = once(v_CV, tl.trans(dG_KV), None, MODE)
    if MODE != "exact":
        dG_KV = tl.load(dlow + at_KV, mask=real_KV, other=0.0)
        kD_CV = once(k_CK, dG_KV, kD_CV, MODE)
        vD_CK = once(v_CV, tl.trans(dG_KV), vD_CK, MODE)
    written_CV = once(weight_CC, do_CV, kD_CV * to_end_C[:, None], MODE)
    tl.store(dv + at_CV, (written_CV * beta_C[:, None]).to(dv.dtype.element_ty), mask=real_CV)
    dbeta_C = tl.sum(written_CV * v_CV.to(tl.float32), 1)

    dH_KK = tl.load(dhigh + at_KK, mask=real_KK, other=0.0)
    kD_CK = once(k_CK, dH_KK, None, MODE)
    vD_CK = once(k_CK, tl.trans(dH_KK), vD_CK, MODE)
    if MODE != "exact":
        dH_KK = tl.load(dlow + at_KK, mask=real_KK, other=0.0)
        kD_CK = once(k_CK, dH_KK, kD_CK, MODE)
        vD_CK = once(k_CK, tl.trans(dH_KK), vD_CK, MODE)
    vD_CK *= to_end_C[:, None]
    to_end_gradient_C = tl.sum(vD_CK * k_CK.to(tl.float32), 1) * beta_C
    written_CK = kD_CK * to_end_C[:, None] - once(weight_CC, e_CK, None, MODE)
    dbeta_C += tl.sum(written_CK * k_CK.to(tl.float32), 1)
    dk_CK = (once(tl.trans(dscore_CC), x_CK, vD_CK, MODE) + written_CK) * beta_C[:, None]
    tl.store(dk + at_CK, dk_CK.to(dk.dtype.element_ty), mask=real_CK)
    tl.store(dbeta + row_C, dbeta_C, mask=inside_C)

    # Token i is in the decay from s to t when s < i <= t: only sums over what i is in.
    pairs_CC = dscore_CC * beta_C[None, :] * score_CC
    up_to_CC = tl.cumsum(pairs_CC, 1)
    within_C = tl.sum(tl.where(i_C[:, None] > i_C[None, :], up_to_CC, 0.0), 0)  # [j]: the pairs s <= j < t
    since_C = tl.load(since + row_C, mask=inside_C, other=0.0)
    shifted_C = tl.sum(tl.where(i_C[:, None] + 1 == i_C[None, :], within_C[:, None], 0.0), 0)
    before_C = tl.sum(tl.where(i_C[:, None] < i_C[None, :], to_end_gradient_C[:, None], 0.0), 0)
    after_C = tl.sum(tl.where(i_C[:, None] >= i_C[None, :], since_C[:, None], 0.0), 0)
    whole = tl.load(dthrough + m * 2) + tl.load(dthrough + m * 2 + 1)
    tl.store(dlog_decay + row_C, shifted_C + before_C + after_C + whole, mask=inside_C)
