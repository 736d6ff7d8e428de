"""A block's products and what stands between them, one token of every sequence: scaled rows, gated branches, capped logits, each one short Triton kernel;
for a few rows in bfloat16, product and all in one kernel of CUDA C (`rows.cu`, `rows_in_clusters.cu`).

A norm over a whole row is one number a row. It may follow a product instead of standing before it, n(x) W = n (x W), so products take the stream as it is.

Shapes: M rows, D width, J columns.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl

from kernels import nvrtc
from kernels.launch import divide_up, early, launch, since_hopper

BLOCK = 1024
ROWS, CLUSTERS = (Path(__file__).with_name(name) for name in ("rows.cu", "rows_in_clusters.cu"))
FEW, MORE = 8, 16
"""Rows that `rows.cu` takes at most, and `rows_in_clusters.cu`, of which cuBLAS is the faster above. A token of a 1B Mesa takes an H200 0.91 ms of one
sequence, 1.06 of 8, 1.33 of 16; by cuBLAS's products with kernels around them 1.34, 1.49 and 1.62."""
PROCESSORS, MEMORY = 132, 228 * 1024
"""Of an H200 or H100, and bytes of shared memory of each: shapes of programs are made for them, and right on others."""


@dataclass(frozen=True)
class Programs:
    """How a product of few rows is started: the kernel's file, its grid, threads and bytes of shared memory of a program, and its constants."""

    source: Path
    count: int
    threads: int
    shared: int
    constants: dict[str, int]


def few(x_MD: torch.Tensor, *weights: torch.Tensor) -> bool:
    """Whether `product_of_few` takes such rows, and rows as wide as weights are."""
    M, D = x_MD.shape
    if M > MORE or x_MD.dtype != torch.bfloat16 or not x_MD.is_cuda or nvrtc.refusal() is not None or not (M <= FEW or since_hopper()):
        return False
    has = torch.cuda.get_device_properties(x_MD.device).shared_memory_per_block_optin
    wanted = [_programs(M, 4 * D, D, True), *(_programs(M, *weight.shape, False) for weight in weights)]
    return all(programs is not None and programs.shared <= has for programs in wanted)


def product_of_few(
    x_MD: torch.Tensor, weight_JD: torch.Tensor, *, epsilon: float | None = None, gated: bool = False, wide: bool = False,
    add_to: torch.Tensor | None = None, cap: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """n(x) W^T [M, J], bfloat16, wide: float32. epsilon: of the norm n, None for none. gated: SiLU(n(x) W_1^T) * (n(x) W_2^T), the weight's halves.
    add_to: what it is added to, there. cap: cap tanh(y / cap), 0 for none."""
    (M, D), J = x_MD.shape, len(weight_JD) // (2 if gated else 1)
    y_MJ = x_MD.new_empty((M, J), dtype=torch.float32 if wide else x_MD.dtype) if add_to is None else add_to
    programs = _programs(M, J, D, gated)
    assert programs is not None, "`few` refuses such rows"
    nvrtc.launch(
        programs.source, "rows", (programs.count,), programs.threads, programs.shared, x_MD, weight_JD, add_to, y_MJ, M, J, float(epsilon or 0),
        float(cap or 1), early=early(), **programs.constants, INPUTS=D, GATED=int(gated), NORM=int(epsilon is not None), WIDE=int(wide),
        CAP=int(cap > 0), EARLY=int(early()),
    )  # fmt: skip
    return y_MJ


def _programs(M: int, J: int, D: int, gated: bool) -> Programs | None:
    """What was fastest of what was tried, for the shapes of a 1B model; None where a weight's rows cannot be divided so."""
    return _in_clusters(M, J, D, gated) if M > FEW and J <= 8 * D else _in_slots(M, J, D, gated)


def _in_slots(M: int, J: int, D: int, gated: bool) -> Programs | None:
    """Of `rows.cu`. Two programs of many outputs a processor, or some of 8 where outputs are few or rows are long."""
    warps = 16 if D > 2048 and D % 512 == 0 else 8
    if D % (32 * warps):
        return None
    if gated:
        outputs = 8 if divide_up(J, 8) <= 4 * PROCESSORS else 7  # five programs of 7 a processor: with 4,608 outputs, all at once
    else:
        outputs = 8 if J <= 2048 or D > 2048 else 32 if M <= 8 and D > 1024 else 16
    tiles, tiles_of_w = divide_up(M, 8), divide_up(outputs, 8 if gated else 16)
    shared = max(2 * D * outputs * (2 if gated else 1), 4 * warps * tiles * (128 * tiles_of_w + 8))
    together = max(1, min((1280 if M <= 8 else 768) // (32 * warps), MEMORY // (shared + 1024)))
    constants = {"WARPS": warps, "TILES": tiles, "OUTPUTS": outputs, "PROGRAMS": together}
    return Programs(ROWS, divide_up(J, outputs), 32 * warps, shared, constants)


def _in_clusters(M: int, J: int, D: int, gated: bool) -> Programs | None:
    """Of `rows_in_clusters.cu`, two programs a processor. The fewer outputs there are, the more programs share a weight's rows."""
    rows, outputs, most = 16, 32 if D > 2048 else 48, MEMORY // 2 - 1024
    cluster = next((size for size in ((1,) if gated else (2, 1) if J > 2048 else (4, 2, 1)) if D % (128 * size) == 0), None)
    if cluster is None:
        return None
    part = D // cluster
    pieces, buffers = (1, 1) if 2 * part * (outputs + rows) <= most else (part // 128, min(part // 128, most // (256 * (outputs + rows))))
    warps = 3 if J > 2048 and not gated and outputs == 48 else 1
    shared = max(2 * part // pieces * buffers * (outputs + rows), 16 * rows * (outputs + 5))
    constants = {"CLUSTER": cluster, "OUTPUTS": outputs, "ROWS": rows, "PIECES": pieces, "BUFFERS": buffers, "PROGRAMS": 2}
    constants |= {"OUTPUT_WARPS": warps, "INPUT_WARPS": 4}
    return Programs(CLUSTERS, cluster * divide_up(J, outputs // 2 if gated else outputs), 128 * warps, shared, constants)


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
