"""Mesa's solve, chunk by chunk and head by head: conjugate gradients (MesaNet, arXiv 2506.05233, Algorithm 1) with H on chip.

With D the decay inside the chunk times beta, c that from its start and H its starting state, every token's product with its own H_t + Lambda is

    A p = ((P K^T) * D) K + c (P H) + Lambda * p

`right_side` gives G_t do_t (backward), `iterate` solves, `check` takes the true residual and reads the solution out, and `iterate` solves for the
residual where it is too large. Everything is divided by one power of two (`unit`), keys by one each (`walks.prepare`), H and G by their own,
directions by their residual's norm: what enters float16 is near 1. In "half" products the solver carries a residual that drifts from the true
one by about 2^-12 |H| |x|. The true one is computed in split products, and a chunk in which a token's is too large is solved for once more,
from there (iterative refinement), in products that round neither the directions nor H.

Products with G and H go through a few of their columns at a time, so that loads run ahead and accumulators are small.

Shapes: C tokens of the chunk, K key size, V value size, X = V + K, J columns of a slice, M = chunks x B x H (chunk-major).
"""

import triton
import triton.language as tl

from kernels.linear_attention.walks import since_start
from kernels.mesa.products import low_part, operand, power_of_two, product, row_scales, settled, weights

SMALLEST = tl.constexpr(2**-23)  # a residual that counts as 0
REFINEMENT = tl.constexpr(8)  # steps that must be left for one
SLACK = tl.constexpr(8)
CAP = tl.constexpr(3)
MARGIN = tl.constexpr(16)  # by which a refinement goes below what is asked: a wrong solution can be several times too long


@triton.jit
def place(m, T, H, BH, C: tl.constexpr):
    """Of chunk m: its head, its first token's row among all of [B, T, H], rows from there, which tokens there are, its place in gates."""
    n, bh = m // BH, m % BH
    b, h = (bh // H).to(tl.int64), bh % H
    i_C = tl.arange(0, C)
    return h, (b * T + n * C) * H + h, i_C * H, n * C + i_C < T, bh * tl.cdiv(T, C) + n


@triton.jit
def place_of_keys(m, first_row, row_C, real_C, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr):
    """Where a chunk's keys (or what has their shape) lie and its H, and which of either there are."""
    i_K = tl.arange(0, BK)
    real_K = i_K < K
    at_CK, at_KK = first_row * K + row_C[:, None] * K + i_K[None, :], i_K[:, None] * (V + K) + V + i_K[None, :]
    return at_CK, real_C[:, None] & real_K[None, :], m.to(tl.int64) * K * (V + K) + at_KK, real_K[:, None] & real_K[None, :], real_K


@triton.jit
def halves(x, dtype: tl.constexpr, MODE: tl.constexpr):
    """(high, low) of x as operands of split products; x itself twice for "exact"."""
    if MODE == "exact":
        return x, x
    else:
        high = x.to(dtype)
        return high, low_part(x, high)


@triton.jit
def times_halves(high, low, b, b_low, sum, MODE: tl.constexpr):
    """sum + (high + low) b, b with a low part or (None) exact."""
    sum = product(high, b, b_low, sum, MODE)
    return sum if MODE == "exact" else product(low, b, None, sum, "half")


@triton.jit(do_not_specialize=["T", "H", "BH"])
def right_side(
    do, k, v, x, beta, sums, tags, firsts, high, low, scale, rhs, since, T, H, BH,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BJ: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """rhs [B, T, H, K] = G_t do_t in float32; since [B, T, H] = x . (its part from the chunk's start)."""
    FULL: tl.constexpr = "exact" if MODE == "exact" else "split"
    m = tl.program_id(0)
    _, first_row, row_C, real_C, chunk = place(m, T, H, BH, C)
    j_V = tl.arange(0, BV)
    at_CV, real_CV = first_row * V + row_C[:, None] * V + j_V[None, :], real_C[:, None] & (j_V < V)[None, :]
    do_CV, v_CV = tl.load(do + at_CV, mask=real_CV, other=0.0), tl.load(v + at_CV, mask=real_CV, other=0.0)
    sum_C, tag_C = tl.load(sums + chunk * C + tl.arange(0, C)), tl.load(tags + chunk * C + tl.arange(0, C))
    beta_C = tl.load(beta + first_row + row_C, mask=real_C, other=0.0)
    inside_CC = product(do_CV, tl.trans(v_CV), None, None, "exact" if MODE == "exact" else "half") * weights(sum_C, tag_C, beta_C)
    inside_CC, inside_low_CC = halves(inside_CC, k.dtype.element_ty, MODE)
    size_C = row_scales(do_CV.to(tl.float32), MODE)
    do_CV = operand(do_CV.to(tl.float32) * (1 / size_C)[:, None], MODE)
    if MODE != "exact":
        size_C *= tl.load(scale + m * 2)
    start_C = since_start(sum_C, tag_C, tl.load(firsts + chunk)) * size_C
    since_C = beta_C * 0.0
    for first_key in range(0, K, BJ):
        j_J = first_key + tl.arange(0, BJ)
        at_CJ, real_CJ = first_row * K + row_C[:, None] * K + j_J[None, :], real_C[:, None] & (j_J < K)[None, :]
        at_JV, real_JV = m.to(tl.int64) * K * (V + K) + j_J[:, None] * (V + K) + j_V[None, :], (j_J < K)[:, None] & (j_V < V)[None, :]
        G_JV = tl.load(high + at_JV, mask=real_JV, other=0.0)
        low_JV = G_JV if MODE == "exact" else tl.load(low + at_JV, mask=real_JV, other=0.0)
        rhs_CJ = product(do_CV, tl.trans(G_JV), tl.trans(low_JV), None, FULL) * start_C[:, None]
        since_C += tl.sum(tl.load(x + at_CJ, mask=real_CJ, other=0.0) * rhs_CJ, 1)
        k_CJ = tl.load(k + at_CJ, mask=real_CJ, other=0.0)
        rhs_CJ = times_halves(inside_CC, inside_low_CC, k_CJ, None, rhs_CJ, FULL)
        tl.store(rhs + at_CJ, rhs_CJ, mask=real_CJ)
    tl.store(since + first_row + row_C, since_C, mask=real_C)


@triton.jit
def system(m, chunk, sizes, beta, sums, tags, firsts, scale, first_row, row_C, real_C, C: tl.constexpr, MODE: tl.constexpr):
    """Of A = unit * (weight, start, Lambda / unit) for keys over their sizes: weight_CC, start_C, unit."""
    reach_C = tl.load(beta + first_row + row_C, mask=real_C, other=0.0)
    sum_C, tag_C = tl.load(sums + chunk * C + tl.arange(0, C)), tl.load(tags + chunk * C + tl.arange(0, C))
    start_C = since_start(sum_C, tag_C, tl.load(firsts + chunk))
    if MODE == "exact":
        return weights(sum_C, tag_C, reach_C), start_C, 1.0
    else:
        size_C, H_size = tl.load(sizes + first_row + row_C, mask=real_C, other=1.0), tl.load(scale + m * 2 + 1)
        reach_C *= size_C * size_C
        unit = power_of_two(tl.maximum(tl.max(reach_C, 0), H_size))
        return weights(sum_C, tag_C, reach_C / unit), start_C * (H_size / unit), unit


@triton.jit
def apply(p_CK, k_CK, high_KK, low_KK, weight_CC, start_C, MODE: tl.constexpr):
    """((P K^T) * weight) K + start (P H)."""
    inside_CC = product(p_CK, tl.trans(k_CK), None, None, MODE) * weight_CC
    return product(inside_CC, k_CK, None, product(p_CK, high_KK, low_KK, None, MODE) * start_C[:, None], MODE)


@triton.jit
def conjugate_gradients(
    b_CK, going_C, first_C, p_CK, limit_C, k_CK, high_KK, low_KK, weight_CC, start_C, lam_at, real_K, unit, steps, eps,
    MODE: tl.constexpr, SHORT: tl.constexpr, JACOBI: tl.constexpr, CRITERION: tl.constexpr,
):  # fmt: skip
    """(x, steps taken, limit) for rows b of norm 1 and directions p. SHORT: r in float16. JACOBI: the start is first_C times p."""
    # Of a token: rho = ||r||; r and the direction p are kept over it. A direction is what float16 holds, so that no product rounds it; the
    # first is the start itself, taken whole (by `first`): x = start and r = b - A start come out of round -1.
    HELD: tl.constexpr = tl.float32 if MODE == "exact" else tl.float16
    KEPT: tl.constexpr = tl.float16 if SHORT else tl.float32
    p_CK, r_CK = p_CK.to(HELD), b_CK.to(KEPT)
    if MODE == "half":
        weight_CC = weight_CC.to(HELD)
    x_CK = b_CK * 0.0
    rho_C = first_C * 0.0 + 1.0
    taken_C = (first_C * 0.0).to(tl.int32)
    count = -1 if JACOBI else 0
    while (tl.max(going_C.to(tl.int32), 0) > 0) & (count < steps):
        Ap_CK = apply(p_CK, k_CK, high_KK, low_KK, weight_CC, start_C, MODE)
        direction_CK = p_CK.to(tl.float32)
        Ap_CK += (tl.load(lam_at, mask=real_K, other=1.0) / unit)[None, :] * direction_CK
        curvature_C = tl.sum(direction_CK * Ap_CK, 1)
        moves_C = going_C & ((curvature_C > 0) | (count < 0))
        way_C = tl.where(count < 0, first_C, 1 / tl.where(curvature_C > 0, curvature_C, 1.0))
        way_C = tl.where(moves_C, way_C, 0.0)
        x_CK += (way_C * rho_C)[:, None] * direction_CK
        Ap_CK = r_CK.to(tl.float32) - way_C[:, None] * Ap_CK
        turn_C = tl.sqrt(tl.sum(Ap_CK * Ap_CK, 1))  # ||r|| over the one before
        rho_C = tl.where(moves_C, rho_C * turn_C, rho_C)
        if JACOBI:
            first_limit_C = tl.maximum(eps * (tl.minimum(rho_C, 1.0) if CRITERION == "b" else rho_C), SMALLEST)
            limit_C = tl.where(count < 0, first_limit_C, limit_C)
        going_C = moves_C & (rho_C > limit_C)
        Ap_CK *= (1 / tl.where(going_C, turn_C, 1.0))[:, None]
        r_CK = Ap_CK.to(KEPT)
        p_CK = (Ap_CK + tl.where(going_C & (count >= 0), turn_C, 0.0)[:, None] * direction_CK).to(HELD)
        taken_C += (moves_C & (count >= 0)).to(tl.int32)
        count += 1
    return x_CK, taken_C, limit_C


@triton.jit
def of_norm_1(b_CK):
    """Rows over their norm, and that in two factors: see `solver._unit`."""
    most_C = tl.max(tl.abs(b_CK), 1)
    b_CK *= (1 / tl.where(most_C > 0, most_C, 1.0))[:, None]
    norm_C = tl.sqrt(tl.sum(b_CK * b_CK, 1))
    return b_CK * (1 / tl.where(most_C > 0, norm_C, 1.0))[:, None], most_C, norm_C


@triton.jit(do_not_specialize=["T", "H", "BH", "steps"])
def iterate(
    rhs, keys, sizes, beta, sums, tags, firsts, lam, high, low, scale, solution, short, taken, asked, lengths, flag, T, H, BH, steps, eps,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    MODE: tl.constexpr, JACOBI: tl.constexpr, CRITERION: tl.constexpr, CORRECT: tl.constexpr,
):  # fmt: skip
    """solution [B, T, H, K] float32 = A^-1 rhs, short the same in its dtype; taken, asked, lengths [B, T, H]: steps, at what residual a token
    could stop, and the norm of its right-hand side.

    CORRECT, of flagged chunks: rhs is `check`'s `left`, what is found is added to the solution, and asked is `check`'s `goal`.
    """
    if not CORRECT:
        _iterate(
            rhs, keys, sizes, beta, sums, tags, firsts, lam, high, low, scale, solution, short, taken, asked, lengths, T, H, BH, steps, eps,
            K, V, C, BK, MODE, JACOBI, CRITERION, CORRECT,
        )  # fmt: skip
    elif tl.load(flag + tl.program_id(0)) != 0:
        _iterate(
            rhs, keys, sizes, beta, sums, tags, firsts, lam, high, low, scale, solution, short, taken, asked, lengths, T, H, BH, steps, eps,
            K, V, C, BK, MODE, JACOBI, CRITERION, CORRECT,
        )  # fmt: skip


@triton.jit
def _iterate(
    rhs, keys, sizes, beta, sums, tags, firsts, lam, high, low, scale, solution, short, taken, asked, lengths, T, H, BH, steps, eps,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    MODE: tl.constexpr, JACOBI: tl.constexpr, CRITERION: tl.constexpr, CORRECT: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0)
    h, first_row, row_C, real_C, chunk = place(m, T, H, BH, C)
    at_CK, real_CK, at_KK, real_KK, real_K = place_of_keys(m, first_row, row_C, real_C, K, V, BK)
    i_K = tl.arange(0, BK)
    ONCE: tl.constexpr = "exact" if MODE == "exact" else "half"
    # All that comes from memory is asked for at once.
    k_CK = tl.load(keys + at_CK, mask=real_CK, other=0.0)
    high_KK = tl.load(high + at_KK, mask=real_KK, other=0.0)
    b_CK = tl.load(rhs + at_CK, mask=real_CK, other=0.0).to(tl.float32)
    weight_CC, start_C, unit = system(m, chunk, sizes, beta, sums, tags, firsts, scale, first_row, row_C, real_C, C, MODE)
    # Made in the layout that products leave their results in, so that nothing is made anew in another, and all scalars of tokens are there.
    weight_CC += 0.0 * product(k_CK, tl.trans(k_CK), None, None, ONCE)
    b_CK, most_C, norm_C = of_norm_1(settled(b_CK))
    size_C = most_C * norm_C
    going_C = most_C > 0
    p_CK, first_C = b_CK, norm_C * 0.0
    if CORRECT:
        limit_C = tl.load(asked + first_row + row_C, mask=real_C, other=0.0)
        going_C &= limit_C > 0
        limit_C /= tl.where(going_C, size_C, 1.0)
        before_C = tl.load(taken + first_row + row_C, mask=real_C, other=0)
        steps -= tl.max(tl.where(going_C, before_C, 0), 0)
    else:
        limit_C = first_C + (0.0 if JACOBI else tl.maximum(eps, SMALLEST))
    if JACOBI:
        lam_K = tl.load(lam + h * K + i_K, mask=real_K, other=1.0)
        diagonal_K = tl.load(high + m.to(tl.int64) * K * (V + K) + V + i_K * (V + K + 1), mask=real_K, other=0.0).to(tl.float32)
        squared_CK = k_CK.to(tl.float32) * k_CK.to(tl.float32)
        diagonal_CK = product(operand(weight_CC, MODE), operand(squared_CK, MODE), None, None, ONCE)
        diagonal_CK += start_C[:, None] * diagonal_K[None, :] + (lam_K / unit)[None, :]
        positive_CK = diagonal_CK > 0
        root_CK = tl.rsqrt(tl.where(positive_CK, diagonal_CK, 1.0))  # quicker than to divide
        p_CK = tl.where(positive_CK, b_CK * root_CK * root_CK, 0.0)
        first_C = tl.sqrt(tl.sum(p_CK * p_CK, 1))
        p_CK *= (1 / tl.where(first_C > 0, first_C, 1.0))[:, None]
    low_KK = high_KK
    if MODE == "split":
        low_KK = tl.load(low + at_KK, mask=real_KK, other=0.0)
    x_CK, taken_C, limit_C = conjugate_gradients(
        b_CK, going_C, first_C, p_CK, limit_C, k_CK, high_KK, low_KK, weight_CC, start_C, lam + h * K + i_K, real_K, unit, steps, eps,
        MODE, MODE == "half", JACOBI, CRITERION,
    )  # fmt: skip
    if CORRECT:
        size_C *= tl.load(lengths + first_row + row_C, mask=real_C, other=0.0)
        x_CK = x_CK * (size_C / unit)[:, None] + tl.load(solution + at_CK, mask=real_CK, other=0.0)
        taken_C += before_C
    else:
        tl.store(asked + first_row + row_C, limit_C, mask=real_C)
        tl.store(lengths + first_row + row_C, size_C, mask=real_C)
        x_CK *= (size_C / unit)[:, None]
    tl.store(taken + first_row + row_C, taken_C, mask=real_C)
    tl.store(solution + at_CK, x_CK, mask=real_CK)
    if short is not None:
        tl.store(short + at_CK, x_CK.to(short.dtype.element_ty), mask=real_CK)


@triton.jit
def over(lengths, first_row, row_C, real_C):
    """1 over the norms of right-hand sides, 1 for those of 0."""
    length_C = tl.load(lengths + first_row + row_C, mask=real_C, other=1.0)
    return 1 / tl.where(length_C > 0, length_C, 1.0)


@triton.jit
def evaluate(
    rhs, keys, x, x0, high, low, left, x_CK, x_low_CK, inside_CC, inside_low_CC, size_C, start_C, over_C, lam, m, first_row, row_C, real_C,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, MODE: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """(||rhs - A x|| over the norm of rhs, BACK: x0 . start (x H)); of the chunk's x over its size, and lam of this head.
    left: rhs - A x over that norm, where there is one."""
    i_K = tl.arange(0, BK)
    left_C, read_C = over_C * 0.0, over_C * 0.0
    for first_key in range(0, K, BJ):
        j_J = first_key + tl.arange(0, BJ)
        at_CJ, real_CJ = first_row * K + row_C[:, None] * K + j_J[None, :], real_C[:, None] & (j_J < K)[None, :]
        at_KJ, real_KJ = m.to(tl.int64) * K * (V + K) + i_K[:, None] * (V + K) + V + j_J[None, :], (i_K < K)[:, None] & (j_J < K)[None, :]
        # Asked for before the products, and waited for behind them.
        b_CJ = tl.load(rhs + at_CJ, mask=real_CJ, other=0.0)
        x_CJ = tl.load(x + at_CJ, mask=real_CJ, other=0.0)
        if BACK:
            x0_CJ = tl.load(x0 + at_CJ, mask=real_CJ, other=0.0)
        high_KJ = tl.load(high + at_KJ, mask=real_KJ, other=0.0)
        low_KJ = high_KJ if MODE == "exact" else tl.load(low + at_KJ, mask=real_KJ, other=0.0)
        Ax_CJ = times_halves(x_CK, x_low_CK, high_KJ, low_KJ, None, MODE) * start_C[:, None]
        if BACK:
            read_C += tl.sum(x0_CJ * Ax_CJ, 1)
        Ax_CJ = times_halves(inside_CC, inside_low_CC, tl.load(keys + at_CJ, mask=real_CJ, other=0.0), None, Ax_CJ, MODE) * size_C[:, None]
        Ax_CJ += tl.load(lam + j_J, mask=j_J < K, other=0.0)[None, :] * x_CJ
        left_CJ = (b_CJ.to(tl.float32) - Ax_CJ) * over_C[:, None]
        left_C += tl.sum(left_CJ * left_CJ, 1)
        if left is not None:
            tl.store(left + at_CJ, left_CJ, mask=real_CJ)
    return tl.sqrt(left_C), read_C * size_C


@triton.jit
def read(
    v, output, high, low, scale, sizes, x_CK, x_low_CK, inside_CC, inside_low_CC, size_C, start_C, unit, m, first_row, row_C, real_C,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """output [B, T, H, V] = G^T x in whole products, of `check`'s system."""
    i_K = tl.arange(0, BK)
    weight_CC, weight_low_CC = inside_CC, inside_low_CC
    if MODE != "exact":  # values are as they are; keys were over their sizes, and H over the unit
        start_C *= unit * tl.load(scale + m * 2) / tl.load(scale + m * 2 + 1)
        key_size_C = tl.load(sizes + first_row + row_C, mask=real_C, other=1.0)
        weight_CC = (inside_CC.to(tl.float32) + inside_low_CC.to(tl.float32)) * (unit / key_size_C)[None, :]
        weight_CC, weight_low_CC = halves(weight_CC, v.dtype.element_ty, MODE)
    for first_value in range(0, V, BJ):
        j_J = first_value + tl.arange(0, BJ)
        at_CJ, real_CJ = first_row * V + row_C[:, None] * V + j_J[None, :], real_C[:, None] & (j_J < V)[None, :]
        at_KJ, real_KJ = m.to(tl.int64) * K * (V + K) + i_K[:, None] * (V + K) + j_J[None, :], (i_K < K)[:, None] & (j_J < V)[None, :]
        high_KJ = tl.load(high + at_KJ, mask=real_KJ, other=0.0)
        low_KJ = high_KJ if MODE == "exact" else tl.load(low + at_KJ, mask=real_KJ, other=0.0)
        o_CJ = times_halves(x_CK, x_low_CK, high_KJ, low_KJ, None, MODE) * start_C[:, None]
        o_CJ = times_halves(weight_CC, weight_low_CC, tl.load(v + at_CJ, mask=real_CJ, other=0.0), None, o_CJ, MODE) * size_C[:, None]
        tl.store(output + at_CJ, o_CJ.to(output.dtype.element_ty), mask=real_CJ)


@triton.jit
def reached(asked_C, length_C, lam_K, bound, BACK: tl.constexpr):
    """The residual, relative to the right-hand side, of a token that is not refined; length: ||x|| over the right-hand side's norm."""
    reached_C = tl.maximum(bound, 2 * asked_C)
    if BACK:  # x may be small (1 / 900 of b on repeated tokens), and its error is at most ||left|| / the least of Lambda
        reached_C *= tl.minimum(tl.min(lam_K, 0) * length_C * SLACK, CAP)
    return reached_C


@triton.jit(do_not_specialize=["T", "H", "BH", "steps"])
def check(
    rhs, keys, sizes, x0, v, beta, sums, tags, firsts, lam, high, low, scale, x, taken, asked, lengths, known, flag, left, goal, output, residual, since,
    reading,
    T, H, BH, steps, bound,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, MODE: tl.constexpr, BACK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The residual of x [B, T, H, K] relative to rhs, and what x reads.

    Forward: residual [B, T, H], output [B, T, H, V] = G^T x. BACK, with the forward solution x0: reading [B, T, H] = since - x0 . start (x H), the gradient of log decay
    from the chunk's start, since being what G gave to it.
    PART: "only"; or "first", with flag [M], whether a token's is too large or the chunk `known` to be hard; then, of chunks that are flagged, "left":
    left [B, T, H, K], what is left of rhs over its norm, and goal [B, T, H], what to bring it down to, 0 for tokens of which enough is done;
    and "last".
    """
    if PART == "only":
        _check(
            rhs, keys, sizes, x0, v, beta, sums, tags, firsts, lam, high, low, scale, x, taken, asked, lengths, flag, None, goal, output, residual, since,
            reading, T, H, BH, steps, bound, K, V, C, BK, BJ, MODE, BACK, PART,
        )  # fmt: skip
    elif PART == "first":
        hard = False
        if known is not None:
            hard = tl.load(known + tl.program_id(0)) != 0
        if hard:
            tl.store(flag + tl.program_id(0), 1)
        else:
            _check(
                rhs, keys, sizes, x0, v, beta, sums, tags, firsts, lam, high, low, scale, x, taken, asked, lengths, flag, None, goal, output, residual, since,
                reading, T, H, BH, steps, bound, K, V, C, BK, BJ, MODE, BACK, PART,
            )  # fmt: skip
    elif tl.load(flag + tl.program_id(0)) != 0:
        _check(
            rhs, keys, sizes, x0, v, beta, sums, tags, firsts, lam, high, low, scale, x, taken, asked, lengths, flag, left if PART == "left" else None,
            goal, output, residual, since, reading, T, H, BH, steps, bound, K, V, C, BK, BJ, MODE, BACK, PART,
        )  # fmt: skip


@triton.jit
def _check(
    rhs, keys, sizes, x0, v, beta, sums, tags, firsts, lam, high, low, scale, x, taken, asked, lengths, flag, left, goal, output, residual, since, reading,
    T, H, BH, steps, bound,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, MODE: tl.constexpr, BACK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0)
    h, first_row, row_C, real_C, chunk = place(m, T, H, BH, C)
    at_CK, real_CK, _, _, real_K = place_of_keys(m, first_row, row_C, real_C, K, V, BK)
    k_CK = tl.load(keys + at_CK, mask=real_CK, other=0.0)
    weight_CC, start_C, unit = system(m, chunk, sizes, beta, sums, tags, firsts, scale, first_row, row_C, real_C, C, MODE)
    over_C = over(lengths, first_row, row_C, real_C)
    x_CK = tl.load(x + at_CK, mask=real_CK, other=0.0)
    size_C = row_scales(x_CK, MODE)
    x_CK *= (1 / size_C)[:, None]
    length_C = tl.sqrt(tl.sum(x_CK * x_CK, 1)) * (size_C * over_C)
    x_CK, x_low_CK = halves(x_CK, k_CK.dtype, MODE)
    inside_CC, inside_low_CC = halves(times_halves(x_CK, x_low_CK, tl.trans(k_CK), None, None, MODE) * weight_CC, k_CK.dtype, MODE)
    left_C, read_C = evaluate(
        rhs, keys, x, x0, high, low, left, x_CK, x_low_CK, inside_CC, inside_low_CC, size_C * unit, start_C, over_C, lam + h * K, m,
        first_row, row_C, real_C, K, V, BK, BJ, MODE, BACK and PART != "left",
    )  # fmt: skip
    enough = True
    if PART == "first" or PART == "left":
        lam_K = tl.load(lam + h * K + tl.arange(0, BK), mask=real_K, other=float("inf"))
        reached_C = reached(tl.load(asked + first_row + row_C, mask=real_C, other=0.0), length_C, lam_K, bound, BACK)
        again_C = (left_C > reached_C) & (tl.load(taken + first_row + row_C, mask=real_C, other=0) + REFINEMENT <= steps)
        if PART == "first":
            flagged = tl.max(again_C.to(tl.int32), 0)
            tl.store(flag + m, flagged)
            enough = flagged == 0
        else:
            tl.store(goal + first_row + row_C, tl.where(again_C, reached_C / MARGIN, 0.0), mask=real_C)
    if PART != "left":
        if BACK:
            tl.store(reading + first_row + row_C, tl.load(since + first_row + row_C, mask=real_C, other=0.0) - read_C, mask=real_C)
        else:
            tl.store(residual + first_row + row_C, left_C, mask=real_C)
            if enough:
                read(
                    v, output, high, low, scale, sizes, x_CK, x_low_CK, inside_CC, inside_low_CC, size_C, start_C, unit, m, first_row, row_C, real_C,
                    K, V, BK, BJ, MODE,
                )  # fmt: skip
