"""Mesa's walks over the chunks: the statistics S = [G | H] at each chunk's start, and the gradient of S at each chunk's end.

Shapes: B batch, T time, H heads, K key size, V value size, X = V + K, C chunk length, N chunks, M = N B H (chunk-major), W columns of a tile.
"""

import triton
import triton.language as tl

from kernels.linear_attention.walks import since_start, to_end
from kernels.mesa.products import low_part, power_of_two, product, row_scales
from kernels.mesa.system import AMOUNTS, FULL, LEAST, place


@triton.jit
def tile(x, row_C, real_C, first, size: tl.constexpr, block: tl.constexpr):
    """[C, block] in float32 of x's columns from `first`."""
    i = first + tl.arange(0, block)
    return tl.load(x + row_C[:, None] * size + i[None, :], mask=real_C[:, None] & (i < size)[None, :], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["T", "H", "N", "BH"])
def prepare(
    k, v, beta, sums, tags, firsts, keys, sizes, reaches, factors, amounts, T, H, N, BH,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """What one chunk is multiplied with: keys [B, T, H, K] in float16, each over a power of two, sizes [B, T, H]; reaches [M, C], beta
    times these twice; factors [2, M, C], of v in G and of keys in H, over the chunk's most; amounts [M, AMOUNTS]: the decay over the chunk, of G and of H
    that most and a bound of what is added, the most of reaches, and the keys' squares."""
    m = tl.program_id(0)
    _, row, row_C, real_C, chunk = place(m, T, H, BH, C)
    i_K, i_C = tl.arange(0, BK), tl.arange(0, C)
    k_CK, v_CV = tile(k + row * K, row_C, real_C, 0, K, BK), tile(v + row * V, row_C, real_C, 0, V, BV)
    sum_C, tag_C, first = tl.load(sums + chunk * C + i_C), tl.load(tags + chunk * C + i_C), tl.load(firsts + chunk)
    sum_end, tag_end = tl.load(sums + chunk * C + C - 1), tl.load(tags + chunk * C + C - 1)
    beta_C = tl.load(beta + row + row_C, mask=real_C, other=0.0)
    write_C = beta_C * to_end(sum_C, tag_C, sum_end, tag_end)
    size_C = row_scales(k_CK, "half")
    k_CK *= (1 / size_C)[:, None]
    tl.store(keys + row * K + row_C[:, None] * K + i_K[None, :], k_CK.to(tl.float16), mask=real_C[:, None] & (i_K < K)[None, :])
    tl.store(sizes + row + row_C, size_C, mask=real_C)
    reach_C = beta_C * size_C * size_C
    tl.store(reaches + m * C + i_C, reach_C)
    tl.store(amounts + m * AMOUNTS + 5, tl.max(reach_C, 0))
    tl.store(amounts + m * AMOUNTS + 6, tl.sum(k_CK * k_CK))
    tl.store(amounts + m * AMOUNTS, since_start(sum_end, tag_end, first))
    for part in tl.static_range(2):
        write_C *= size_C
        most_C = tl.max(tl.abs(v_CV), 1) if part == 0 else tl.max(tl.abs(k_CK), 1)
        reach_C = tl.abs(write_C) * most_C  # half of a token's part in S, or more
        most = 2 * power_of_two(tl.max(reach_C, 0))
        tl.store(factors + (part * N * BH + m) * C + i_C, write_C * (1 / most))
        tl.store(amounts + m * AMOUNTS + 1 + 2 * part, most)
        tl.store(amounts + m * AMOUNTS + 2 + 2 * part, 2 * tl.sum(reach_C, 0))


@triton.jit(do_not_specialize=["T", "H", "N", "BH"])
def starts(
    k, v, beta, sums, tags, firsts, factors, amounts, begin, high, low, scale, last, T, H, N, BH,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Some columns of one head's G or, behind them, of its H, from `begin` [BH, K, X] to `last`.

    high, low [M, K, X]: S / scale in two halves; scale [M, 2], of G and of H; k are the keys of `prepare`, and factors and amounts its own.
    MODE "exact": high is S itself, k as they are.
    """
    G_TILES: tl.constexpr = (V + BW - 1) // BW
    bh = tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    part = (tl.program_id(0) >= G_TILES).to(tl.int32)
    column = (tl.program_id(0) - part * G_TILES) * BW
    i_K, j_W, i_C = tl.arange(0, BK), column + tl.arange(0, BW), tl.arange(0, C)
    at_KW = i_K[:, None] * (V + K) + (part * V + j_W)[None, :]
    real_KW = (i_K < K)[:, None] & (j_W < tl.where(part == 0, V, K))[None, :]
    S_KW = tl.load(begin + bh.to(tl.int64) * K * (V + K) + at_KW, mask=real_KW, other=0.0)
    bound = 0.0  # of |G| or |H|, from all of their columns
    if MODE != "exact":
        for other in range(0, tl.where(part == 0, V, K), BW):
            j = other + tl.arange(0, BW)
            real = (i_K < K)[:, None] & (j < tl.where(part == 0, V, K))[None, :]
            at = i_K[:, None] * (V + K) + (part * V + j)[None, :]
            bound = tl.maximum(bound, tl.max(tl.abs(tl.load(begin + bh.to(tl.int64) * K * (V + K) + at, mask=real, other=0.0))))
    for n in range(N):
        m = n * BH + bh
        state = m.to(tl.int64) * K * (V + K)
        row, row_C, real_C = (b * T + n * C) * H + h, i_C * H, n * C + i_C < T
        k_CK = tl.load(k + row * K + row_C[:, None] * K + i_K[None, :], mask=real_C[:, None] & (i_K < K)[None, :], other=0.0)
        if part == 0:
            x_CW = tile(v + row * V, row_C, real_C, column, V, BW)
        else:
            x_CW = tile(k + row * K, row_C, real_C, column, K, BW)
        if MODE == "exact":
            tl.store(high + state + at_KW, S_KW, mask=real_KW)
            chunk = bh * N + n
            sum_C, tag_C, first = tl.load(sums + chunk * C + i_C), tl.load(tags + chunk * C + i_C), tl.load(firsts + chunk)
            sum_end, tag_end = tl.load(sums + chunk * C + C - 1), tl.load(tags + chunk * C + C - 1)
            write_C = tl.load(beta + row + row_C, mask=real_C, other=0.0) * to_end(sum_C, tag_C, sum_end, tag_end)
            S_KW = product(tl.trans(k_CK), x_CW * write_C[:, None], None, S_KW * since_start(sum_end, tag_end, first), MODE)
        else:
            keep = tl.load(amounts + m * AMOUNTS)
            most, grown = tl.load(amounts + m * AMOUNTS + 1 + 2 * part), tl.load(amounts + m * AMOUNTS + 2 + 2 * part)
            x_CW *= tl.load(factors + (part * N * BH + m) * C + i_C)[:, None]
            size = tl.maximum(2 * power_of_two(bound), LEAST)
            scaled_KW = S_KW * (FULL / size)
            high_KW = scaled_KW.to(tl.float16)
            tl.store(high + state + at_KW, high_KW, mask=real_KW)
            tl.store(low + state + at_KW, low_part(scaled_KW, high_KW), mask=real_KW)
            tl.store(scale + m * 2 + part, size / FULL, mask=column == 0)
            high_CW = x_CW.to(tl.float16)
            written_KW = tl.dot(tl.trans(k_CK), high_CW)
            written_KW = tl.dot(tl.trans(k_CK), low_part(x_CW, high_CW), written_KW)
            S_KW = S_KW * keep + written_KW * most
            bound = bound * tl.abs(keep) + grown
    tl.store(last + bh.to(tl.int64) * K * (V + K) + at_KW, S_KW, mask=real_KW)


@triton.jit(do_not_specialize=["T", "H", "N", "BH"])
def ends(
    x, do, back, sums, tags, firsts, high, low, scale, dlast, dhigh, dlow, dthrough, dbegin, hard, T, H, N, BH,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr,
    MODE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """From `dlast` [BH, K, X] back to `dbegin`: S is read by x [B, T, H, K] under the output gradient [do | -back]. One tile of G or, behind
    those, of H.

    dhigh, dlow [M, K, X]: the gradient at each chunk's end in two halves, that of H twice over, as H and its
    transpose (H is symmetric); dthrough [M, tiles, BK]: that of log decay over the whole chunk, by this tile and row.
    HEADS: "all"; "hard", those that are flagged in hard [BH]; "easy", the others, with MODE "half": without the states' low parts.
    """
    G_TILES: tl.constexpr = (V + BW - 1) // BW
    asked_for = True
    if HEADS != "all":
        asked_for = (tl.load(hard + tl.program_id(1)) != 0) == (HEADS == "hard")
    if asked_for:
        if tl.program_id(0) < G_TILES:
            _ends(
                x, do, back, sums, tags, firsts, high, low, scale, dlast, dhigh, dlow, dthrough, dbegin, T, H, N, BH, K, V, C, BK, BW, MODE,
                False,
            )  # fmt: skip
        else:
            _ends(
                x, do, back, sums, tags, firsts, high, low, scale, dlast, dhigh, dlow, dthrough, dbegin, T, H, N, BH, K, V, C, BK, BW, MODE,
                True,
            )  # fmt: skip


@triton.jit
def _ends(
    x, do, back, sums, tags, firsts, high, low, scale, dlast, dhigh, dlow, dthrough, dbegin, T, H, N, BH,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr, MODE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """KEYS: of H, else of G."""
    G_TILES: tl.constexpr = (V + BW - 1) // BW
    TILES: tl.constexpr = G_TILES + (K + BW - 1) // BW
    WIDTH: tl.constexpr = K if KEYS else V
    bh = tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    this = tl.program_id(0)
    column = (this - (G_TILES if KEYS else 0)) * BW
    i_K, j_W, i_C = tl.arange(0, BK), column + tl.arange(0, BW), tl.arange(0, C)
    at_KW = i_K[:, None] * (V + K) + (V * KEYS + j_W)[None, :]
    real_K, real_W = i_K < K, j_W < WIDTH
    real_KW = real_K[:, None] & real_W[None, :]
    whole = bh.to(tl.int64) * K * (V + K)
    half = 0.5 if KEYS else 1.0
    D_KW = tl.load(dlast + whole + at_KW, mask=real_KW, other=0.0)
    if KEYS:
        D_KW += tl.load(dlast + whole + j_W[None, :] * (V + K) + V + i_K[:, None], mask=real_KW, other=0.0)
    for step in range(N):
        n = N - 1 - step
        m = n * BH + bh
        state = m.to(tl.int64) * K * (V + K)
        high_KW = D_KW.to(dhigh.dtype.element_ty)
        tl.store(dhigh + state + at_KW, high_KW, mask=real_KW)
        S_KW = tl.load(high + state + at_KW, mask=real_KW, other=0.0).to(tl.float32)
        if MODE == "split":
            tl.store(dlow + state + at_KW, low_part(D_KW, high_KW), mask=real_KW)
            S_KW += tl.load(low + state + at_KW, mask=real_KW, other=0.0).to(tl.float32)
        row, row_C, real_C = (b * T + n * C) * H + h, i_C * H, n * C + i_C < T
        chunk = bh * N + n
        sum_C, tag_C, first = tl.load(sums + chunk * C + i_C), tl.load(tags + chunk * C + i_C), tl.load(firsts + chunk)
        keep = since_start(tl.load(sums + chunk * C + C - 1), tl.load(tags + chunk * C + C - 1), first)
        through = keep * half
        if MODE != "exact":
            through *= tl.load(scale + m * 2 + KEYS)
        tl.store(dthrough + (m * TILES + this) * BK + i_K, through * tl.sum(S_KW * D_KW, 1))
        since_C = since_start(sum_C, tag_C, first)[:, None]
        D_KW *= keep
        at_CK, real_CK = row * K + row_C[:, None] * K + i_K[None, :], real_C[:, None] & real_K[None, :]
        at_CW, real_CW = row * WIDTH + row_C[:, None] * WIDTH + j_W[None, :], real_C[:, None] & real_W[None, :]
        x_CK = tl.load(x + at_CK, mask=real_CK, other=0.0)
        if KEYS:
            D_KW = outer(x_CK, tl.load(back + at_CW, mask=real_CW, other=0.0).to(tl.float32) * -since_C, D_KW, MODE)
            back_CK = tl.load(back + at_CK, mask=real_CK, other=0.0)
            D_KW = outer(back_CK, tl.load(x + at_CW, mask=real_CW, other=0.0).to(tl.float32) * -since_C, D_KW, MODE)
        else:
            D_KW = outer(x_CK, tl.load(do + at_CW, mask=real_CW, other=0.0).to(tl.float32) * since_C, D_KW, MODE)
    tl.store(dbegin + whole + at_KW, D_KW * half, mask=real_KW)


@triton.jit
def outer(a_CK, b_CW, sum_KW, MODE: tl.constexpr):
    """sum + a^T b, but for "exact" of high and low parts in bfloat16: gradients have no scale, and so float16 no room for them."""
    if MODE == "exact":
        return product(tl.trans(a_CK), b_CW, None, sum_KW, MODE)
    else:
        a_high, b_high = a_CK.to(tl.bfloat16), b_CW.to(tl.bfloat16)
        sum_KW = tl.dot(tl.trans(a_high), b_high, sum_KW)
        sum_KW = tl.dot(tl.trans(low_part(a_CK, a_high)), b_high, sum_KW)
        return tl.dot(tl.trans(a_high), low_part(b_CW, b_high), sum_KW)
