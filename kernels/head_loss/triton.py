"""The loss and its gradient in Triton and three matrix products, logits in no memory at all.

With logits l_nv = 60 s_nv - 30, s = sigmoid(x E^T / 15), and Z_n = sum_v exp(l_nv), no maximum is needed, as |l| <= 30, and

    d total / d (x E^T)_nv = factor_n q_nv,    factor_n = 4 weight_n / Z_n,    q_nv = exp(l_nv) s_nv (1 - s_nv),  at the target (exp(l_nv) - Z_n) s_nv (1 - s_nv):

q is known as soon as a tile of the first product is, which stores it in x's dtype, and its rows' parts of Z. When Z is whole, q's targets are
set, and the factor goes to the other sides: dx = factor (q E), dE = q^T (factor x).

Shapes: N tokens, D width, V vocabulary; tiles of R rows by C columns.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.head_loss import SOFT_CAP, chunked
from kernels.launch import divide_up, dot_precision, launch

CHUNK = 1 << 30
"""Numbers of q held at once."""
ALIGN = 128
"""Rows of E and of a chunk come in multiples of it: products of odd sizes are several times slower."""
TILES = {torch.bfloat16: (128, 128, 64, 4, 3), torch.float32: (64, 64, 32, 4, 2)}
"""Rows and columns of a tile, how much of D at once, warps, stages."""
LOG2_E = tl.constexpr(1.4426950408889634)


def head_loss(x_ND, embedding_VD, target_N, weight_N) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.head_loss.head_loss`."""
    return chunked.head_loss(x_ND, embedding_VD, target_N, weight_N, run=loss_and_gradient)


def loss_and_gradient(
    x_ND: torch.Tensor, embedding_VD: torch.Tensor, target_N: torch.Tensor, weight_N: torch.Tensor, *, differentiate: bool
) -> chunked.Loss:
    """See `chunked.loss_and_gradient`."""
    (N, width), V = x_ND.shape, len(embedding_VD)
    W, D = divide_up(V, ALIGN) * ALIGN, divide_up(width, 8) * 8
    x_ND = torch.nn.functional.pad(x_ND, (0, D - width)).contiguous()
    target_N, weight_N = target_N.contiguous(), weight_N.contiguous()
    matrix_WD = x_ND.new_zeros((W, D))
    matrix_WD[:V, :width] = embedding_VD
    nll_N = x_ND.new_empty(N, dtype=torch.float32)
    dx_ND = torch.empty_like(x_ND) if differentiate else None
    dmatrix_WD = x_ND.new_zeros((W, D), dtype=torch.float32) if differentiate else None
    rows = divide_up(divide_up(N, divide_up(N * W, CHUNK)), ALIGN) * ALIGN
    for start in range(0, N, rows):
        chunk = slice(start, start + rows)
        q_NW, scaled_ND, factor_N = _scores(x_ND[chunk], matrix_WD, target_N[chunk], weight_N[chunk], nll_N[chunk], V, differentiate)
        if differentiate:
            torch.mul(chunked.product(q_NW, matrix_WD), factor_N[:, None], out=dx_ND[chunk])
            _add_product(dmatrix_WD, q_NW.T, scaled_ND)
    if not differentiate:
        return nll_N, None, None
    return nll_N, dx_ND[:, :width], dmatrix_WD[:V, :width]


def _add_product(to: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """to += a @ b, in float32."""
    if a.dtype == torch.bfloat16:
        torch.addmm(to, a, b, out_dtype=torch.float32, out=to)
    else:
        to.addmm_(a, b)


def _scores(x_ND, matrix_WD, target_N, weight_N, nll_N, V, differentiate):
    """Writes nll_N; gives q_NW, x times factor, and factor_N."""
    (N, D), W = x_ND.shape, len(matrix_WD)
    R, C, K, warps, stages = TILES[x_ND.dtype]
    tiles = divide_up(W, C)
    sums_NI = x_ND.new_empty((N, tiles), dtype=torch.float32)
    factor_N = torch.empty_like(nll_N)
    q_NW = x_ND.new_empty((N, W)) if differentiate else None
    scaled_ND = torch.empty_like(x_ND) if differentiate else None
    described = [
        None if y is None else TensorDescriptor.from_tensor(y, s) for y, s in ((x_ND, [R, K]), (matrix_WD, [C, K]), (q_NW, [R, C]))
    ]
    options = {"CAP": SOFT_CAP, "R": R, "C": C, "K": K, "GROUP": 16, "PRECISION": dot_precision(x_ND.dtype)}
    launch(_tiles, (divide_up(N, R) * tiles,), *described, sums_NI, N, V, W, D, **options, warps=warps, stages=stages)
    given = (x_ND, matrix_WD, target_N, weight_N, sums_NI, q_NW, nll_N, factor_N, scaled_ND)
    launch(_close, (N,), *given, tiles, W, D, CAP=SOFT_CAP, BLOCK=1024, warps=4)
    return q_NW, scaled_ND, factor_N


@triton.jit
def _of_score(z, CAP: tl.constexpr):
    """(exp(l), s) of scores z."""
    root = tl.rsqrt(1 + tl.exp2(z * (-2 / CAP * LOG2_E)))  # its square is sigmoid(2 z / CAP), without a division
    s = root * root
    return tl.exp2(s * (2 * CAP * LOG2_E) - CAP * LOG2_E), s


@triton.jit
def _tiles(
    x, matrix, q, sums, N, V, W, D,
    CAP: tl.constexpr, R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(W, C)
    n, v = _place(tl.program_id(0), tl.cdiv(N, R), tiles, GROUP)
    z_RC = tl.zeros((R, C), tl.float32)
    for start in range(0, D, K):
        z_RC = tl.dot(x.load([n * R, start]), matrix.load([v * C, start]).T, z_RC, input_precision=PRECISION)
    if v * C + C <= V:
        _finish(z_RC, q, sums, n, v, N, V, tiles, CAP, True)
    else:
        _finish(z_RC, q, sums, n, v, N, V, tiles, CAP, False)


@triton.jit
def _place(program, rows, columns, GROUP: tl.constexpr):
    """(row, column) of a tile: column by column in groups of GROUP rows, so that both sides of what runs at once stay in the cache."""
    group = program // (GROUP * columns)
    height = min(rows - group * GROUP, GROUP)
    within = program % (GROUP * columns)
    return group * GROUP + within % height, within // height


@triton.jit
def _finish(z_RC, q, sums, n, v, N, V, tiles, CAP: tl.constexpr, WHOLE: tl.constexpr):
    """Store a tile of q and its rows' parts of Z; WHOLE: no column is beyond V."""
    R: tl.constexpr = z_RC.shape[0]
    C: tl.constexpr = z_RC.shape[1]
    p_RC, s_RC = _of_score(z_RC, CAP)
    if not WHOLE:
        p_RC = tl.where(v * C + tl.arange(0, C)[None, :] < V, p_RC, 0.0)
    if q is not None:
        q.store([n * R, v * C], (p_RC * (s_RC - s_RC * s_RC)).to(q.dtype))
    row = n * R + tl.arange(0, R)
    tl.store(sums + row.to(tl.int64) * tiles + v, tl.sum(p_RC, 1), row < N)


@triton.jit
def _close(x, matrix, target, weight, sums, q, nll, factor, scaled, I, W, D, CAP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    sum_B, z_B = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, I, BLOCK):
        sum_B += tl.load(sums + row * I + start + at, start + at < I, other=0.0)
    own = tl.load(target + row)
    for start in range(0, D, BLOCK):
        inside = start + at < D
        x_B = tl.load(x + row * D + start + at, inside, other=0.0).to(tl.float32)
        z_B += x_B * tl.load(matrix + own * D + start + at, inside, other=0.0).to(tl.float32)
    Z = tl.sum(sum_B, 0)
    p, s = _of_score(tl.sum(z_B, 0), CAP)
    tl.store(nll + row, tl.log(Z) - tl.log(p))
    if q is not None:
        c = 4 * tl.load(weight + row) / Z
        tl.store(factor + row, c)
        tl.store(q + row * W + own, ((p - Z) * (s - s * s)).to(q.dtype.element_ty))
        for start in range(0, D, BLOCK):
            x_B = tl.load(x + row * D + start + at, start + at < D, other=0.0)
            tl.store(scaled + row * D + start + at, (x_B.to(tl.float32) * c).to(scaled.dtype.element_ty), start + at < D)
