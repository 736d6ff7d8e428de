"""Mesa's gradients inside a chunk: reading S = [G | H] with the solution x under the output gradient [do | -e], e = A^-1 G do.

See `kernels.linear_attention.chunked.inside`, which this is, and `kernels.chunks.decay_gradient`. Keys, and then values, go in slices, so that
loads run ahead of products and accumulators are small.

Shapes: C tokens of the chunk, K key size, V value size, X = V + K, J keys of a slice, M = chunks x B x H (chunk-major).
"""

import triton
import triton.language as tl

from kernels.linear_attention.inside import between_pairs
from kernels.linear_attention.walks import to_end
from kernels.mesa.products import low_part, product, weights
from kernels.mesa.system import place


@triton.jit
def times(a, b, sum, MODE: tl.constexpr):
    """sum + a b for a in float32 or bfloat16, b exact."""
    if MODE == "exact":
        return product(a, b, None, sum, "exact")
    elif MODE == "half":
        return tl.dot(a, b, sum)
    else:
        high = a.to(tl.bfloat16)
        return tl.dot(low_part(a, high), b, tl.dot(high, b, sum))


@triton.jit
def _join(sum_a, before_a, sum_b, before_b):
    return sum_a + sum_b, sum_a + before_b


@triton.jit
def sums_before(x_C):
    """[C]: for each token the sum of those before it; not a running sum less the token, which would round."""
    return tl.associative_scan((x_C, tl.zeros_like(x_C)), 0, _join)[1]


@triton.jit
def once(a, b, sum, MODE: tl.constexpr):
    if MODE == "exact":
        return product(a, b, None, sum, "exact")
    else:
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), sum)


@triton.jit(do_not_specialize=["T", "H", "BH"])
def gradients(
    x, back, do, k, v, beta, sums, tags, firsts, dhigh, dlow, since, dthrough, dk, dv, dbeta, dlog_decay, dlam, hard, T, H, BH,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BJ: tl.constexpr, TILES: tl.constexpr,
    MODE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One chunk of one head; dlam [M, K] is its part. dhigh, dlow [M, K, X], dthrough [M, TILES, BK] and HEADS: of `walks.ends`; since [B, T, H]:
    of `solve.check`."""
    if HEADS == "all":
        _gradients(
            x, back, do, k, v, beta, sums, tags, firsts, dhigh, dlow, since, dthrough, dk, dv, dbeta, dlog_decay, dlam, T, H, BH,
            K, V, C, BK, BV, BJ, TILES, MODE,
        )  # fmt: skip
    elif (tl.load(hard + tl.program_id(0) % BH) != 0) == (HEADS == "hard"):
        _gradients(
            x, back, do, k, v, beta, sums, tags, firsts, dhigh, dlow, since, dthrough, dk, dv, dbeta, dlog_decay, dlam, T, H, BH,
            K, V, C, BK, BV, BJ, TILES, MODE,
        )  # fmt: skip


@triton.jit
def _gradients(
    x, back, do, k, v, beta, sums, tags, firsts, dhigh, dlow, since, dthrough, dk, dv, dbeta, dlog_decay, dlam, T, H, BH,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BJ: tl.constexpr, TILES: tl.constexpr,
    MODE: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0)
    _, row, row_C, real_C, chunk = place(m, T, H, BH, C)
    i_K, j_V, i_C = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, C)
    at_CV, real_CV = row_C[:, None] * V + j_V[None, :], real_C[:, None] & (j_V < V)[None, :]
    through_K = tl.load(dthrough + m * TILES * BK + i_K)
    for i in tl.static_range(1, TILES):
        through_K += tl.load(dthrough + (m * TILES + i) * BK + i_K)
    v_CV = tl.load(v + row * V + at_CV, mask=real_CV, other=0.0)
    do_CV = tl.load(do + row * V + at_CV, mask=real_CV, other=0.0)
    score_CC, back_CC = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    for first_key in range(0, K, BJ):
        j_J = first_key + tl.arange(0, BJ)
        at_CJ, real_CJ = row_C[:, None] * K + j_J[None, :], real_C[:, None] & (j_J < K)[None, :]
        k_CJ = tl.load(k + row * K + at_CJ, mask=real_CJ, other=0.0)
        score_CC = times(tl.load(x + row * K + at_CJ, mask=real_CJ, other=0.0), tl.trans(k_CJ), score_CC, MODE)
        back_CC = times(tl.load(back + row * K + at_CJ, mask=real_CJ, other=0.0), tl.trans(k_CJ), back_CC, MODE)

    sum_C, tag_C = tl.load(sums + chunk * C + i_C), tl.load(tags + chunk * C + i_C)
    end_C = to_end(sum_C, tag_C, tl.load(sums + chunk * C + C - 1), tl.load(tags + chunk * C + C - 1))
    beta_C = tl.load(beta + row + row_C, mask=real_C, other=0.0)
    decay_CC = weights(sum_C, tag_C, sum_C * 0.0 + 1.0)
    dscore_CC = (once(do_CV, tl.trans(v_CV), None, MODE) - back_CC) * decay_CC * beta_C[None, :]
    dlog_decay_C = between_pairs(score_CC * dscore_CC, "tf32x3" if MODE == "exact" else "ieee")
    weight_CC = score_CC * decay_CC
    if MODE != "exact":
        weight_CC, dscore_CC = weight_CC.to(tl.bfloat16), dscore_CC.to(tl.bfloat16)

    k_CK = tl.load(k + row * K + row_C[:, None] * K + i_K[None, :], mask=real_C[:, None] & (i_K < K)[None, :], other=0.0)
    state = m.to(tl.int64) * K * (V + K)
    dbeta_C, before_C = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
    for first_key in range(0, K, BJ):
        j_J = first_key + tl.arange(0, BJ)
        at_CJ, real_CJ = row_C[:, None] * K + j_J[None, :], real_C[:, None] & (j_J < K)[None, :]
        at_JV, real_JV = j_J[:, None] * (V + K) + j_V[None, :], (j_J < K)[:, None] & (j_V < V)[None, :]
        at_JK, real_JK = j_J[:, None] * (V + K) + V + i_K[None, :], (j_J < K)[:, None] & (i_K < K)[None, :]
        k_CJ = tl.load(k + row * K + at_CJ, mask=real_CJ, other=0.0)
        dG_JV = tl.load(dhigh + state + at_JV, mask=real_JV, other=0.0)
        dH_JK = tl.load(dhigh + state + at_JK, mask=real_JK, other=0.0)
        vD_CJ, kD_CJ = once(v_CV, tl.trans(dG_JV), None, MODE), once(k_CK, tl.trans(dH_JK), None, MODE)
        if MODE == "split":
            dG_JV = tl.load(dlow + state + at_JV, mask=real_JV, other=0.0)
            dH_JK = tl.load(dlow + state + at_JK, mask=real_JK, other=0.0)
            vD_CJ, kD_CJ = once(v_CV, tl.trans(dG_JV), vD_CJ, MODE), once(k_CK, tl.trans(dH_JK), kD_CJ, MODE)
        k32_CJ = k_CJ.to(tl.float32)
        vD_CJ, kD_CJ = vD_CJ * end_C[:, None], kD_CJ * end_C[:, None]
        x_CJ = tl.load(x + row * K + at_CJ, mask=real_CJ, other=0.0)
        e_CJ = tl.load(back + row * K + at_CJ, mask=real_CJ, other=0.0)
        written_CJ = -once(tl.trans(weight_CC), e_CJ, None, MODE)
        before_C += tl.sum(k32_CJ * (vD_CJ + 0.5 * kD_CJ), 1)  # of H's two: the key that is read with
        dbeta_C += tl.sum(k32_CJ * (written_CJ + 0.5 * kD_CJ), 1)  # the key that is written
        dk_CJ = once(tl.trans(dscore_CC), x_CJ, (written_CJ + vD_CJ + kD_CJ) * beta_C[:, None], MODE)
        tl.store(dk + row * K + at_CJ, dk_CJ.to(dk.dtype.element_ty), mask=real_CJ)
        tl.store(dlam + m.to(tl.int64) * K + j_J, -tl.sum(x_CJ.to(tl.float32) * e_CJ.to(tl.float32), 0), mask=j_J < K)

    for first_value in range(0, V, BJ):
        j_J = first_value + tl.arange(0, BJ)
        at_CJ, real_CJ = row * V + row_C[:, None] * V + j_J[None, :], real_C[:, None] & (j_J < V)[None, :]
        at_KJ, real_KJ = state + i_K[:, None] * (V + K) + j_J[None, :], (i_K < K)[:, None] & (j_J < V)[None, :]
        written_CJ = once(k_CK, tl.load(dhigh + at_KJ, mask=real_KJ, other=0.0), None, MODE)
        if MODE == "split":
            written_CJ = once(k_CK, tl.load(dlow + at_KJ, mask=real_KJ, other=0.0), written_CJ, MODE)
        do_CJ, v_CJ = tl.load(do + at_CJ, mask=real_CJ, other=0.0), tl.load(v + at_CJ, mask=real_CJ, other=0.0)
        written_CJ = once(tl.trans(weight_CC), do_CJ, written_CJ * end_C[:, None], MODE)
        dbeta_C += tl.sum(written_CJ * v_CJ.to(tl.float32), 1)
        tl.store(dv + at_CJ, (written_CJ * beta_C[:, None]).to(dv.dtype.element_ty), mask=real_CJ)
    tl.store(dbeta + row + row_C, dbeta_C, mask=real_C)
    since_C = tl.load(since + row + row_C, mask=real_C, other=0.0)
    dlog_decay_C += tl.cumsum(since_C, 0, reverse=True) + sums_before(before_C * beta_C)
    tl.store(dlog_decay + row + row_C, dlog_decay_C + tl.sum(through_K, 0), mask=real_C)
