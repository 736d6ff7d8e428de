"""Mesa's solve, chunk by chunk and head by head: conjugate gradients (MesaNet, arXiv 2506.05233, Algorithm 1) with H on chip.

With D the decay inside the chunk times beta, c that from its start and H its starting state, every token's product with its own H_t + Lambda is

    A p = ((P K^T) * D) K + c (P H) + Lambda * p

`right_side` gives G_t do_t (backward), `iterate` solves, `check` takes the true residual and reads the solution out. Everything is divided
by one power of two (`unit`), keys by one each, H and G by their own, directions by their residual's norm: what enters float16 is near 1.
In "half" products the solver carries a residual that drifts from the true one by about 2^-12 |H| |x|. The true one is computed in split
products, and a token for which it is too large is solved for once more, from there, by itself (iterative refinement).

Shapes: C tokens of the chunk, K key size, V value size, X = V + K, M = chunks x B x H (chunk-major).
"""

import triton
import triton.language as tl

from kernels.linear_attention.walks import since_start
from kernels.mesa.products import operand, power_of_two, product, row_scales, settled, weights
from kernels.mesa.walks import tile

SMALLEST = tl.constexpr(2**-23)  # a residual that counts as 0
REFINEMENT = tl.constexpr(8)  # steps of one, at most


@triton.jit
def place(m, T, H, BH, C: tl.constexpr):
    """Of chunk m: its head, its first token's row among all of [B, T, H], rows from there, which tokens there are, its place in gates."""
    n, bh = m // BH, m % BH
    b, h = (bh // H).to(tl.int64), bh % H
    i_C = tl.arange(0, C)
    return h, (b * T + n * C) * H + h, i_C * H, n * C + i_C < T, bh * tl.cdiv(T, C) + n


@triton.jit
def scaled(x, row_C, real_C, size: tl.constexpr, block: tl.constexpr, MODE: tl.constexpr):
    """A tile [C, size] as an operand, and the powers of two that its rows were divided by."""
    x_CK = tile(x, row_C, real_C, 0, size, block)
    size_C = row_scales(x_CK, MODE)
    return operand(x_CK * (1 / size_C)[:, None], MODE), size_C


@triton.jit(do_not_specialize=["T", "H", "BH"])
def right_side(
    do, k, v, x, beta, sums, tags, firsts, high, low, scale, rhs, since, T, H, BH,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """rhs [B, T, H, K] = G_t do_t in float32; since [B, T, H] = x . (its part from the chunk's start)."""
    FULL: tl.constexpr = "exact" if MODE == "exact" else "split"
    ONCE: tl.constexpr = "exact" if MODE == "exact" else "half"
    m = tl.program_id(0)
    h, first_row, row_C, real_C, chunk = place(m, T, H, BH, C)
    i_K, j_V = tl.arange(0, BK), tl.arange(0, BV)
    at_CK, real_CK = row_C[:, None] * K + i_K[None, :], real_C[:, None] & (i_K < K)[None, :]
    state = m.to(tl.int64) * K * (V + K)
    at_KV, real_KV = i_K[:, None] * (V + K) + j_V[None, :], (i_K < K)[:, None] & (j_V < V)[None, :]
    do_CV, do_size_C = scaled(do + first_row * V, row_C, real_C, V, BV, MODE)
    G_size = 1.0 if MODE == "exact" else tl.load(scale + m * 2)
    G_KV = tl.load(high + state + at_KV, mask=real_KV, other=0.0)
    rhs_CK = product(do_CV, tl.trans(G_KV), None, None, ONCE)
    if MODE != "exact":
        G_KV = tl.load(low + state + at_KV, mask=real_KV, other=0.0)
        rhs_CK = product(do_CV, tl.trans(G_KV), None, rhs_CK, ONCE)
    sum_C, tag_C = tl.load(sums + chunk * C + tl.arange(0, C)), tl.load(tags + chunk * C + tl.arange(0, C))
    rhs_CK *= (since_start(sum_C, tag_C, tl.load(firsts + chunk)) * G_size)[:, None]
    x_CK = tl.load(x + first_row * K + at_CK, mask=real_CK, other=0.0)
    tl.store(since + first_row + row_C, tl.sum(x_CK * rhs_CK, 1) * do_size_C, mask=real_C)
    v_CV, v_size_C = scaled(v + first_row * V, row_C, real_C, V, BV, MODE)
    k_CK, k_size_C = scaled(k + first_row * K, row_C, real_C, K, BK, MODE)
    reach_C = tl.load(beta + first_row + row_C, mask=real_C, other=0.0) * k_size_C * v_size_C
    most = 1.0 if MODE == "exact" else power_of_two(tl.max(reach_C, 0))
    inside_CC = product(do_CV, tl.trans(v_CV), None, None, ONCE) * weights(sum_C, tag_C, reach_C / most)
    rhs_CK = product(inside_CC, k_CK, None, rhs_CK * (1 / most), FULL) * (do_size_C * most)[:, None]
    tl.store(rhs + first_row * K + at_CK, rhs_CK, mask=real_CK)


@triton.jit
def system(
    m,
    chunk,
    k,
    beta,
    sums,
    tags,
    firsts,
    scale,
    first_row,
    row_C,
    real_C,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    MODE: tl.constexpr,
):
    """Of A = unit * (weight, start, Lambda / unit): k_CK, k_size_C, weight_CC, start_C, unit, and the gates."""
    k_CK, k_size_C = scaled(k + first_row * K, row_C, real_C, K, BK, MODE)
    reach_C = tl.load(beta + first_row + row_C, mask=real_C, other=0.0) * k_size_C * k_size_C
    H_size = 1.0 if MODE == "exact" else tl.load(scale + m * 2 + 1)
    unit = 1.0 if MODE == "exact" else power_of_two(tl.maximum(tl.max(reach_C, 0), H_size))
    sum_C, tag_C = tl.load(sums + chunk * C + tl.arange(0, C)), tl.load(tags + chunk * C + tl.arange(0, C))
    start_C = since_start(sum_C, tag_C, tl.load(firsts + chunk))
    weight_CC = weights(sum_C, tag_C, reach_C / unit)
    return k_CK, k_size_C, weight_CC, start_C * (H_size / unit), unit, sum_C, tag_C, start_C


@triton.jit
def scaled_float32(at_CK, real_CK, MODE: tl.constexpr):
    """Float32 rows divided by powers of two, and these."""
    x_CK = tl.load(at_CK, mask=real_CK, other=0.0)
    size_C = row_scales(x_CK, MODE)
    return x_CK * (1 / size_C)[:, None], size_C


@triton.jit
def apply(p_CK, k_CK, high_KK, low_KK, weight_CC, start_C, MODE: tl.constexpr):
    """((P K^T) * weight) K + start (P H)."""
    inside_CC = product(p_CK, tl.trans(k_CK), None, None, MODE) * weight_CC
    return product(inside_CC, k_CK, None, product(p_CK, high_KK, low_KK, None, MODE) * start_C[:, None], MODE)


@triton.jit(do_not_specialize=["T", "H", "BH", "M", "steps"])
def iterate(
    rhs, k, beta, sums, tags, firsts, lam, high, low, scale, solution, taken, asked, goal, flag, T, H, BH, M, steps, eps,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    MODE: tl.constexpr, FIRST: tl.constexpr, JACOBI: tl.constexpr, CRITERION: tl.constexpr,
):  # fmt: skip
    """solution [B, T, H, K] float32 = A^-1 rhs; taken, asked [B, T, H]: steps, and the residual at which a token could stop.

    Else than FIRST, chunks that are flagged: rhs is the residual over its goal [B, T, H], 0 for tokens that need nothing; solved to norm 1,
    times the goal, and added.
    """
    if FIRST:
        _iterate(
            tl.program_id(0), rhs, k, beta, sums, tags, firsts, lam, high, low, scale, solution, taken, asked, goal, T, H, BH, steps, eps,
            K, V, C, BK, MODE, FIRST, JACOBI, CRITERION,
        )  # fmt: skip
    else:
        for turn in range(tl.cdiv(M, tl.num_programs(0))):
            m = turn * tl.num_programs(0) + tl.program_id(0)
            if tl.load(flag + m, mask=m < M, other=0) != 0:
                _iterate(
                    m, rhs, k, beta, sums, tags, firsts, lam, high, low, scale, solution, taken, asked, goal, T, H, BH, steps, eps,
                    K, V, C, BK, MODE, FIRST, JACOBI, CRITERION,
                )  # fmt: skip


@triton.jit
def _iterate(
    m, rhs, k, beta, sums, tags, firsts, lam, high, low, scale, solution, taken, asked, goal, T, H, BH, steps, eps,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    MODE: tl.constexpr, FIRST: tl.constexpr, JACOBI: tl.constexpr, CRITERION: tl.constexpr,
):  # fmt: skip
    h, first_row, row_C, real_C, chunk = place(m, T, H, BH, C)
    i_K = tl.arange(0, BK)
    at_CK, real_CK = row_C[:, None] * K + i_K[None, :], real_C[:, None] & (i_K < K)[None, :]
    state = m.to(tl.int64) * K * (V + K) + V
    at_KK, real_KK = i_K[:, None] * (V + K) + i_K[None, :], (i_K < K)[:, None] & (i_K < K)[None, :]
    KEPT: tl.constexpr = tl.float16 if MODE == "half" else tl.float32
    ONCE: tl.constexpr = "exact" if MODE == "exact" else "half"

    k_CK, _, weight_CC, start_C, unit, _, _, _ = system(
        m, chunk, k, beta, sums, tags, firsts, scale, first_row, row_C, real_C, K, BK, C, MODE
    )
    # Made in the layout that products leave their results in, so that nothing is made anew in another, and all scalars of tokens are there.
    weight_CC += 0.0 * product(k_CK, tl.trans(k_CK), None, None, ONCE)
    b_CK = settled(tl.load(rhs + first_row * K + at_CK, mask=real_CK, other=0.0).to(tl.float32))
    most_C = tl.max(tl.abs(b_CK), 1)
    b_CK *= (1 / tl.where(most_C > 0, most_C, 1.0))[:, None]
    norm_C = tl.sqrt(tl.sum(b_CK * b_CK, 1))
    b_CK *= (1 / tl.where(most_C > 0, norm_C, 1.0))[:, None]
    size_C = most_C * norm_C  # in two factors: see `solver._unit`

    # Of a token: rho = ||r||; r and the direction p are kept over it. The first direction is the start itself, taken whole (by `first`):
    # x = start and r = b - A start come out of round -1.
    first_C = norm_C * 0.0
    p_CK = b_CK
    count = 0
    if JACOBI:
        diagonal_K = tl.load(high + state + i_K * (V + K + 1), mask=i_K < K, other=0.0).to(tl.float32)
        squared_CK = k_CK.to(tl.float32) * k_CK.to(tl.float32)
        diagonal_CK = product(operand(weight_CC, MODE), operand(squared_CK, MODE), None, None, ONCE)
        diagonal_CK += start_C[:, None] * diagonal_K[None, :] + (tl.load(lam + h * K + i_K, mask=i_K < K, other=1.0) / unit)[None, :]
        positive_CK = diagonal_CK > 0
        root_CK = tl.rsqrt(tl.where(positive_CK, diagonal_CK, 1.0))  # quicker than to divide
        p_CK = tl.where(positive_CK, b_CK * root_CK * root_CK, 0.0)
        first_C = tl.sqrt(tl.sum(p_CK * p_CK, 1))
        p_CK *= (1 / tl.where(first_C > 0, first_C, 1.0))[:, None]
        count = -1
    p_CK = p_CK.to(KEPT)
    r_CK = b_CK.to(KEPT)
    x_CK = b_CK * 0.0
    weight_CC = weight_CC.to(KEPT)
    high_KK = tl.load(high + state + at_KK, mask=real_KK, other=0.0)
    low_KK = high_KK
    if MODE == "split":
        low_KK = tl.load(low + state + at_KK, mask=real_KK, other=0.0)

    rho_C = norm_C * 0.0 + 1.0
    if FIRST:
        limit_C = rho_C * (0.0 if JACOBI else tl.maximum(eps, SMALLEST))
        end = steps
    else:
        limit_C = rho_C / tl.where(most_C > 0, size_C, 1.0)
        end = REFINEMENT
    going_C = most_C > 0
    taken_C = (rho_C * 0.0).to(tl.int32)
    while (tl.max(going_C.to(tl.int32), 0) > 0) & (count < end):
        Ap_CK = apply(p_CK, k_CK, high_KK, low_KK, weight_CC, start_C, MODE)
        direction_CK = p_CK.to(tl.float32)
        lam_K = tl.load(lam + h * K + i_K, mask=i_K < K, other=1.0) / unit
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

    x_CK *= (size_C / unit)[:, None]
    if FIRST:
        tl.store(asked + first_row + row_C, limit_C, mask=real_C)
    else:
        x_CK *= tl.load(goal + first_row + row_C, mask=real_C, other=0.0)[:, None]
        x_CK += tl.load(solution + first_row * K + at_CK, mask=real_CK, other=0.0)
        taken_C += tl.load(taken + first_row + row_C, mask=real_C, other=0)
    tl.store(solution + first_row * K + at_CK, x_CK, mask=real_CK)
    tl.store(taken + first_row + row_C, taken_C, mask=real_C)


@triton.jit(do_not_specialize=["T", "H", "BH", "M", "steps", "last"])
def check(
    rhs, k, v, x0, beta, sums, tags, firsts, lam, high, low, scale, x, taken, asked, left, goal, flag, output, residual, since, dlam,
    T, H, BH, M, steps, last, bound,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BJ: tl.constexpr,
    MODE: tl.constexpr, BACK: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """The true residual of x [B, T, H, K], relative to rhs; and what is made of x.

    Forward: output [B, T, H, V] = G^T x, residual [B, T, H]. BACK: output [B, T, H, K] = x, dlam [M, K] the chunk's part of Lambda's
    gradient, since [B, T, H] that of log decay from the chunk's start, with the forward solution x0.
    But for the last round: flag [M], and left [B, T, H, K] over goal [B, T, H] where flagged, for `iterate`.
    Else than FIRST, chunks that are flagged.
    """
    if FIRST:
        _check(
            tl.program_id(0), rhs, k, v, x0, beta, sums, tags, firsts, lam, high, low, scale, x, taken, asked, left, goal, flag, output, residual, since,
            dlam, T, H, BH, steps, last, bound, K, V, C, BK, BV, BJ, MODE, BACK, FIRST,
        )  # fmt: skip
    else:
        for turn in range(tl.cdiv(M, tl.num_programs(0))):
            m = turn * tl.num_programs(0) + tl.program_id(0)
            if tl.load(flag + m, mask=m < M, other=0) != 0:
                _check(
                    m, rhs, k, v, x0, beta, sums, tags, firsts, lam, high, low, scale, x, taken, asked, left, goal, flag, output, residual, since,
                    dlam, T, H, BH, steps, last, bound, K, V, C, BK, BV, BJ, MODE, BACK, FIRST,
                )  # fmt: skip


@triton.jit
def _check(
    m, rhs, k, v, x0, beta, sums, tags, firsts, lam, high, low, scale, x, taken, asked, left, goal, flag, output, residual, since, dlam,
    T, H, BH, steps, last, bound,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BJ: tl.constexpr,
    MODE: tl.constexpr, BACK: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    h, first_row, row_C, real_C, chunk = place(m, T, H, BH, C)
    i_K = tl.arange(0, BK)
    at_CK, real_CK = row_C[:, None] * K + i_K[None, :], real_C[:, None] & (i_K < K)[None, :]
    state = m.to(tl.int64) * K * (V + K)
    x_CK, x_size_C = scaled_float32(x + first_row * K + at_CK, real_CK, MODE)
    k_CK, k_size_C, weight_CC, start_H_C, unit, sum_C, tag_C, start_C = system(
        m, chunk, k, beta, sums, tags, firsts, scale, first_row, row_C, real_C, K, BK, C, MODE
    )
    score_CC = product(x_CK, tl.trans(k_CK), None, None, MODE)
    weight_CC *= score_CC
    b_CK = tl.load(rhs + first_row * K + at_CK, mask=real_CK, other=0.0).to(tl.float32)
    most_C = tl.max(tl.abs(b_CK), 1)
    over_C = 1 / tl.where(most_C > 0, most_C, 1.0)  # in two factors: see `solver._unit`
    norm_C = tl.sqrt(tl.sum(b_CK * over_C[:, None] * b_CK * over_C[:, None], 1))
    norm_C = tl.where(most_C > 0, norm_C, 1.0)
    length_C = tl.sqrt(tl.sum(x_CK * x_CK, 1)) * (x_size_C * over_C / norm_C)

    # Columns in slices: registers. Once for the residual, and once more to store it where it is too large.
    goal_C, again_C, left_C = over_C, over_C < 0, over_C * 0.0
    turns = 1
    turn = 0
    while turn < turns:
        square_C, H_C = over_C * 0.0, over_C * 0.0
        for first_key in range(0, K, BJ):
            j_J = first_key + tl.arange(0, BJ)
            at_CJ, real_CJ = row_C[:, None] * K + j_J[None, :], real_C[:, None] & (j_J < K)[None, :]
            at_KJ, real_KJ = V + i_K[:, None] * (V + K) + j_J[None, :], (i_K < K)[:, None] & (j_J < K)[None, :]
            high_KJ = tl.load(high + state + at_KJ, mask=real_KJ, other=0.0)
            low_KJ = high_KJ
            if MODE != "exact":
                low_KJ = tl.load(low + state + at_KJ, mask=real_KJ, other=0.0)
            Ax_CJ = product(x_CK, high_KJ, low_KJ, None, MODE) * start_H_C[:, None]
            if BACK:
                H_C += tl.sum(tl.load(x0 + first_row * K + at_CJ, mask=real_CJ, other=0.0) * Ax_CJ, 1)
            k_CJ = tl.load(k + first_row * K + at_CJ, mask=real_CJ, other=0.0).to(tl.float32)
            Ax_CJ = product(weight_CC, operand(k_CJ * (1 / k_size_C)[:, None], MODE), None, Ax_CJ, MODE) * (x_size_C * unit)[:, None]
            lam_J = tl.load(lam + h * K + j_J, mask=j_J < K, other=0.0)
            Ax_CJ += lam_J[None, :] * tl.load(x + first_row * K + at_CJ, mask=real_CJ, other=0.0)
            left_CJ = tl.load(rhs + first_row * K + at_CJ, mask=real_CJ, other=0.0).to(tl.float32) - Ax_CJ
            left_CJ *= over_C[:, None]
            square_C += tl.sum(left_CJ * left_CJ, 1)
            if turn == 1:
                tl.store(left + first_row * K + at_CJ, tl.where(again_C[:, None], left_CJ * goal_C[:, None], 0.0), mask=real_CJ)
        if turn == 0:
            left_C = tl.sqrt(square_C) / norm_C
            if last == 0:
                reached_C = tl.maximum(bound, 2 * tl.load(asked + first_row + row_C, mask=real_C, other=0.0))
                if BACK:  # x may be small (1 / 900 of b on repeated tokens), and its error is at most ||left|| / the least of Lambda
                    least_lam = tl.min(tl.load(lam + h * K + i_K, mask=i_K < K, other=float("inf")), 0)
                    reached_C *= tl.minimum(4 * least_lam * length_C, 1.0)
                taken_C = tl.load(taken + first_row + row_C, mask=real_C, other=0)
                again_C = (left_C > reached_C) & (taken_C + REFINEMENT <= steps)
                turns += tl.max(again_C.to(tl.int32), 0)
                tl.store(flag + m, turns - 1)
                goal_C = 4 / (tl.where(again_C, reached_C, 1.0) * norm_C)
                tl.store(goal + first_row + row_C, most_C / goal_C, mask=real_C)
            if BACK:
                since_C = tl.load(since + first_row + row_C, mask=real_C, other=0.0) - H_C * x_size_C * unit
                tl.store(residual + first_row + row_C, since_C, mask=real_C)
            else:
                tl.store(residual + first_row + row_C, left_C, mask=real_C)
        turn += 1

    if BACK:
        x_CK = tl.load(x + first_row * K + at_CK, mask=real_CK, other=0.0)
        tl.store(output + first_row * K + at_CK, x_CK.to(output.dtype.element_ty), mask=real_CK)
        solved_CK = tl.load(x0 + first_row * K + at_CK, mask=real_CK, other=0.0)
        tl.store(dlam + m.to(tl.int64) * K + i_K, -tl.sum(solved_CK * x_CK, 0), mask=i_K < K)
    else:
        v_size_C = row_scales(tile(v + first_row * V, row_C, real_C, 0, V, BV), MODE)
        G_size = 1.0 if MODE == "exact" else tl.load(scale + m * 2)
        reach_C = tl.load(beta + first_row + row_C, mask=real_C, other=0.0) * k_size_C * v_size_C
        G_unit = 1.0 if MODE == "exact" else power_of_two(tl.maximum(tl.max(reach_C, 0), G_size))
        weight_CC = score_CC * weights(sum_C, tag_C, reach_C / G_unit)
        for first_value in range(0, V, BJ):
            j_J = first_value + tl.arange(0, BJ)
            at_KJ, real_KJ = i_K[:, None] * (V + K) + j_J[None, :], (i_K < K)[:, None] & (j_J < V)[None, :]
            high_KJ = tl.load(high + state + at_KJ, mask=real_KJ, other=0.0)
            low_KJ = high_KJ
            if MODE != "exact":
                low_KJ = tl.load(low + state + at_KJ, mask=real_KJ, other=0.0)
            o_CJ = product(x_CK, high_KJ, low_KJ, None, MODE) * (start_C * (G_size / G_unit))[:, None]
            v_CJ = tile(v + first_row * V, row_C, real_C, first_value, V, BJ)
            o_CJ = product(weight_CC, operand(v_CJ * (1 / v_size_C)[:, None], MODE), None, o_CJ, MODE) * (x_size_C * G_unit)[:, None]
            at_CJ, real_CJ = row_C[:, None] * V + j_J[None, :], real_C[:, None] & (j_J < V)[None, :]
            tl.store(output + first_row * V + at_CJ, o_CJ.to(output.dtype.element_ty), mask=real_CJ)
