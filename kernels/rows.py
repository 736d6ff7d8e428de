"""A block's products and what stands between them, one token of every sequence: scaled rows, gated branches, capped logits, each one short Triton kernel;
for a few rows in bfloat16, product and all in one kernel of CUDA C (`rows.cu`).

A norm over a whole row is one number a row. It may follow a product instead of standing before it, n(x) W = n (x W), so products take the stream as it is.

Shapes: M rows, D width, J columns.
"""

from pathlib import Path

import torch
import triton
import triton.language as tl

from kernels import nvrtc
from kernels.launch import divide_up, early, launch

BLOCK = 1024
SOURCE = Path(__file__).with_name("rows.cu")
WARPS = 8
PROCESSOR = 228 * 1024  # bytes of shared memory, of an H100 or H200
FEW = 8
"""Rows that `product_of_few` takes at most. A token of a 1B Mesa takes an H200 0.92 ms of one sequence and 1.10 of eight, and by cuBLAS's products with
kernels around them 1.34 and 1.49."""


def few(x_MD: torch.Tensor, *weights: torch.Tensor) -> bool:
    """Whether `product_of_few` takes such rows, and rows as wide as weights are."""
    M = len(x_MD)
    if M > FEW or x_MD.dtype != torch.bfloat16 or not x_MD.is_cuda or nvrtc.refusal() is not None:
        return False
    has = torch.cuda.get_device_properties(x_MD.device).shared_memory_per_block_optin
    wanted = [(x_MD.shape[1], 16), *((weight.shape[1], _outputs(M, *weight.shape)) for weight in weights)]
    return all(D % (32 * WARPS) == 0 and _shared(M, D, rows) <= has for D, rows in wanted)


def product_of_few(
    x_MD: torch.Tensor, weight_JD: torch.Tensor, *, epsilon: float | None = None, gated: bool = False, wide: bool = False,
    add_to: torch.Tensor | None = None, cap: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """n(x) W^T [M, J], bfloat16, wide: float32. epsilon: of the norm n, None for none. gated: SiLU(n(x) W_1^T) * (n(x) W_2^T), the weight's halves.
    add_to: what it is added to, there. cap: cap tanh(y / cap), 0 for none."""
    (M, D), J = x_MD.shape, len(weight_JD) // (2 if gated else 1)
    y_MJ = x_MD.new_empty((M, J), dtype=torch.float32 if wide else x_MD.dtype) if add_to is None else add_to
    outputs = 8 if gated else _outputs(M, J, D)
    shared = _shared(M, D, 16 if gated else outputs)  # gated: of either half
    nvrtc.launch(
        SOURCE, "rows", (divide_up(J, outputs),), 32 * WARPS, shared, x_MD, weight_JD, add_to, y_MJ, M, J, float(epsilon or 0), float(cap or 1),
        early=early(), INPUTS=D, WARPS=WARPS, TILES=divide_up(M, 8), OUTPUTS=outputs, PROGRAMS=max(1, min(4, PROCESSOR // (shared + 1024))),
        GATED=int(gated), NORM=int(epsilon is not None), WIDE=int(wide), CAP=int(cap > 0), EARLY=int(early()),
    )  # fmt: skip
    return y_MJ


def _outputs(M: int, J: int, D: int) -> int:
    """A program's: 8, half of what tensor cores take, where the weight has so few rows that processors would be without one, or so long ones."""
    return 8 if D > 2048 or (M <= 4 and J <= 2048) else 16


def _shared(M: int, D: int, rows: int) -> int:
    """Bytes of shared memory of a program: so many rows of the weight, and what its warps sum, with the squares of M rows."""
    return 2 * rows * D + 4 * WARPS * 136 * divide_up(M, 8)


def product(x_MD: torch.Tensor, weight_JD: torch.Tensor, *, wide: bool = False, add_to: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T [M, J], summed in float32; wide: and given so. add_to: what it is added to, there."""
    if add_to is not None:
        return add_to.addmm_(x_MD, weight_JD.T)
    return torch.mm(x_MD, weight_JD.T, out_dtype=torch.float32) if wide and x_MD.dtype != torch.float32 else x_MD @ weight_JD.T


def unit_groups(x_MGD: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Each row of [M, G, D] over its root mean square."""
    M, G, D = x_MGD.shape
    y_MGD = torch.empty_like(x_MGD)
    BG, BD = max(1, BLOCK // triton.next_power_of_2(D)), triton.next_power_of_2(D)
    launch(
        _unit,
        (divide_up(M * G, BG),),
        x_MGD,
        y_MGD,
        M * G,
        float(epsilon),
        D=D,
        BG=BG,
        BD=BD,
        EARLY=early(),
        warps=4,
        stages=1,
        early=early(),
    )
    return y_MGD


def gated(branches_MJ: torch.Tensor, x_MD: torch.Tensor, epsilon: float) -> torch.Tensor:
    """SiLU(n a) * (n b) in x's dtype [M, J / 2], for branches a beside b, and n from the row that they were made of."""
    M, J = branches_MJ.shape
    y = x_MD.new_empty((M, J // 2))
    launch(
        _gated, (divide_up(J // 2, BLOCK), M), branches_MJ, x_MD, y, J // 2, float(epsilon), D=x_MD.shape[1], BD=triton.next_power_of_2(x_MD.shape[1]),
        BJ=BLOCK, warps=4, stages=1,
    )  # fmt: skip
    return y


def capped(logits_MJ: torch.Tensor, x_MD: torch.Tensor, epsilon: float, cap: float) -> torch.Tensor:
    """cap tanh(n y / cap), written over y [M, J] (float32), with n from the row that it was made of."""
    M, J = logits_MJ.shape
    D = x_MD.shape[1]
    launch(
        _capped, (divide_up(J, 4 * BLOCK), M), logits_MJ, x_MD, J, float(epsilon), float(cap), D=D, BD=triton.next_power_of_2(D), BJ=4 * BLOCK,
        warps=8, stages=1,
    )  # fmt: skip
    return logits_MJ


@triton.jit
def scale(x_D, D: tl.constexpr, epsilon):
    """Over the root mean square of a row [D], or of each of some rows: the factor."""
    wide = x_D.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, len(x_D.shape) - 1) / D + epsilon)


@triton.jit
def _unit(x, y, rows, epsilon, D: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row_G, i_D = tl.program_id(0) * BG + tl.arange(0, BG), tl.arange(0, BD)
    place, there = row_G[:, None].to(tl.int64) * D + i_D[None, :], (row_G < rows)[:, None] & (i_D < D)[None, :]
    x_GD = tl.load(x + place, mask=there, other=0.0)
    tl.store(y + place, (x_GD.to(tl.float32) * scale(x_GD, D, epsilon)[:, None]).to(y.dtype.element_ty), mask=there)


@triton.jit
def _gated(branches, x, y, J, epsilon, D: tl.constexpr, BD: tl.constexpr, BJ: tl.constexpr):
    row, j_J, i_D = tl.program_id(1).to(tl.int64), tl.program_id(0) * BJ + tl.arange(0, BJ), tl.arange(0, BD)
    factor = scale(tl.load(x + row * D + i_D, mask=i_D < D, other=0.0), D, epsilon)
    a_J = factor * tl.load(branches + row * 2 * J + j_J, mask=j_J < J, other=0.0).to(tl.float32)
    b_J = factor * tl.load(branches + row * 2 * J + J + j_J, mask=j_J < J, other=0.0).to(tl.float32)
    tl.store(y + row * J + j_J, (a_J * tl.sigmoid(a_J) * b_J).to(y.dtype.element_ty), mask=j_J < J)


@triton.jit
def _capped(y, x, J, epsilon, cap, D: tl.constexpr, BD: tl.constexpr, BJ: tl.constexpr):
    row, j_J, i_D = tl.program_id(1).to(tl.int64), tl.program_id(0) * BJ + tl.arange(0, BJ), tl.arange(0, BD)
    factor = scale(tl.load(x + row * D + i_D, mask=i_D < D, other=0.0), D, epsilon)
    y_J = tl.load(y + row * J + j_J, mask=j_J < J, other=0.0)
    tl.store(y + row * J + j_J, cap * (2 * tl.sigmoid(2 / cap * factor * y_J) - 1), mask=j_J < J)
