"""Mesa's solve for one chunk of one head: conjugate gradients (MesaNet, arXiv 2506.05233, Algorithm 1) with H on chip.

With D the decay inside the chunk times beta, c that from its start and H its starting state, every token's product with its own H_t + Lambda is

    A p = ((P K^T) * D) K + c (P H) + Lambda * p

Everything is divided by one power of two (`unit`), keys by one each, H and G by their own, directions by their residual's norm: what enters
float16 is near 1. In "half" products the solver carries a residual that drifts from the true one by about 2^-12 |H| |x|. So the true one
is computed in split products; a token whose true residual is above `bound` starts again from it (iterative refinement), by itself.

Shapes: C tokens of the chunk, K key size, V value size, X = V + K, M = chunks x B x H (chunk-major).
"""

import triton
import triton.language as tl

from kernels.mesa.products import decays, operand, power_of_two, product, row_scales, since_start
from kernels.tiles import decay_between

SMALLEST = tl.constexpr(2**-23)  # a residual that counts as 0
ROUNDS = tl.constexpr(6)  # of refinement


@triton.jit
def apply(p_CK, k_CK, high_KK, low_KK, weight_CC, start_C, MODE: tl.constexpr):
    """((P K^T) * weight) K and start (P H), added."""
    inside_CC = product(p_CK, tl.trans(k_CK), None, None, MODE) * weight_CC
    return product(inside_CC, k_CK, None, product(p_CK, high_KK, low_KK, None, MODE) * start_C[:, None], MODE)


@triton.jit(do_not_specialize=["T", "H", "BH", "steps"])
def solve(
    query, k, v, x0, log_decay, beta, sign, lam, high, low, scale,
    solution, output, taken, residual, since, dlam,
    T, H, BH, steps, eps, bound,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    MODE: tl.constexpr, BACK: tl.constexpr, JACOBI: tl.constexpr, CRITERION: tl.constexpr,
):  # fmt: skip
    """One chunk of one head.

    Forward: query = q; solution [B, T, H, K] float32 = A^-1 q, output [B, T, H, V] = G^T solution, taken, residual [B, T, H].
    BACK: query = do; output [B, T, H, K] = A^-1 G do, solution the same in float32; x0 the forward solution, with which dlam [M, K] is
    the chunk's part of Lambda's gradient, and since [B, T, H] that of the log decay from the chunk's start.
    """
    SINGLE: tl.constexpr = MODE if MODE != "refine" else "half"  # products of the solver
    FULL: tl.constexpr = MODE if MODE != "refine" else "split"  # of the true residual, the right-hand side and the read-out
    BOTH_EXACT: tl.constexpr = MODE if MODE == "exact" else "half"  # of operands without low parts
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

    # The system, divided by `unit`: keys k = key_size * k_CK, H = H_size * high_KK, A = unit * (what `apply` gives + lam_K).
    k_CK = tl.load(k + at_CK, mask=real_CK, other=0.0).to(tl.float32)
    key_size_C = row_scales(k_CK, MODE)
    k_CK = operand(k_CK * (1 / key_size_C)[:, None], MODE)
    H_size = 1.0 if MODE == "exact" else tl.load(scale + m * 2 + 1)
    G_size = 1.0 if MODE == "exact" else tl.load(scale + m * 2)
    reach_C = tl.load(beta + row_C, mask=inside_C, other=0.0) * key_size_C
    unit = 1.0 if MODE == "exact" else power_of_two(tl.maximum(tl.max(reach_C * key_size_C, 0), H_size))
    sum_C, document_C, flip_C, first = decays(log_decay, sign, row_C, inside_C)
    weight_CC = decay_between(sum_C, document_C) * flip_C[:, None] * (flip_C * reach_C * key_size_C / unit)[None, :]
    start_C = since_start(sum_C, document_C, flip_C, first)
    start_H_C = start_C * (H_size / unit)
    lam_at_K = lam + h * K + i_K

    # The right-hand side b, of unit norm.
    if BACK:
        do_CV = tl.load(query + at_CV, mask=real_CV, other=0.0).to(tl.float32)
        do_size_C = row_scales(do_CV, MODE)
        do_CV = operand(do_CV * (1 / do_size_C)[:, None], MODE)
        v_CV = tl.load(v + at_CV, mask=real_CV, other=0.0).to(tl.float32)
        v_size_C = row_scales(v_CV, MODE)
        v_CV = operand(v_CV * (1 / v_size_C)[:, None], MODE)
        G_unit = 1.0 if MODE == "exact" else power_of_two(tl.maximum(tl.max(reach_C * v_size_C, 0), G_size))
        G_KV = tl.load(high + at_KV, mask=real_KV, other=0.0)
        b_CK = product(do_CV, tl.trans(G_KV), None, None, BOTH_EXACT)
        if MODE != "exact":
            G_KV = tl.load(low + at_KV, mask=real_KV, other=0.0)
            b_CK = product(do_CV, tl.trans(G_KV), None, b_CK, BOTH_EXACT)
        b_CK *= (start_C * (G_size / G_unit))[:, None]
        size_C = do_size_C * G_unit
        tl.store(since + row_C, tl.sum(tl.load(x0 + at_CK, mask=real_CK, other=0.0) * b_CK, 1) * size_C, mask=inside_C)
        inside_CC = product(do_CV, tl.trans(v_CV), None, None, BOTH_EXACT)
        inside_CC *= decay_between(sum_C, document_C) * flip_C[:, None] * (flip_C * reach_C * v_size_C / G_unit)[None, :]
        b_CK = product(inside_CC, k_CK, None, b_CK, FULL)
    else:
        b_CK = tl.load(query + at_CK, mask=real_CK, other=0.0).to(tl.float32)
        size_C = inside_C.to(tl.float32)
    most_C = tl.max(tl.abs(b_CK), 1)
    b_CK *= (1 / tl.where(most_C > 0, most_C, 1.0))[:, None]
    norm_C = tl.sqrt(tl.sum(b_CK * b_CK, 1))
    b_CK *= (1 / tl.where(most_C > 0, norm_C, 1.0))[:, None]
    size_C *= most_C * norm_C  # in two factors: see `solver._unit`
    tl.store(solution + at_CK, b_CK, mask=real_CK)  # until it is needed again

    # Of a token: rho = ||r||; r and the direction p are kept over it. The first direction is the start itself, taken whole (by `first`):
    # x = start and r = b - A start come out of round -1.
    # A token's scalars begin as a sum over a product's result, for then the compiler has them all where that product leaves its rows.
    first_C = norm_C * 0.0 + 1.0
    rho_C = first_C
    p_CK = b_CK
    count = 0
    if JACOBI:
        diagonal_K = tl.load(high + m * K * (V + K) + i_K * (V + K) + V + i_K, mask=i_K < K, other=0.0).to(tl.float32)
        squared_CK = k_CK.to(tl.float32) * k_CK.to(tl.float32)
        diagonal_CK = product(weight_CC if MODE == "exact" else weight_CC.to(tl.float16), operand(squared_CK, MODE), None, None, BOTH_EXACT)
        diagonal_CK += start_H_C[:, None] * diagonal_K[None, :] + (tl.load(lam_at_K, mask=i_K < K, other=1.0) / unit)[None, :]
        rho_C = tl.sum(diagonal_CK * 0.0, 1) + 1.0
        positive_CK = diagonal_CK > 0
        p_CK = tl.where(positive_CK, b_CK / tl.where(positive_CK, diagonal_CK, 1.0), 0.0)
        first_C = tl.sqrt(tl.sum(p_CK * p_CK, 1))
        p_CK *= (1 / tl.where(first_C > 0, first_C, 1.0))[:, None]
        count = -1
    KEPT: tl.constexpr = tl.float16 if SINGLE == "half" else tl.float32
    p_CK = p_CK.to(KEPT)
    r_CK = b_CK.to(KEPT)
    x_CK = b_CK * 0.0
    weight_CC = weight_CC.to(KEPT)
    high_KK = tl.load(high + at_KK, mask=real_KK, other=0.0)
    low_KK = high_KK
    if SINGLE == "split":
        low_KK = tl.load(low + at_KK, mask=real_KK, other=0.0)

    limit_C = rho_C * (0.0 if JACOBI else tl.maximum(eps, SMALLEST))
    going_C = rho_C > 0  # a right-hand side of 0 stops at once: its direction is 0
    taken_C = (rho_C * 0.0).to(tl.int32)
    left_C = rho_C * 0.0
    asked_C = limit_C  # what eps asks of the residual
    score_CC = tl.zeros((C, C), tl.float32)
    least_lam = tl.min(tl.load(lam_at_K, mask=i_K < K, other=float("inf")), 0) / unit
    rounds = 0
    refining = True
    while refining:
        while (tl.max(going_C.to(tl.int32), 0) > 0) & (count < steps):
            Ap_CK = apply(p_CK, k_CK, high_KK, low_KK, weight_CC, start_H_C, SINGLE)
            direction_CK = p_CK.to(tl.float32)
            lam_K = tl.load(lam_at_K, mask=i_K < K, other=1.0) / unit
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
            p_CK = (Ap_CK + tl.where(going_C & (count >= 0), turn_C, 0.0)[:, None] * direction_CK).to(KEPT)
            taken_C += (moves_C & (count >= 0)).to(tl.int32)
            count += 1

        asked_C = tl.where(rounds == 0, limit_C, asked_C)
        # The true residual. (`again` is 0: what is only needed here is made here, not kept in registers through the loop.)
        again = 128 * (count < -1).to(tl.int32)
        sum_C, document_C, flip_C, first = decays(log_decay, sign, row_C + again, inside_C)
        reach_CK = tl.load(k + at_CK + again, mask=real_CK, other=0.0).to(tl.float32)
        key_size_C = row_scales(reach_CK, MODE)
        reach_C = tl.load(beta + row_C + again, mask=inside_C, other=0.0) * key_size_C
        x_size_C = row_scales(x_CK, MODE)
        unit_x_CK = x_CK * (1 / x_size_C)[:, None]
        score_CC = product(unit_x_CK, tl.trans(k_CK), None, None, FULL)
        inside_CC = score_CC * decay_between(sum_C, document_C) * flip_C[:, None] * (flip_C * reach_C * key_size_C / unit)[None, :]
        full_low_KK = high_KK
        if FULL == "split":
            full_low_KK = tl.load(low + at_KK + again, mask=real_KK, other=0.0)
        start_C = since_start(sum_C, document_C, flip_C, first)
        Ax_CK = product(unit_x_CK, high_KK, full_low_KK, None, FULL) * (start_C * (H_size / unit))[:, None]
        if BACK:  # x0 . (c H e)
            since_C = tl.sum(tl.load(x0 + at_CK + again, mask=real_CK, other=0.0) * Ax_CK, 1) * x_size_C
        Ax_CK += (tl.load(lam_at_K + again, mask=i_K < K, other=1.0) / unit)[None, :] * unit_x_CK
        b_CK = tl.load(solution + at_CK + again, mask=real_CK, other=0.0)
        left_CK = product(-inside_CC, k_CK, None, b_CK * (1 / x_size_C)[:, None] - Ax_CK, FULL)
        left_C = tl.sqrt(tl.sum(left_CK * left_CK, 1))
        if MODE == "refine":
            p_CK = (left_CK * (1 / tl.where(left_C > 0, left_C, 1.0))[:, None]).to(KEPT)
            left_C *= x_size_C
            reached_C = tl.maximum(bound, 2 * asked_C)
            if BACK:  # x may be small (1 / 900 of b on repeated tokens), and its error is at most ||residual|| / least_lam
                reached_C *= tl.minimum(4 * least_lam * tl.sqrt(tl.sum(unit_x_CK * unit_x_CK, 1)) * x_size_C, 1.0)
            going_C = left_C > reached_C
            limit_C = tl.maximum(reached_C / 4, SMALLEST)
            rho_C = tl.where(going_C, left_C, rho_C)
            r_CK = p_CK
            rounds += 1
            refining = (tl.max(going_C.to(tl.int32), 0) > 0) & (count < steps) & (rounds < ROUNDS)
        else:
            left_C *= x_size_C
            refining = False
        if BACK:
            if not refining:
                tl.store(since + row_C, tl.load(since + row_C, mask=inside_C, other=0.0) - since_C * size_C, mask=inside_C)
    tl.debug_barrier()

    tl.store(solution + at_CK, x_CK * (size_C / unit)[:, None], mask=real_CK)
    if BACK:
        x_CK *= (size_C / unit)[:, None]
        tl.store(output + at_CK, x_CK.to(output.dtype.element_ty), mask=real_CK)
        solved_CK = tl.load(x0 + at_CK, mask=real_CK, other=0.0)
        tl.store(dlam + m * K + i_K, -tl.sum(solved_CK * x_CK, 0), mask=i_K < K)
    else:
        tl.store(taken + row_C, taken_C, mask=inside_C)
        tl.store(residual + row_C, left_C, mask=inside_C)
        again = 128 * (count < -1).to(tl.int32)
        sum_C, document_C, flip_C, first = decays(log_decay, sign, row_C + again, inside_C)
        reach_CK = tl.load(k + at_CK + again, mask=real_CK, other=0.0).to(tl.float32)
        reach_C = tl.load(beta + row_C + again, mask=inside_C, other=0.0) * row_scales(reach_CK, MODE)
        v_CV = tl.load(v + at_CV, mask=real_CV, other=0.0).to(tl.float32)
        v_size_C = row_scales(v_CV, MODE)
        v_CV = operand(v_CV * (1 / v_size_C)[:, None], MODE)
        G_unit = 1.0 if MODE == "exact" else power_of_two(tl.maximum(tl.max(reach_C * v_size_C, 0), G_size))
        x_size_C = row_scales(x_CK, MODE)
        x_CK *= (1 / x_size_C)[:, None]
        inside_CC = score_CC * decay_between(sum_C, document_C) * flip_C[:, None] * (flip_C * reach_C * v_size_C / G_unit)[None, :]
        G_KV = tl.load(high + at_KV, mask=real_KV, other=0.0)
        G_low_KV = G_KV
        if FULL == "split":
            G_low_KV = tl.load(low + at_KV, mask=real_KV, other=0.0)
        start_C = since_start(sum_C, document_C, flip_C, first)
        o_CV = product(x_CK, G_KV, G_low_KV, None, FULL) * (start_C * (G_size / G_unit))[:, None]
        o_CV = product(inside_CC, v_CV, None, o_CV, FULL) * (x_size_C * size_C * (G_unit / unit))[:, None]
        tl.store(output + at_CV, o_CV.to(output.dtype.element_ty), mask=real_CV)
