"""Mesa's solve, chunk by chunk and head by head: conjugate gradients (MesaNet, arXiv 2506.05233, Algorithm 1) with H on chip.

`right_side` gives G_t do_t (backward), `iterate` solves `system.system`'s equations; directions are held over their residual's norm. Products with
G go through a few of its columns at a time, so that loads run ahead and accumulators are small.

Shapes: C tokens of the chunk, K key size, V value size, X = V + K, J columns of a slice, M = chunks x B x H (chunk-major).
"""

import triton
import triton.language as tl

from kernels.linear_attention.walks import since_start
from kernels.mesa.products import halves, operand, product, row_scales, settled, times_halves, weights
from kernels.mesa.system import place, place_of_keys, system

SMALLEST = tl.constexpr(2**-23)  # a residual that counts as 0


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
def apply(p_CK, k_CK, high_KK, low_KK, weight_CC, start_C, MODE: tl.constexpr):
    """((P K^T) * weight) K + start (P H)."""
    inside_CC = product(p_CK, tl.trans(k_CK), None, None, MODE) * weight_CC
    return product(inside_CC, k_CK, None, product(p_CK, high_KK, low_KK, None, MODE) * start_C[:, None], MODE)


@triton.jit
def conjugate_gradients(
    b_CK, going_C, first_C, p_CK, limit_C, k_CK, high_KK, low_KK, weight_CC, start_C, lam_K, steps, eps,
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
        Ap_CK += lam_K[None, :] * direction_CK
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
        p_CK = tl.fma(tl.where(going_C & (count >= 0), turn_C, 0.0)[:, None], direction_CK, Ap_CK).to(HELD)
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
    rhs, keys, reaches, amounts, beta, sums, tags, firsts, lam, high, low, scale, solution, short, taken, asked, lengths, flag, T, H, BH, steps, eps,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    MODE: tl.constexpr, JACOBI: tl.constexpr, CRITERION: tl.constexpr, CORRECT: tl.constexpr,
):  # fmt: skip
    """solution [B, T, H, K] float32 = A^-1 rhs, short the same in its dtype; taken, asked, lengths [B, T, H]: steps, at what residual a token
    could stop, and the norm of its right-hand side.

    CORRECT, of chunks flagged with 1: rhs is `check`'s `left`, what is found is added to the solution, and asked is `check`'s `goal`.
    """
    if not CORRECT:
        _iterate(
            rhs, keys, reaches, amounts, beta, sums, tags, firsts, lam, high, low, scale, solution, short, taken, asked, lengths, T, H, BH, steps, eps,
            K, V, C, BK, MODE, JACOBI, CRITERION, CORRECT,
        )  # fmt: skip
    elif (tl.load(flag + tl.program_id(0)) & 1) != 0:
        _iterate(
            rhs, keys, reaches, amounts, beta, sums, tags, firsts, lam, high, low, scale, solution, short, taken, asked, lengths, T, H, BH, steps, eps,
            K, V, C, BK, MODE, JACOBI, CRITERION, CORRECT,
        )  # fmt: skip


@triton.jit
def _iterate(
    rhs, keys, reaches, amounts, beta, sums, tags, firsts, lam, high, low, scale, solution, short, taken, asked, lengths, T, H, BH, steps, eps,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    MODE: tl.constexpr, JACOBI: tl.constexpr, CRITERION: tl.constexpr, CORRECT: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0)
    h, first_row, row_C, real_C, chunk = place(m, T, H, BH, C)
    at_CK, real_CK, at_KK, real_KK, real_K = place_of_keys(m, first_row, row_C, real_C, K, V, BK)
    i_K = tl.arange(0, BK)
    ONCE: tl.constexpr = "exact" if MODE == "exact" else "half"
    # All that comes from memory is asked for before anything waits for it.
    weight_CC, start_C, unit = system(m, chunk, reaches, amounts, beta, sums, tags, firsts, scale, first_row, row_C, real_C, 1, C, MODE)
    b_CK = tl.load(rhs + at_CK, mask=real_CK, other=0.0).to(tl.float32)
    k_CK = tl.load(keys + at_CK, mask=real_CK, other=0.0)
    high_KK = tl.load(high + at_KK, mask=real_KK, other=0.0)
    lam_K = tl.load(lam + h * K + i_K, mask=real_K, other=1.0) * (1 / unit)
    if JACOBI:
        diagonal_K = tl.load(high + m.to(tl.int64) * K * (V + K) + V + i_K * (V + K + 1), mask=real_K, other=0.0).to(tl.float32)
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
        diagonal_CK = product(operand(weight_CC, MODE), k_CK * k_CK, None, None, ONCE)
        # No plain sum: it would become the product's accumulator, made in another layout, in which each thread has the decays of all tokens.
        diagonal_CK = tl.fma(start_C[:, None], diagonal_K[None, :], diagonal_CK) + lam_K[None, :]
        root_CK = tl.where(diagonal_CK > 0, tl.rsqrt(diagonal_CK), 0.0)  # quicker than to divide
        p_CK = b_CK * root_CK * root_CK
        first_C = tl.sqrt(tl.sum(p_CK * p_CK, 1))
        p_CK *= (1 / tl.where(first_C > 0, first_C, 1.0))[:, None]
    low_KK = high_KK
    if MODE == "split":
        low_KK = tl.load(low + at_KK, mask=real_KK, other=0.0)
    x_CK, taken_C, limit_C = conjugate_gradients(
        b_CK, going_C, first_C, p_CK, limit_C, k_CK, high_KK, low_KK, weight_CC, start_C, lam_K, steps, eps,
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
