"""The systems of a chunk's tokens, A = H_t + Lambda, as the kernels of the solve take them.

With D the decay inside the chunk times beta, c that from its start and H its starting state, every token's product with its own is

    A p = ((P K^T) * D) K + c (P H) + Lambda * p

Everything is divided by one power of two (`unit`), keys by one each (`walks.prepare`), H and G by their own: what enters float16 is near 1.

Shapes: C tokens of the chunk, K key size, V value size, X = V + K, M = chunks x B x H (chunk-major).
"""

import triton
import triton.language as tl

from kernels.linear_attention.walks import since_start
from kernels.mesa.products import power_of_two, weights

AMOUNTS = tl.constexpr(7)
"""Numbers of a chunk that `walks.prepare` leaves."""
FULL = tl.constexpr(2**13)
LEAST = tl.constexpr(2**-100)
"""FULL: up to where a scaled state may come: its bound is some tens of times what random values reach, and a low part below 2^-14 loses bits.
LEAST: what a state is over at least, so that FULL over it is a number."""


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
def system(
    m, chunk, reaches, amounts, beta, sums, tags, firsts, scale, first_row, row_C, real_C, most, C: tl.constexpr, MODE: tl.constexpr
):
    """Of A = unit * (weight, start, Lambda / unit) for keys over their sizes: weight_CC, up to twice `most`, start_C, unit. reaches, amounts:
    `walks.prepare`'s."""
    i_C = tl.arange(0, C)
    sum_C, tag_C = tl.load(sums + chunk * C + i_C), tl.load(tags + chunk * C + i_C)
    start_C = since_start(sum_C, tag_C, tl.load(firsts + chunk))
    if MODE == "exact":
        return weights(sum_C, tag_C, tl.load(beta + first_row + row_C, mask=real_C, other=0.0)), start_C, 1.0
    else:
        H_size = tl.load(scale + m * 2 + 1)
        unit = power_of_two(tl.maximum(tl.load(amounts + m * AMOUNTS + 5), H_size * FULL)) / most
        return weights(sum_C, tag_C, tl.load(reaches + m * C + i_C) * (1 / unit)), start_C * (H_size / unit), unit
