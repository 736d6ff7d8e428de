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


@triton.jit
def apply(p_CK, k_CK, high_KK, low_KK, weight_CC, start_C, MODE: tl.constexpr):
    """((P K^T) * weight) K and start (P H), added."""
    inside_CC = product(p_CK, tl.trans(k_CK), None, None, MODE) * weight_CC
    return product(inside_CC, k_CK, None, product(p_CK, high_KK, low_KK, None, MODE) * start_C[:, None], MODE)


@triton.jit
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
    sum_C, document_C, flip_C, first = decays(log_decay, sign, row_C, inside_C)
    beta_C = tl.load(beta + row_C, mask=inside_C, other=0.0)
    k_CK = tl.load(k + at_CK, mask=real_CK, other=0.0).to(tl.float32)
    key_size_C = row_scales(k_CK, MODE)
    k_CK = operand(k_CK * (1 / key_size_C)[:, None], MODE)
    H_size = 1.0 if MODE == "exact" else tl.load(scale + m * 2 + 1)
    reach_C = beta_C * key_size_C * key_size_C
    unit = 1.0 if MODE == "exact" else power_of_two(tl.maximum(tl.max(reach_C, 0), H_size))
    flips_CC = flip_C[:, None] * flip_C[None, :]
    between_CC = decay_between(sum_C, document_C) * flips_CC
    weight_CC = between_CC * (reach_C / unit)[None, :]
    start_C = since_start(sum_C, document_C, flip_C, first)
    start_H_C = start_C * (H_size / unit)
    high_KK = tl.load(high + at_KK, mask=real_KK, other=0.0)
    low_KK = high_KK
    if SINGLE == "split":
        low_KK = tl.load(low + at_KK, mask=real_KK, other=0.0)
    lam_K = tl.load(lam + h * K + i_K, mask=i_K < K, other=1.0) / unit

    # The right-hand side b, of unit norm.
    if BACK:
        do_CV = tl.load(query + at_CV, mask=real_CV, other=0.0).to(tl.float32)
        do_size_C = row_scales(do_CV, MODE)
        do_CV = operand(do_CV * (1 / do_size_C)[:, None], MODE)
        v_CV = tl.load(v + at_CV, mask=real_CV, other=0.0).to(tl.float32)
        v_size_C = row_scales(v_CV, MODE)
        v_CV = operand(v_CV * (1 / v_size_C)[:, None], MODE)
        G_KV = tl.load(high + at_KV, mask=real_KV, other=0.0)
        G_size = 1.0 if MODE == "exact" else tl.load(scale + m * 2)
        value_reach_C = beta_C * key_size_C * v_size_C
        G_unit = 1.0 if MODE == "exact" else power_of_two(tl.maximum(tl.max(value_reach_C, 0), G_size))
        b_CK = product(do_CV, tl.trans(G_KV), None, None, "exact" if MODE == "exact" else "half")
        if MODE != "exact":
            G_low_KV = tl.load(low + at_KV, mask=real_KV, other=0.0)
            b_CK = tl.dot(do_CV, tl.trans(G_low_KV), b_CK)
        b_CK *= (start_C * (G_size / G_unit))[:, None]
        solved_CK = tl.load(x0 + at_CK, mask=real_CK, other=0.0)
        since_C = tl.sum(solved_CK * b_CK, 1) * do_size_C * G_unit
        inside_CC = tl.dot(do_CV, tl.trans(v_CV), input_precision="tf32x3") if MODE == "exact" else tl.dot(do_CV, tl.trans(v_CV))
        b_CK = product(inside_CC * between_CC * (value_reach_C / G_unit)[None, :], k_CK, None, b_CK, FULL)
        size_C = do_size_C * G_unit
    else:
        b_CK = tl.load(query + at_CK, mask=real_CK, other=0.0).to(tl.float32)
        size_C = inside_C.to(tl.float32)
    most_C = tl.max(tl.abs(b_CK), 1)
    b_CK *= (1 / tl.where(most_C > 0, most_C, 1.0))[:, None]
    norm_C = tl.sqrt(tl.sum(b_CK * b_CK, 1))
    b_CK *= (1 / tl.where(most_C > 0, norm_C, 1.0))[:, None]
    size_C *= most_C * norm_C  # in two factors: see `solver._unit`

    # The first direction is the start itself, taken whole: x = x0 and r = b - A x0 come out of the first round.
    x_CK = b_CK * 0.0
    r_CK = b_CK
    p_CK = b_CK
    first_C = norm_C * 0.0 + 1.0
    count = 0
    if JACOBI:
        diagonal_K = tl.sum(tl.where(i_K[:, None] == i_K[None, :], high_KK.to(tl.float32), 0.0), 0)
        squared_CK = k_CK.to(tl.float32) * k_CK.to(tl.float32)
        diagonal_CK = tl.dot(weight_CC.to(tl.float16), squared_CK.to(tl.float16)) if MODE != "exact" else tl.dot(weight_CC, squared_CK, input_precision="tf32x3")
        diagonal_CK += start_H_C[:, None] * diagonal_K[None, :] + lam_K[None, :]
        positive_CK = diagonal_CK > 0
        p_CK = tl.where(positive_CK, b_CK / tl.where(positive_CK, diagonal_CK, 1.0), 0.0)
        first_C = tl.sqrt(tl.sum(p_CK * p_CK, 1))
        p_CK *= (1 / tl.where(first_C > 0, first_C, 1.0))[:, None]
        count = -1
    p_CK = p_CK.to(tl.float16) if SINGLE == "half" else p_CK
    weight_CC = weight_CC.to(tl.float16) if SINGLE == "half" else weight_CC

    some_C = inside_C & (most_C > 0)
    rho_C = norm_C * 0.0 + 1.0  # ||r||; p is the direction over it
    limit_C = rho_C * (1e9 if JACOBI else tl.maximum(eps, 1.1920929e-07))
    going_C = some_C
    taken_C = tl.zeros((C,), tl.int32)
    left_C = norm_C * 0.0
    H_C = norm_C * 0.0  # backward: x0 . (c H e*)
    refining = tl.max(some_C.to(tl.int32), 0) > 0
    rounds = 0
    while refining:
        while (tl.max(going_C.to(tl.int32), 0) > 0) & (count < steps):
            Ap_CK = apply(p_CK, k_CK, high_KK, low_KK, weight_CC, start_H_C, SINGLE)
            p32_CK = p_CK.to(tl.float32)
            Ap_CK += lam_K[None, :] * p32_CK
            curvature_C = tl.sum(p32_CK * Ap_CK, 1)
            moves_C = going_C & ((curvature_C > 0) | (count < 0))
            alpha_C = tl.where(moves_C, tl.where(count < 0, first_C, rho_C / tl.where(curvature_C > 0, curvature_C, 1.0)), 0.0)
            x_CK += alpha_C[:, None] * p32_CK
            r_CK -= alpha_C[:, None] * Ap_CK
            new_C = tl.sqrt(tl.sum(r_CK * r_CK, 1))
            if JACOBI:
                at_first_C = tl.maximum(eps * (tl.minimum(new_C, 1.0) if CRITERION == "b" else new_C), 1.1920929e-07)
                limit_C = tl.where(count < 0, at_first_C, limit_C)
            going_C = moves_C & (new_C > limit_C)
            turn_C = tl.where(going_C & (count >= 0), new_C / rho_C, 0.0)
            p_CK = (r_CK * (1 / tl.where(going_C, new_C, 1.0))[:, None] + turn_C[:, None] * p32_CK).to(p_CK.dtype)
            rho_C = tl.where(moves_C, new_C, rho_C)
            taken_C += (moves_C & (count >= 0)).to(tl.int32)
            count += 1

        # The true residual.
        x_size_C = row_scales(x_CK, MODE)
        unit_x_CK = x_CK * (1 / x_size_C)[:, None]
        full_low_KK = high_KK
        if FULL == "split":
            full_low_KK = tl.load(low + at_KK, mask=real_KK, other=0.0)
        Hx_CK = product(unit_x_CK, high_KK, full_low_KK, None, FULL) * start_H_C[:, None]
        if BACK:
            H_C = tl.sum(tl.load(x0 + at_CK, mask=real_CK, other=0.0) * Hx_CK, 1) * x_size_C * unit
        inside_CC = product(unit_x_CK, tl.trans(k_CK), None, None, FULL) * decay_between(sum_C, document_C) * flips_CC * (reach_C / unit)[None, :]
        Ax_CK = product(inside_CC, k_CK, None, Hx_CK, FULL) + lam_K[None, :] * unit_x_CK
        left_CK = b_CK - x_size_C[:, None] * Ax_CK
        left_C = tl.sqrt(tl.sum(left_CK * left_CK, 1))
        if MODE == "refine":
            going_C = some_C & (left_C > tl.maximum(bound, 2 * limit_C))
            limit_C = tl.where(going_C, tl.maximum(limit_C, bound / 4), limit_C)
            r_CK = tl.where(going_C[:, None], left_CK, r_CK)
            rho_C = tl.where(going_C, left_C, rho_C)
            p_CK = tl.where(going_C[:, None], (left_CK * (1 / tl.where(left_C > 0, left_C, 1.0))[:, None]).to(p_CK.dtype), p_CK)
            rounds += 1
            refining = (tl.max(going_C.to(tl.int32), 0) > 0) & (count < steps) & (rounds < 6)
        else:
            refining = False

    if BACK:
        x_CK *= (size_C / unit)[:, None]
        solved_CK = tl.load(x0 + at_CK, mask=real_CK, other=0.0)
        tl.store(solution + at_CK, x_CK, mask=real_CK)
        tl.store(output + at_CK, x_CK.to(output.dtype.element_ty), mask=real_CK)
        tl.store(dlam + m * K + i_K, -tl.sum(solved_CK * x_CK, 0), mask=i_K < K)
        # since_C - H_C: H_C was taken with x of the scaled system
        tl.store(since + row_C, since_C - H_C * (size_C / unit), mask=inside_C)
    else:
        tl.store(taken + row_C, taken_C, mask=inside_C)
        tl.store(residual + row_C, tl.where(some_C, left_C, 0.0), mask=inside_C)
        tl.store(solution + at_CK, x_CK * (size_C / unit)[:, None], mask=real_CK)
        v_CV = tl.load(v + at_CV, mask=real_CV, other=0.0).to(tl.float32)
        v_size_C = row_scales(v_CV, MODE)
        v_CV = operand(v_CV * (1 / v_size_C)[:, None], MODE)
        G_size = 1.0 if MODE == "exact" else tl.load(scale + m * 2)
        value_reach_C = beta_C * key_size_C * v_size_C
        G_unit = 1.0 if MODE == "exact" else power_of_two(tl.maximum(tl.max(value_reach_C, 0), G_size))
        x_size_C = row_scales(x_CK, MODE)
        x_CK *= (1 / x_size_C)[:, None]
        inside_CC = product(x_CK, tl.trans(k_CK), None, None, FULL)
        inside_CC *= decay_between(sum_C, document_C) * flip_C[:, None] * (flip_C * value_reach_C / G_unit)[None, :]
        G_KV = tl.load(high + at_KV, mask=real_KV, other=0.0)
        G_low_KV = G_KV
        if FULL == "split":
            G_low_KV = tl.load(low + at_KV, mask=real_KV, other=0.0)
        o_CV = product(x_CK, G_KV, G_low_KV, None, FULL) * (start_C * (G_size / G_unit))[:, None]
        o_CV = product(inside_CC, v_CV, None, o_CV, FULL) * (x_size_C * size_C * (G_unit / unit))[:, None]
        tl.store(output + at_CV, o_CV.to(output.dtype.element_ty), mask=real_CV)
