"""The loss and its gradient in Triton and three matrix products, logits in no memory at all.

With logits l_nv = 60 s_nv - 30, s = sigmoid(x E^T / 15), and Z_n = sum_v exp(l_nv), no maximum is needed, as |l| <= 30, and

    d total / d (x E^T)_nv = weight_n / Z_n q_nv,        q_nv = exp(l_nv) 4 s_nv (1 - s_nv),  at the target (exp(l_nv) - Z_n) 4 s_nv (1 - s_nv)

is known but for a row's factor as soon as a tile of the product is: the first product stores q, in x's dtype, and each tile's part of Z.
When Z is whole, q's targets are set, and the factor goes to the other sides: dx = factor (q E), dE = q^T (factor x).

Shapes: N tokens, D width, V vocabulary; tiles of R rows by C columns.
"""

import torch
import triton
import triton.language as tl

from kernels.head_loss import SOFT_CAP, chunked
from kernels.launch import divide_up, dot_precision, launch

CHUNK = 1 << 30
"""Numbers of q held at once."""
ALIGN = 128
"""Rows of E and of a chunk come in multiples of it: products of odd sizes are several times slower."""
LOG2_E = tl.constexpr(1.4426950408889634)


def head_loss(x_ND, embedding_VD, target_N, weight_N) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.head_loss.head_loss`."""
    return chunked.head_loss(x_ND, embedding_VD, target_N, weight_N, run=loss_and_gradient)


def loss_and_gradient(
    x_ND: torch.Tensor, embedding_VD: torch.Tensor, target_N: torch.Tensor, weight_N: torch.Tensor, *, differentiate: bool
) -> chunked.Loss:
    """See `chunked.loss_and_gradient`."""
    (N, D), V = x_ND.shape, len(embedding_VD)
    W = divide_up(V, ALIGN) * ALIGN
    matrix_WD = x_ND.new_zeros((W, D))
    matrix_WD[:V] = embedding_VD
    nll_N = x_ND.new_empty(N, dtype=torch.float32)
    dx_ND = torch.empty_like(x_ND) if differentiate else None
    dmatrix_WD = None
    rows = divide_up(divide_up(N, divide_up(N * W, CHUNK)), ALIGN) * ALIGN
    for start in range(0, N, rows):
        chunk = slice(start, start + rows)
        x = x_ND[chunk].contiguous()
        q_NW, scaled_ND, factor_N = _scores(x, matrix_WD, target_N[chunk], weight_N[chunk], nll_N[chunk], V, differentiate)
        if differentiate:
            torch.mul(_product(q_NW, matrix_WD), factor_N[:, None], out=dx_ND[chunk])
            part_WD = _product(q_NW.T, scaled_ND)
            dmatrix_WD = part_WD if dmatrix_WD is None else dmatrix_WD.add_(part_WD)
    return nll_N, dx_ND, dmatrix_WD[:V] if differentiate else None


_product = chunked._product


def _scores(x_ND, matrix_WD, target_N, weight_N, nll_N, V, differentiate):
    """Writes nll_N; gives q_NW, factor_N, and x times factor."""
    (N, D), W = x_ND.shape, len(matrix_WD)
    R, C, K, group, warps, stages = TILES[x_ND.dtype]
    q_NW = x_ND.new_empty((N, W)) if differentiate else None
    sums_NI = x_ND.new_empty((N, divide_up(W, C)), dtype=torch.float32)
    factor_N = torch.empty_like(nll_N)
    scaled_ND = torch.empty_like(x_ND) if differentiate else None
    grid = (divide_up(N, R) * divide_up(W, C),)
    options = {"CAP": SOFT_CAP, "R": R, "C": C, "K": K, "GROUP": group, "PRECISION": dot_precision(x_ND.dtype)}
    launch(_tiles, grid, x_ND, matrix_WD, q_NW, sums_NI, N, V, W, D, **options, warps=warps, stages=stages)
    given = (x_ND, matrix_WD, target_N, weight_N, sums_NI, q_NW, nll_N, factor_N, scaled_ND)
    launch(_close, (N,), *given, sums_NI.shape[1], W, D, CAP=SOFT_CAP, BLOCK=1024, warps=4)
    return q_NW, scaled_ND, factor_N


TILES = {torch.bfloat16: (128, 128, 64, 8, 4, 3), torch.float32: (64, 64, 32, 8, 4, 2)}


@triton.jit
def _of_score(z, CAP: tl.constexpr):
    """(exp(l), d l / d z) of scores z."""
    root = tl.rsqrt(1 + tl.exp2(z * (-2 / CAP * LOG2_E)))  # its square is sigmoid(2 z / CAP), without a division
    s = root * root
    return tl.exp2(s * (2 * CAP * LOG2_E) - CAP * LOG2_E), 4 * (s - s * s)


@triton.jit
def _tiles(
    x, matrix, q, sums, N, V, W, D,
    CAP: tl.constexpr, R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(W, C)
    n, v = _place(tl.program_id(0), tl.cdiv(N, R), tiles, GROUP)
    row, column, k = n * R + tl.arange(0, R), v * C + tl.arange(0, C), tl.arange(0, K)
    there = row < N
    x_at = x + row[:, None].to(tl.int64) * D + k[None, :]
    matrix_at = matrix + column[None, :] * D + k[:, None]
    z_RC = tl.zeros((R, C), tl.float32)
    for start in range(0, D, K):
        x_RK = tl.load(x_at, there[:, None] & (k[None, :] < D - start), other=0.0)
        matrix_KC = tl.load(matrix_at, (column[None, :] < W) & (k[:, None] < D - start), other=0.0)
        z_RC = tl.dot(x_RK, matrix_KC, z_RC, input_precision=PRECISION)
        x_at += K
        matrix_at += K
    p_RC, slope_RC = _of_score(z_RC, CAP)
    if v * C + C > V:
        p_RC = tl.where(column[None, :] < V, p_RC, 0.0)
    tl.store(sums + row.to(tl.int64) * tiles + v, tl.sum(p_RC, 1), there)
    if q is not None:
        at = q + row[:, None].to(tl.int64) * W + column[None, :]
        tl.store(at, (p_RC * slope_RC).to(q.dtype.element_ty), there[:, None] & (column[None, :] < W))


@triton.jit
def _place(program, rows, columns, GROUP: tl.constexpr):
    """(row, column) of a tile: column by column in groups of GROUP rows, so that both sides of what runs at once stay in the cache."""
    group = program // (GROUP * columns)
    height = min(rows - group * GROUP, GROUP)
    within = program % (GROUP * columns)
    return group * GROUP + within % height, within // height


@triton.jit
def _close(x, matrix, target, weight, sums, q, nll, factor, scaled, I, W, D, CAP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    sum_B = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, I, BLOCK):
        sum_B += tl.load(sums + row * I + start + at, start + at < I, other=0.0)
    Z = tl.sum(sum_B, 0)
    own = tl.load(target + row)
    z_B = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, D, BLOCK):
        inside = start + at < D
        x_B = tl.load(x + row * D + start + at, inside, other=0.0).to(tl.float32)
        z_B += x_B * tl.load(matrix + own * D + start + at, inside, other=0.0).to(tl.float32)
    p, slope = _of_score(tl.sum(z_B, 0), CAP)
    tl.store(nll + row, tl.log(Z) - tl.log(p))
    if q is not None:
        c = tl.load(weight + row) / Z
        tl.store(factor + row, c)
        tl.store(q + row * W + own, ((p - Z) * slope).to(q.dtype.element_ty))
        for start in range(0, D, BLOCK):
            x_B = tl.load(x + row * D + start + at, start + at < D, other=0.0)
            tl.store(scaled + row * D + start + at, (x_B.to(tl.float32) * c).to(scaled.dtype.element_ty), start + at < D)
