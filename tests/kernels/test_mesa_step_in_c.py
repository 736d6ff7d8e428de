"""Mesa's one-token step in CUDA C, its threads on a CPU (`cuda_on_cpu.h`), against the step in array operations."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from kernels.mesa.reference import State
from kernels.mesa.step import step
from tests.kernels.harness import error

HERE, KERNELS = Path(__file__).parent, Path(__file__).parents[2] / "kernels"
B, H, K = 2, 2, 128
STARTS = ("zero", "jacobi", "query")
BYTES = 4 * (K * K + 8 * 36 + 32)  # of shared memory, and not one more

if shutil.which("g++") is None:
    pytest.skip("there is no C++ compiler here", allow_module_level=True)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The kernel as a function of a grid's size and its arguments."""
    folder = tmp_path_factory.mktemp("step")
    written = [
        f'#include "{HERE / "cuda_on_cpu.h"}"',
        "DEVICE void wait_for_kernel_before() {}\nDEVICE void let_next_begin() {}",
        (KERNELS / "mesa/one_token.cu").read_text(),
        'extern "C" void start(int programs, void** values) { run(mesa_step, programs, 1, 128, values); }',
    ]
    (folder / "step.cpp").write_text("\n".join(written))
    macros = [f"-D{name}={value}" for name, value in {"BFLOAT": 0, "PROGRAMS": 1, "EARLY": 1, "SHARED_BYTES": BYTES}.items()]
    command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", *macros, "-o", folder / "step.so", folder / "step.cpp"]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(folder / "step.so"))


def pointer(x):
    if isinstance(x, float):
        return ctypes.c_float(x)
    return ctypes.c_int(x) if isinstance(x, int) else ctypes.c_void_p(0 if x is None else x.data_ptr())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"segment_B": torch.tensor([1, -1], dtype=torch.int32)},
        {"sign": torch.tensor([[1.0, -1.0], [-1.0, 1.0]])},
        {"eps": 0.0, "steps": 60},
        {"criterion": "r0", "start": "zero"},
        {"steps": 0},
        {"solve": False},
        {"norm_epsilon": 0.01},
    ],
    ids=lambda options: "-".join(options),
)
def test_the_step_in_c(library, options):
    random = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=random)  # noqa: E731
    unit = lambda *shape: torch.nn.functional.normalize(normal(*shape), dim=-1)  # noqa: E731
    keys, q, k, v, G = unit(B, H, 200, K), unit(B, H, K), unit(B, H, K), normal(B, H, K), normal(B, H, K, K)
    S = torch.einsum("bhtk,bhtl->bhkl", keys, keys) / 2
    log_decay, beta, lam = -normal(B, H).abs(), torch.rand(B, H, generator=random), 0.5 + torch.rand(H, K, generator=random)
    log_decay[0, 0], q[1, 1] = -torch.inf, 0
    lam = lam + 400 if "sign" in options else lam
    last = torch.tensor([-1, 4], dtype=torch.int32)
    given = (q, k, v, log_decay, beta, lam)
    options = {
        "steps": 30,
        "eps": 1e-4,
        "criterion": "b",
        "start": "jacobi",
        "solve": True,
        "norm_epsilon": None,
        "sign": None,
        "segment_B": None,
    } | options
    o, end, info = step(*given, state=State(G, S, last), **options)

    ours, taken, residual, last_end = torch.empty_like(v), torch.empty(B, H, dtype=torch.int32), torch.empty(B, H), torch.empty_like(last)
    start, steps = (options["start"], options["steps"]) if options["solve"] else ("query", 0)
    arrays = (q, k, v, log_decay, beta, options["sign"], lam, G, S, options["segment_B"], last, ours, G, S, last_end, taken, residual)
    epsilon = -1.0 if options["norm_epsilon"] is None else options["norm_epsilon"]
    values = [pointer(x) for x in (*arrays, H, steps, options["eps"], int(options["criterion"] == "b"), STARTS.index(start), epsilon)]
    library.start(B * H, (ctypes.c_void_p * len(values))(*(ctypes.cast(ctypes.byref(x), ctypes.c_void_p) for x in values)))
    for found, exact in ((ours, o), (G, end.G_BHKV), (S, end.H_BHKK)):
        assert error(found, exact) <= 2e-6
    assert torch.equal(last_end, end.segment_B) and (taken - info["steps"]).abs().max() <= 1
    assert (residual - info["residual"]).abs().max() <= 1e-6
