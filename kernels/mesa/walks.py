"""Mesa's walks over the chunks: the statistics S = [G | H] at each chunk's start, and the gradient of S at each chunk's end.

Shapes: B batch, T time, H heads, K key size, V value size, X = V + K, C chunk length, N chunks, M = N B H (chunk-major).
"""

import triton
import triton.language as tl

from kernels.mesa.products import decays, low_part, operand, power_of_two, product, row_scales, since_start, through, to_end


@triton.jit(do_not_specialize=["T", "H", "N", "BH"])
def starts(
    k, v, log_decay, beta, sign, begin, high, low, scale, last, T, H, N, BH,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """One head's G (program_id(1) = 0) or H, from `begin` [BH, K, X] to `last`. high, low [M, K, X]: S / scale in two halves; scale [M, 2].

    MODE "exact": high is S itself.
    """
    bh, part = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    i_K, j_W = tl.arange(0, BK), tl.arange(0, BW)
    width = tl.where(part == 0, V, K)
    at_KW = i_K[:, None] * (V + K) + (part * V + j_W)[None, :]
    real_KW = (i_K < K)[:, None] & (j_W < width)[None, :]
    S_KW = tl.load(begin + bh.to(tl.int64) * K * (V + K) + at_KW, mask=real_KW, other=0.0)
    bound = tl.max(tl.abs(S_KW))
    for n in range(N):
        m = (n * BH + bh).to(tl.int64)
        if MODE == "exact":
            tl.store(high + m * K * (V + K) + at_KW, S_KW, mask=real_KW)
        else:
            size = 2 * power_of_two(bound)
            scaled_KW = S_KW * (1 / size)
            high_KW = scaled_KW.to(tl.float16)
            tl.store(high + m * K * (V + K) + at_KW, high_KW, mask=real_KW)
            tl.store(low + m * K * (V + K) + at_KW, low_part(scaled_KW, high_KW), mask=real_KW)
            tl.store(scale + m * 2 + part, size)
        t_C = n * C + tl.arange(0, C)
        inside_C = t_C < T
        row_C = (b * T + t_C) * H + h
        sum_C, document_C, flip_C, first = decays(log_decay, sign, row_C, inside_C)
        write_C = tl.load(beta + row_C, mask=inside_C, other=0.0) * to_end(sum_C, document_C, flip_C)
        keep = through(sum_C, document_C, flip_C, first)
        k_CK = tl.load(k + row_C[:, None] * K + i_K[None, :], mask=inside_C[:, None] & (i_K < K)[None, :], other=0.0).to(tl.float32)
        real_CW = inside_C[:, None] & (j_W < width)[None, :]
        if part == 0:
            x_CW = tl.load(v + row_C[:, None] * V + j_W[None, :], mask=real_CW, other=0.0).to(tl.float32)
        else:
            x_CW = tl.load(k + row_C[:, None] * K + j_W[None, :], mask=real_CW, other=0.0).to(tl.float32)
        if MODE == "exact":
            S_KW = product(tl.trans(k_CK), x_CW * write_C[:, None], None, S_KW * keep, MODE)
        else:
            size_C = row_scales(k_CK, MODE)
            k_CK = operand(k_CK * (1 / size_C)[:, None], MODE)
            reach_C = tl.abs(write_C) * size_C * tl.max(tl.abs(x_CW), 1)  # of a token's part in S, less than
            most = 2 * power_of_two(tl.max(reach_C, 0))
            x_CW = x_CW * (write_C * size_C * (1 / most))[:, None]
            high_CW = x_CW.to(tl.float16)
            written_KW = tl.dot(tl.trans(k_CK), high_CW)
            written_KW = tl.dot(tl.trans(k_CK), low_part(x_CW, high_CW), written_KW)
            S_KW = S_KW * keep + written_KW * most
            bound = bound * tl.abs(keep) + 2 * tl.sum(reach_C, 0)
    tl.store(last + bh.to(tl.int64) * K * (V + K) + at_KW, S_KW, mask=real_KW)


@triton.jit(do_not_specialize=["T", "H", "N", "BH"])
def ends(
    x, do, back, log_decay, sign, high, low, scale, dlast, dhigh, dlow, dthrough, dbegin, T, H, N, BH,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """From `dlast` [BH, K, X] back to `dbegin`: S is read by x [B, T, H, K] under the output gradient [do | -back].

    dhigh, dlow [M, K, X]: the gradient at each chunk's end in two halves; dthrough [M, 2]: that of log decay over the whole chunk.
    """
    bh, part = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    i_K, j_W = tl.arange(0, BK), tl.arange(0, BW)
    width = tl.where(part == 0, V, K)
    at_KW = i_K[:, None] * (V + K) + (part * V + j_W)[None, :]
    real_KW = (i_K < K)[:, None] & (j_W < width)[None, :]
    D_KW = tl.load(dlast + bh.to(tl.int64) * K * (V + K) + at_KW, mask=real_KW, other=0.0)
    for step in range(N):
        n = N - 1 - step
        m = (n * BH + bh).to(tl.int64)
        high_KW = D_KW.to(dhigh.dtype.element_ty)
        tl.store(dhigh + m * K * (V + K) + at_KW, high_KW, mask=real_KW)
        S_KW = tl.load(high + m * K * (V + K) + at_KW, mask=real_KW, other=0.0).to(tl.float32)
        if MODE != "exact":
            tl.store(dlow + m * K * (V + K) + at_KW, low_part(D_KW, high_KW), mask=real_KW)
            S_KW += tl.load(low + m * K * (V + K) + at_KW, mask=real_KW, other=0.0).to(tl.float32)
            S_KW *= tl.load(scale + m * 2 + part)
        t_C = n * C + tl.arange(0, C)
        inside_C = t_C < T
        row_C = (b * T + t_C) * H + h
        sum_C, document_C, flip_C, first = decays(log_decay, sign, row_C, inside_C)
        keep = through(sum_C, document_C, flip_C, first)
        tl.store(dthrough + m * 2 + part, keep * tl.sum(S_KW * D_KW))
        real_CK = inside_C[:, None] & (i_K < K)[None, :]
        x_CK = tl.load(x + row_C[:, None] * K + i_K[None, :], mask=real_CK, other=0.0).to(tl.float32)
        x_CK = x_CK * since_start(sum_C, document_C, flip_C, first)[:, None]
        real_CW = inside_C[:, None] & (j_W < width)[None, :]
        if part == 0:
            y_CW = tl.load(do + row_C[:, None] * V + j_W[None, :], mask=real_CW, other=0.0).to(tl.float32)
        else:
            y_CW = -tl.load(back + row_C[:, None] * K + j_W[None, :], mask=real_CW, other=0.0).to(tl.float32)
        if MODE == "exact":
            D_KW = product(tl.trans(x_CK), y_CW, None, D_KW * keep, MODE)
        else:
            x_high, y_high = x_CK.to(tl.bfloat16), y_CW.to(tl.bfloat16)
            x_low, y_low = low_part(x_CK, x_high), low_part(y_CW, y_high)
            D_KW = tl.dot(tl.trans(x_high), y_high, D_KW * keep)
            D_KW = tl.dot(tl.trans(x_low), y_high, D_KW)
            D_KW = tl.dot(tl.trans(x_high), y_low, D_KW)
    tl.store(dbegin + bh.to(tl.int64) * K * (V + K) + at_KW, D_KW, mask=real_KW)
