"""Products of few rows in CUDA C, their threads on a CPU (`cuda_on_cpu.h`), against products in float64."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.kernels.harness import error

HERE, KERNELS = Path(__file__).parent, Path(__file__).parents[2] / "kernels"
CARD = """
#include <algorithm>
#include <cmath>
using std::min;
struct alignas(16) uint4 { unsigned x, y, z, w; };
DEVICE uint4 weight_16(const bfloat16* from) { return *(const uint4*)from; }
DEVICE void wait_for_kernel_before() {}
DEVICE void let_next_begin() {}
static unsigned parts[32][32][6];
DEVICE void multiply_add(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  auto& of = parts[threadIdx.x / 32];
  const int lane = threadIdx.x % 32;
  wait_for_warp();
  const unsigned mine[6] = {a0, a1, a2, a3, b0, b1};
  for (int i = 0; i < 6; i++) of[lane][i] = mine[i];
  wait_for_warp();
  auto half = [](unsigned x, int k) { return to_float((bfloat16)(k % 2 ? x >> 16 : x & 0xffff)); };
  for (int i = 0; i < 4; i++) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; k++) d[i] += half(of[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k) * half(of[column * 4 + k % 8 / 2][4 + k / 8], k);
  }
}
"""

if shutil.which("g++") is None:
    pytest.skip("there is no C++ compiler here", allow_module_level=True)


def pointer(x):
    if isinstance(x, float):
        return ctypes.c_float(x)
    return ctypes.c_int(x) if isinstance(x, int) else ctypes.c_void_p(0 if x is None else x.data_ptr())


@pytest.mark.parametrize(
    ("M", "J", "D", "warps", "options", "added"),
    [
        (1, 40, 256, 8, {"NORM", "WIDE"}, False),
        (5, 33, 128, 2, set(), True),
        (3, 20, 192, 2, {"NORM", "GATED"}, False),
        (13, 17, 128, 4, {"NORM", "WIDE", "CAP"}, False),
    ],
)
def test_products_of_few_rows_in_c(M, J, D, warps, options, added, tmp_path):
    tiles = -(-M // 8)
    macros = {name: int(name in options) for name in ("NORM", "WIDE", "CAP", "GATED")} | {
        "INPUTS": D,
        "WARPS": warps,
        "TILES": tiles,
        "EARLY": 1,
    }
    macros |= {"SHARED_BYTES": 4 * warps * tiles * 136}
    start = f'extern "C" void start(int programs, void** values) {{ run(rows, programs, 1, {32 * warps}, values); }}'
    written = [f'#include "{HERE / "cuda_on_cpu.h"}"', CARD, (KERNELS / "rows.cu").read_text(), start]
    (tmp_path / "rows.cpp").write_text("\n".join(written))
    given = [f"-D{name}={value}" for name, value in macros.items()]
    command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", *given, "-o", tmp_path / "rows.so", tmp_path / "rows.cpp"]
    subprocess.run(command, check=True)
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
    y = add if added else torch.empty(M, J, dtype=torch.float32 if "WIDE" in options else torch.bfloat16)
    values = [pointer(one) for one in (x, weight, add if added else None, y, M, J, 0.1, 3.0)]
    programs = -(-J // (8 if "GATED" in options else 16))
    ctypes.CDLL(str(tmp_path / "rows.so")).start(
        programs, (ctypes.c_void_p * len(values))(*(ctypes.cast(ctypes.byref(one), ctypes.c_void_p) for one in values))
    )
    assert error(y, exact) <= (1e-6 if "WIDE" in options else 4e-3)
