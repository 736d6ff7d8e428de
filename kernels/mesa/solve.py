"""Mesa's solve, chunk by chunk and head by head: conjugate gradients (MesaNet, arXiv 2506.05233, Algorithm 1) with H on chip.

With D the decay inside the chunk times beta, c that from its start and H its starting state, every token's product with its own H_t + Lambda is

    A p = ((P K^T) * D) K + c (P H) + Lambda * p

`right_side` gives G_t do_t (backward), `iterate` solves, `check` takes the true residual, `refine` solves again where that is too large, and
`read` reads the solution out. Everything is divided by one power of two (`unit`), keys by one each, H and G by their own, directions by their
residual's norm: what enters float16 is near 1. In "half" products the solver carries a residual that drifts from the true one by about
2^-12 |H| |x|. The true one is computed in split products, and a token for which it is too large is solved for once more, from there, by itself
(iterative refinement).

Shapes: C tokens of the chunk, K key size, V value size, X = V + K, M = chunks x B x H (chunk-major).
"""

import triton
import triton.language as tl

from kernels.linear_attention.walks import since_start
from kernels.mesa.products import operand, power_of_two, product, row_scales, settled, weights
from kernels.mesa.walks import tile

SMALLEST = tl.constexpr(2**-23)  # a residual that counts as 0
REFINEMENT = tl.constexpr(8)  # steps of one, at most
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
    m, chunk, k, beta, sums, tags, firsts, scale, first_row, row_C, real_C,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
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


@triton.jit
def reached(asked_C, length_C, lam_K, real_K, bound, BACK: tl.constexpr):
    """The residual, relative to the right-hand side, of a token that is not refined; length: ||x|| over the right-hand side's norm."""
    reached_C = tl.maximum(bound, 2 * asked_C)
    if BACK:  # x may be small (1 / 900 of b on repeated tokens), and its error is at most ||left|| / the least of Lambda
        reached_C *= tl.minimum(tl.min(tl.where(real_K, lam_K, float("inf")), 0) * length_C * SLACK, CAP)
    return reached_C


@triton.jit(do_not_specialize=["T", "H", "BH", "steps"])
def iterate(
    rhs, k, beta, sums, tags, firsts, lam, high, low, scale, solution, short, taken, asked, T, H, BH, steps, eps,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, MODE: tl.constexpr, JACOBI: tl.constexpr, CRITERION: tl.constexpr,
):  # fmt: skip
    """solution [B, T, H, K] float32 = A^-1 rhs, short the same in its dtype; taken, asked [B, T, H]: steps, and at what residual a token could stop."""
    m = tl.program_id(0)
    h, first_row, row_C, real_C, chunk = place(m, T, H, BH, C)
    i_K = tl.arange(0, BK)
    at_CK, real_CK = row_C[:, None] * K + i_K[None, :], real_C[:, None] & (i_K < K)[None, :]
    state = m.to(tl.int64) * K * (V + K) + V
    at_KK, real_KK = i_K[:, None] * (V + K) + i_K[None, :], (i_K < K)[:, None] & (i_K < K)[None, :]
    ONCE: tl.constexpr = "exact" if MODE == "exact" else "half"

    k_CK, _, weight_CC, start_C, unit, _, _, _ = system(
        m, chunk, k, beta, sums, tags, firsts, scale, first_row, row_C, real_C, K, BK, C, MODE
    )
    # Made in the layout that products leave their results in, so that nothing is made anew in another, and all scalars of tokens are there.
    weight_CC += 0.0 * product(k_CK, tl.trans(k_CK), None, None, ONCE)
    b_CK = settled(tl.load(rhs + first_row * K + at_CK, mask=real_CK, other=0.0).to(tl.float32))
    b_CK, most_C, norm_C = of_norm_1(b_CK)
    size_C = most_C * norm_C
    p_CK, first_C = b_CK, norm_C * 0.0
    limit_C = first_C + (0.0 if JACOBI else tl.maximum(eps, SMALLEST))
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
    high_KK = tl.load(high + state + at_KK, mask=real_KK, other=0.0)
    low_KK = high_KK
    if MODE == "split":
        low_KK = tl.load(low + state + at_KK, mask=real_KK, other=0.0)
    x_CK, taken_C, limit_C = conjugate_gradients(
        b_CK, most_C > 0, first_C, p_CK, limit_C, k_CK, high_KK, low_KK, weight_CC, start_C, lam + h * K + i_K, i_K < K, unit, steps, eps,
        MODE, MODE == "half", JACOBI, CRITERION,
    )  # fmt: skip
    tl.store(taken + first_row + row_C, taken_C, mask=real_C)
    tl.store(asked + first_row + row_C, limit_C, mask=real_C)
    x_CK *= (size_C / unit)[:, None]
    tl.store(solution + first_row * K + at_CK, x_CK, mask=real_CK)
    if short is not None:
        tl.store(short + first_row * K + at_CK, x_CK.to(short.dtype.element_ty), mask=real_CK)


@triton.jit
def whole(x_CK, k_CK, weight_CC, start_C, high_at, low_at, real_KK, MODE: tl.constexpr):
    """(A x / unit but for Lambda's part, what of it is read from the chunk's start)."""
    inside_CC = product(x_CK, tl.trans(k_CK), None, None, MODE) * weight_CC
    high_KK = tl.load(high_at, mask=real_KK, other=0.0)
    low_KK = high_KK
    if MODE == "split":
        low_KK = tl.load(low_at, mask=real_KK, other=0.0)
    read_CK = product(x_CK, high_KK, low_KK, None, MODE) * start_C[:, None]
    return product(inside_CC, k_CK, None, read_CK, MODE), read_CK


@triton.jit
def residual_of(b_at, x_at, real_CK, Ax_CK, size_C, lam_K):
    """(b - A x over the largest of each row of b, its norm relative to b's; 1 over that largest, and b's norm over it, both 1 for b = 0)."""
    Ax_CK = Ax_CK * size_C[:, None] + lam_K[None, :] * tl.load(x_at, mask=real_CK, other=0.0)  # loaded again: registers
    b_CK = tl.load(b_at, mask=real_CK, other=0.0).to(tl.float32)
    most_C = tl.max(tl.abs(b_CK), 1)
    over_C = 1 / tl.where(most_C > 0, most_C, 1.0)  # in two factors: see `solver._unit`
    norm_C = tl.where(most_C > 0, tl.sqrt(tl.sum(b_CK * over_C[:, None] * b_CK * over_C[:, None], 1)), 1.0)
    left_CK = (b_CK - Ax_CK) * over_C[:, None]
    return left_CK, tl.sqrt(tl.sum(left_CK * left_CK, 1)) / norm_C, over_C, norm_C


@triton.jit(do_not_specialize=["T", "H", "BH", "steps"])
def check(
    rhs, k, x0, beta, sums, tags, firsts, lam, high, low, scale, x, short, taken, asked, known, flag, residual, since, reading,
    T, H, BH, steps, bound,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, MODE: tl.constexpr, FLAG: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """The residual of x [B, T, H, K] relative to rhs; flag [M]: whether it is too large, and the chunk to be refined, as those that are `known` to be.

    Forward: residual [B, T, H]. BACK, with the forward solution x0: reading [B, T, H] = since - x0 . start (x H), the gradient of log decay
    from the chunk's start, since being what G gave to it.
    """
    if known is None:
        _check(
            rhs, k, x0, beta, sums, tags, firsts, lam, high, low, scale, x, taken, asked, flag, residual, since, reading,
            T, H, BH, steps, bound, K, V, C, BK, MODE, FLAG, BACK,
        )  # fmt: skip
    elif tl.load(known + tl.program_id(0)) == 0:
        _check(
            rhs, k, x0, beta, sums, tags, firsts, lam, high, low, scale, x, taken, asked, flag, residual, since, reading,
            T, H, BH, steps, bound, K, V, C, BK, MODE, FLAG, BACK,
        )  # fmt: skip
    else:
        tl.store(flag + tl.program_id(0), 1)


@triton.jit
def _check(
    rhs, k, x0, beta, sums, tags, firsts, lam, high, low, scale, x, taken, asked, flag, residual, since, reading, T, H, BH, steps, bound,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, MODE: tl.constexpr, FLAG: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0)
    h, first_row, row_C, real_C, chunk = place(m, T, H, BH, C)
    i_K = tl.arange(0, BK)
    real_K = i_K < K
    at_CK, real_CK = first_row * K + row_C[:, None] * K + i_K[None, :], real_C[:, None] & real_K[None, :]
    at_KK, real_KK = i_K[:, None] * (V + K) + i_K[None, :], real_K[:, None] & real_K[None, :]
    state = m.to(tl.int64) * K * (V + K) + V
    k_CK, _, weight_CC, start_C, unit, _, _, _ = system(
        m, chunk, k, beta, sums, tags, firsts, scale, first_row, row_C, real_C, K, BK, C, MODE
    )
    x_CK, x_size_C = scaled_float32(x + at_CK, real_CK, MODE)
    Ax_CK, read_CK = whole(x_CK, k_CK, weight_CC, start_C, high + state + at_KK, low + state + at_KK, real_KK, MODE)
    if BACK:
        read_at_start(x0, since, reading, at_CK, real_CK, first_row + row_C, real_C, read_CK * (x_size_C * unit)[:, None])
    if FLAG or not BACK:
        lam_K = tl.load(lam + h * K + i_K, mask=real_K, other=0.0)
        left_CK, left_C, over_C, norm_C = residual_of(rhs + at_CK, x + at_CK, real_CK, Ax_CK, x_size_C * unit, lam_K)
        if not BACK:
            tl.store(residual + first_row + row_C, left_C, mask=real_C)
    if FLAG:
        length_C = tl.sqrt(tl.sum(x_CK * x_CK, 1)) * (x_size_C * over_C / norm_C)
        reached_C = reached(tl.load(asked + first_row + row_C, mask=real_C, other=0.0), length_C, lam_K, real_K, bound, BACK)
        again_C = (left_C > reached_C) & (tl.load(taken + first_row + row_C, mask=real_C, other=0) + REFINEMENT <= steps)
        tl.store(flag + m, tl.max(again_C.to(tl.int32), 0))


@triton.jit
def read_at_start(x0, since, reading, at_CK, real_CK, at_C, real_C, read_CK):
    """reading: see `check`; read: start (x H)."""
    since_C = tl.load(since + at_C, mask=real_C, other=0.0) - tl.sum(tl.load(x0 + at_CK, mask=real_CK, other=0.0) * read_CK, 1)
    tl.store(reading + at_C, since_C, mask=real_C)


@triton.jit(do_not_specialize=["T", "H", "BH", "steps"])
def refine(
    rhs, k, x0, beta, sums, tags, firsts, lam, high, low, scale, x, short, taken, asked, known, flag, residual, since, reading,
    T, H, BH, steps, bound,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BACK: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """A chunk that is flagged: its tokens of too large a residual solved again from there, and what is made of x anew."""
    if tl.load(flag + tl.program_id(0)) != 0:
        _refine(
            rhs, k, x0, beta, sums, tags, firsts, lam, high, low, scale, x, short, taken, asked, residual, since, reading,
            T, H, BH, steps, bound, K, V, C, BK, BACK, ROUNDS,
        )  # fmt: skip


@triton.jit
def _refine(
    rhs, k, x0, beta, sums, tags, firsts, lam, high, low, scale, x, short, taken, asked, residual, since, reading, T, H, BH, steps, bound,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BACK: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0)
    h, first_row, row_C, real_C, chunk = place(m, T, H, BH, C)
    i_K = tl.arange(0, BK)
    real_K = i_K < K
    at_CK, real_CK = first_row * K + row_C[:, None] * K + i_K[None, :], real_C[:, None] & real_K[None, :]
    at_KK, real_KK = i_K[:, None] * (V + K) + i_K[None, :], real_K[:, None] & real_K[None, :]
    state = m.to(tl.int64) * K * (V + K) + V
    k_CK, _, weight_CC, start_C, unit, _, _, _ = system(
        m, chunk, k, beta, sums, tags, firsts, scale, first_row, row_C, real_C, K, BK, C, "split"
    )
    round = 0
    going = 1
    while going != 0:
        x_CK, x_size_C = scaled_float32(x + at_CK, real_CK, "split")
        Ax_CK, read_CK = whole(x_CK, k_CK, weight_CC, start_C, high + state + at_KK, low + state + at_KK, real_KK, "split")
        lam_K = tl.load(lam + h * K + i_K, mask=real_K, other=0.0)
        left_CK, left_C, over_C, norm_C = residual_of(rhs + at_CK, x + at_CK, real_CK, Ax_CK, x_size_C * unit, lam_K)
        if BACK:
            read_at_start(x0, since, reading, at_CK, real_CK, first_row + row_C, real_C, read_CK * (x_size_C * unit)[:, None])
        else:
            tl.store(residual + first_row + row_C, left_C, mask=real_C)
        length_C = tl.sqrt(tl.sum(x_CK * x_CK, 1)) * (x_size_C * over_C / norm_C)
        reached_C = reached(tl.load(asked + first_row + row_C, mask=real_C, other=0.0), length_C, lam_K, real_K, bound, BACK)
        taken_C = tl.load(taken + first_row + row_C, mask=real_C, other=0)
        again_C = (left_C > reached_C) & (taken_C + REFINEMENT <= steps) & (round < ROUNDS)
        going = tl.max(again_C.to(tl.int32), 0)
        if going != 0:
            left_CK, most_C, size_C = of_norm_1(tl.where(again_C[:, None], left_CK, 0.0))
            limit_C = reached_C * norm_C / (tl.where(again_C, most_C * size_C, 1.0) * MARGIN)
            high_KK = tl.load(high + state + at_KK, mask=real_KK, other=0.0)
            low_KK = tl.load(low + state + at_KK, mask=real_KK, other=0.0)
            more_CK, more_C, limit_C = conjugate_gradients(
                left_CK, again_C & (most_C > 0), limit_C * 0.0, left_CK, limit_C, k_CK, high_KK, low_KK, weight_CC, start_C,
                lam + h * K + i_K, real_K, unit, REFINEMENT, 0.0, "split", False, False, "b",
            )  # fmt: skip
            more_CK = more_CK * (most_C * size_C / (over_C * unit))[:, None]
            more_CK += tl.load(x + at_CK, mask=real_CK, other=0.0)
            tl.store(x + at_CK, more_CK, mask=real_CK)
            tl.store(short + at_CK, more_CK.to(short.dtype.element_ty), mask=real_CK)
            tl.store(taken + first_row + row_C, taken_C + more_C, mask=real_C)
            tl.debug_barrier()  # the next round reads what other threads wrote
        round += 1


@triton.jit(do_not_specialize=["T", "H", "BH"])
def read(
    x, k, v, beta, sums, tags, firsts, high, low, scale, output, T, H, BH,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BJ: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """output [B, T, H, V] = G^T x in whole products, BJ columns at a time."""
    m = tl.program_id(0)
    h, first_row, row_C, real_C, chunk = place(m, T, H, BH, C)
    x_CK = tile(x + first_row * K, row_C, real_C, 0, K, BK)
    x_size_C = row_scales(x_CK, MODE)
    x_CK *= (1 / x_size_C)[:, None]
    k_CK, k_size_C = scaled(k + first_row * K, row_C, real_C, K, BK, MODE)
    score_CC = product(x_CK, tl.trans(k_CK), None, None, MODE)
    sum_C, tag_C = tl.load(sums + chunk * C + tl.arange(0, C)), tl.load(tags + chunk * C + tl.arange(0, C))
    since_C = since_start(sum_C, tag_C, tl.load(firsts + chunk))
    state = m.to(tl.int64) * K * (V + K)
    i_K = tl.arange(0, BK)
    v_size_C = row_scales(tile(v + first_row * V, row_C, real_C, 0, V, BV), MODE)
    G_size = 1.0 if MODE == "exact" else tl.load(scale + m * 2)
    reach_C = tl.load(beta + first_row + row_C, mask=real_C, other=0.0) * k_size_C * v_size_C
    unit = 1.0 if MODE == "exact" else power_of_two(tl.maximum(tl.max(reach_C, 0), G_size))
    weight_CC = score_CC * weights(sum_C, tag_C, reach_C / unit)
    for first_value in tl.static_range(0, V, BJ):
        j_J = first_value + tl.arange(0, BJ)
        at_KJ, real_KJ = i_K[:, None] * (V + K) + j_J[None, :], (i_K < K)[:, None] & (j_J < V)[None, :]
        high_KJ = tl.load(high + state + at_KJ, mask=real_KJ, other=0.0)
        low_KJ = high_KJ
        if MODE != "exact":
            low_KJ = tl.load(low + state + at_KJ, mask=real_KJ, other=0.0)
        o_CJ = product(x_CK, high_KJ, low_KJ, None, MODE) * (since_C * (G_size / unit))[:, None]
        v_CJ = tile(v + first_row * V, row_C, real_C, first_value, V, BJ)
        o_CJ = product(weight_CC, operand(v_CJ * (1 / v_size_C)[:, None], MODE), None, o_CJ, MODE) * (x_size_C * unit)[:, None]
        at_CJ, real_CJ = row_C[:, None] * V + j_J[None, :], real_C[:, None] & (j_J < V)[None, :]
        tl.store(output + first_row * V + at_CJ, o_CJ.to(output.dtype.element_ty), mask=real_CJ)
