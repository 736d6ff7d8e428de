"""What Mesa's solution is worth, and what it reads: the true residual of every token, in split products, and G^T x.

In "half" products the solver carries a residual that drifts from the true one by about 2^-12 |H| |x|. A chunk in which a token's true one is too
large is solved for once more, from there (iterative refinement), in products that round neither the directions nor H: `solve.iterate`.

Products with G and H go through a few of their columns at a time, so that loads run ahead and accumulators are small.

Shapes: C tokens of the chunk, K key size, V value size, X = V + K, J columns of a slice, M = chunks x B x H (chunk-major).
"""

import triton
import triton.language as tl

from kernels.mesa.products import halves, row_scales, times_halves
from kernels.mesa.system import AMOUNTS, place, place_of_keys, system

STEPS = tl.constexpr(8)  # that must be left to a token, or it is not solved for again
SLACK, CAP = tl.constexpr(8), tl.constexpr(3)  # backward: see `reached`
FAINT = tl.constexpr(0.25)  # of what random keys would read of x
ROOM = tl.constexpr(32)  # for weights: what x reads of keys under them is below 2^10 times this, and float16 holds 2^16
MARGIN = tl.constexpr(16)  # by which a correction goes below what is asked: a wrong solution can be several times too long


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
    # Backward x may be small (1 / 900 of b on repeated tokens), and its error is at most ||left|| / the least of Lambda: a bound that hardly a token
    # but those attains, hence the slack.
    if BACK:
        reached_C *= tl.minimum(tl.min(lam_K, 0) * length_C * SLACK, CAP)
    return reached_C


@triton.jit(do_not_specialize=["T", "H", "BH", "steps"])
def check(
    rhs, keys, sizes, reaches, amounts, x0, v, beta, sums, tags, firsts,
    lam, high, low, scale, x, taken, asked, lengths, known, flag, left, goal, output, residual, since, reading,
    T, H, BH, steps, bound,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, MODE: tl.constexpr, BACK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The residual of x [B, T, H, K] relative to rhs, and what x reads.

    Forward: residual [B, T, H], output [B, T, H, V] = G^T x. BACK, with the forward solution x0: reading [B, T, H] = since - x0 . start (x H),
    the gradient of log decay from the chunk's start, since being what G gave to it.
    PART: "only"; or "first", with flag [M], 1 where a token's residual is too large or the chunk `known` to have one, and 2 more (forward) where
    the chunk's keys read so little of x that its rounding would be seen in gradients; then, of chunks flagged with 1, "left": left [B, T, H, K],
    what is left of rhs over its norm, and goal [B, T, H], what to bring it down to, 0 for tokens of which enough is done; and "last".
    """
    if PART == "only":
        _check(
            rhs, keys, sizes, reaches, amounts, x0, v, beta, sums, tags, firsts,
            lam, high, low, scale, x, taken, asked, lengths, flag, None, goal, output, residual, since,
            reading, T, H, BH, steps, bound, K, V, C, BK, BJ, MODE, BACK, PART,
        )  # fmt: skip
    elif PART == "first":
        hard = False
        if known is not None:
            hard = (tl.load(known + tl.program_id(0)) & 1) != 0
        if hard:
            tl.store(flag + tl.program_id(0), 1)
        else:
            _check(
                rhs, keys, sizes, reaches, amounts, x0, v, beta, sums, tags, firsts,
                lam, high, low, scale, x, taken, asked, lengths, flag, None, goal, output, residual, since,
                reading, T, H, BH, steps, bound, K, V, C, BK, BJ, MODE, BACK, PART,
            )  # fmt: skip
    elif (tl.load(flag + tl.program_id(0)) & 1) != 0:
        _check(
            rhs, keys, sizes, reaches, amounts, x0, v, beta, sums, tags, firsts,
            lam, high, low, scale, x, taken, asked, lengths, flag, left if PART == "left" else None,
            goal, output, residual, since, reading, T, H, BH, steps, bound, K, V, C, BK, BJ, MODE, BACK, PART,
        )  # fmt: skip


@triton.jit
def _check(
    rhs, keys, sizes, reaches, amounts, x0, v, beta, sums, tags, firsts,
    lam, high, low, scale, x, taken, asked, lengths, flag, left, goal, output, residual, since, reading,
    T, H, BH, steps, bound,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, MODE: tl.constexpr, BACK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0)
    h, first_row, row_C, real_C, chunk = place(m, T, H, BH, C)
    at_CK, real_CK, _, _, real_K = place_of_keys(m, first_row, row_C, real_C, K, V, BK)
    x_CK = tl.load(x + at_CK, mask=real_CK, other=0.0)
    k_CK = tl.load(keys + at_CK, mask=real_CK, other=0.0)
    weight_CC, start_C, unit = system(m, chunk, reaches, amounts, beta, sums, tags, firsts, scale, first_row, row_C, real_C, ROOM, C, MODE)
    over_C = over(lengths, first_row, row_C, real_C)
    size_C = row_scales(x_CK, MODE)
    x_CK *= (1 / size_C)[:, None]
    square_C = tl.sum(x_CK * x_CK, 1)
    length_C = tl.sqrt(square_C) * (size_C * over_C)
    x_CK, x_low_CK = halves(x_CK, k_CK.dtype, MODE)
    inside_CC = times_halves(x_CK, x_low_CK, tl.trans(k_CK), None, None, MODE)
    faint = 0
    if PART == "first" and not BACK:
        random = tl.sum(square_C, 0) * tl.load(amounts + m * AMOUNTS + 6) / K
        faint = (tl.sum(inside_CC * inside_CC) < random * FAINT).to(tl.int32)
    inside_CC, inside_low_CC = halves(inside_CC * weight_CC, k_CK.dtype, MODE)
    left_C, read_C = evaluate(
        rhs, keys, x, x0, high, low, left, x_CK, x_low_CK, inside_CC, inside_low_CC, size_C * unit, start_C, over_C, lam + h * K, m,
        first_row, row_C, real_C, K, V, BK, BJ, MODE, BACK and PART != "left",
    )  # fmt: skip
    enough = True
    if PART == "first" or PART == "left":
        lam_K = tl.load(lam + h * K + tl.arange(0, BK), mask=real_K, other=float("inf"))
        reached_C = reached(tl.load(asked + first_row + row_C, mask=real_C, other=0.0), length_C, lam_K, bound, BACK)
        goal_C = reached_C if PART == "first" else reached_C / MARGIN
        again_C = (left_C > goal_C) & (tl.load(taken + first_row + row_C, mask=real_C, other=0) + STEPS <= steps)
        if PART == "first":
            flagged = tl.max(again_C.to(tl.int32), 0)
            tl.store(flag + m, flagged + 2 * faint)
            enough = flagged == 0
        else:
            tl.store(goal + first_row + row_C, tl.where(again_C, goal_C, 0.0), mask=real_C)
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
