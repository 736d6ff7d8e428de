"""Products of few rows in CUDA C, their threads on a CPU (`cuda_on_cpu.h`), against products in float64."""

from pathlib import Path

import pytest
import torch

from tests.kernels import cuda_on_cpu
from tests.kernels.harness import error

ROWS = Path(__file__).parents[2] / "kernels/rows.cu"

if cuda_on_cpu.COMPILER is None:
    pytest.skip("there is no C++ compiler here", allow_module_level=True)


@pytest.mark.parametrize(
    ("M", "J", "D", "warps", "outputs", "options", "added"),
    [
        (1, 40, 256, 8, 16, {"NORM", "WIDE"}, False),
        (5, 33, 128, 2, 16, set(), True),
        (8, 33, 192, 2, 8, set(), True),
        (3, 20, 192, 2, 8, {"NORM", "GATED"}, False),
        (13, 17, 128, 4, 16, {"NORM", "WIDE", "CAP"}, False),
        (16, 24, 128, 4, 8, {"NORM", "WIDE"}, False),
    ],
)
def test_products_of_few_rows_in_c(M, J, D, warps, outputs, options, added, tmp_path):
    tiles = -(-M // 8)
    macros = {name: int(name in options) for name in ("NORM", "WIDE", "CAP", "GATED")} | {
        "INPUTS": D,
        "WARPS": warps,
        "TILES": tiles,
        "OUTPUTS": outputs,
        "PROGRAMS": 1,
        "EARLY": 1,
    }
    random = torch.Generator().manual_seed(0)
    x, weight, add = (
        torch.randn(*shape, generator=random).bfloat16() for shape in ((M, D), (J * (2 if "GATED" in options else 1), D), (M, J))
    )
    weight = weight / D**0.5
    unit = x.double() * (x.double().square().mean(-1, keepdim=True) + 0.1).rsqrt() if "NORM" in options else x.double()
    exact = unit @ weight.double().T
    exact = torch.nn.functional.silu(exact[:, :J]) * exact[:, J:] if "GATED" in options else exact
    exact = exact + add.double() if added else exact
    exact = 3 * torch.tanh(exact / 3) if "CAP" in options else exact
    y = add if added else torch.full((M, J), torch.nan, dtype=torch.float32 if "WIDE" in options else torch.bfloat16)
    programs, shared = -(-J // outputs), 2 * D * (16 if "GATED" in options else outputs) + 4 * warps * tiles * 136
    given = (x, weight, add if added else None, y, M, J, 0.1, 3.0)
    cuda_on_cpu.launch(tmp_path, ROWS, "rows", (programs,), 32 * warps, shared, *given, **macros)
    assert error(y, exact) <= (1e-6 if "WIDE" in options else 4e-3)
