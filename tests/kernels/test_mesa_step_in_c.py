"""Mesa's one-token step in CUDA C, its threads on a CPU (`cuda_on_cpu.h`), against the step in array operations."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

from kernels import nvrtc
from kernels.mesa.reference import State
from kernels.mesa.step import step
from tests.kernels import cuda_on_cpu
from tests.kernels.harness import error

STEP = Path(__file__).parents[2] / "kernels/mesa/one_token.cu"
B, H, K = 2, 2, 128
STARTS = ("zero", "jacobi", "query")
BYTES = (
    16 * (K * K // 4) + 4 * (3 * K + 32),
    16 * (K * K // 4 + 2560) + 4 * (3 * K + 32),
)  # of shared memory, with G in H's place and beside it
ABOVE = torch.ones(K // 16, K // 16).triu(1).repeat_interleave(16, 0).repeat_interleave(16, 1).bool()
"""What lies above the diagonal, in blocks of 16: neither read nor, in place, written."""

if cuda_on_cpu.COMPILER is None:
    pytest.skip("there is no C++ compiler here", allow_module_level=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("step")


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
@pytest.mark.parametrize("apart, in_place", [(1, True), (0, False)])
def test_the_step_in_c(folder, options, apart, in_place):
    """With G in H's place and beside it; over the states before, and beside them."""
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
    S.masked_fill_(torch.ones(K, K).triu(1).bool(), torch.nan)
    before = S.clone()
    start, steps = (options["start"], options["steps"]) if options["solve"] else ("query", 0)
    ends = (G, S) if in_place else (torch.full_like(G, torch.nan), torch.full_like(S, torch.nan))
    arrays = (q, k, v, log_decay, beta, options["sign"], lam, G, S, options["segment_B"], last, ours, *ends, last_end, taken, residual)
    epsilon = -1.0 if options["norm_epsilon"] is None else options["norm_epsilon"]
    numbers = (H, steps, options["eps"], int(options["criterion"] == "b"), STARTS.index(start), epsilon, int(not in_place))
    cuda_on_cpu.launch(folder, STEP, "mesa_step", (B * H,), 128, BYTES[apart], *arrays, *numbers, BFLOAT=0, EARLY=1, APART=apart)
    if in_place:
        assert torch.equal(S[..., ABOVE].isnan(), before[..., ABOVE].isnan())
        end = end._replace(H_BHKK=end.H_BHKK.masked_fill(ABOVE, 0))
        S.masked_fill_(ABOVE, 0)
    for found, exact in ((ours, o), (ends[0], end.G_BHKV), (ends[1], end.H_BHKK)):
        assert error(found, exact) <= 2e-6
    assert torch.equal(last_end, end.segment_B) and (taken - info["steps"]).abs().max() <= 1
    assert (residual - info["residual"]).abs().max() <= 1e-6


@pytest.mark.skipif(nvrtc.refusal() is not None, reason="for NVRTC (pip install nvidia-cuda-nvrtc)")
@pytest.mark.parametrize("bfloat, apart", [(0, 0), (1, 0), (1, 1)])
def test_it_compiles_for_hopper(tmp_path, bfloat, apart):
    """Three programs a processor, two where they are few, and next to nothing spilled."""
    triton = pytest.importorskip("triton")
    path = tmp_path / "step.cubin"
    path.write_bytes(nvrtc.compiled(nvrtc.text(STEP), "sm_90", (("BFLOAT", bfloat), ("EARLY", 1), ("APART", apart))))
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    said = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(x) for x in re.search(r"REG:(\d+) STACK:(\d+)", said).groups())
    programs = 2 if apart else 3
    assert programs * 128 * registers <= 65536 and programs * (BYTES[apart] + 1024) <= 228 * 1024 and stack <= 96
