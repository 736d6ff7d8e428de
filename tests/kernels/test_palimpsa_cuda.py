"""Palimpsa's CUDA C kernels without a card: run by a CPU's threads (`cuda_on_cpu.h`), and compiled for one that is not there.

The first with Triton's interpreter, which runs the small kernels beside them: TRITON_INTERPRET=1.
"""

import re
import subprocess
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels import launch, nvrtc
from tests.kernels import cuda_on_cpu
from tests.kernels.harness import call, error, make, run_torch, split_documents, to_torch
from tests.kernels.operations import OPERATIONS, TOLERANCES

triton = pytest.importorskip("triton")

from kernels import palimpsa as package  # noqa: E402
from kernels.palimpsa import cuda  # noqa: E402
from kernels.palimpsa import triton as fused  # noqa: E402

PALIMPSA = OPERATIONS["palimpsa"]
interpreted = pytest.mark.skipif(
    not launch.INTERPRETED or cuda_on_cpu.COMPILER is None, reason="for Triton's interpreter (TRITON_INTERPRET=1), with a C++ compiler"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cuda_on_cpu")


@pytest.fixture
def bfloat16_on_cpu(monkeypatch, folder):
    """Palimpsa as it runs in bfloat16 on a card, on the CPU."""
    monkeypatch.setattr(nvrtc, "launch", partial(cuda_on_cpu.launch, folder))
    monkeypatch.setitem(package.IMPLEMENTATIONS, "triton", fused.palimpsa)
    monkeypatch.setattr("kernels.choose", lambda operation, shape, dtype, device, backend=None: backend or "triton")


def rounded(xs):
    return {n: x if n in PALIMPSA.float32 else torch.tensor(x).bfloat16().double().numpy() for n, x in xs.items()}


@interpreted
@pytest.mark.parametrize("size", [(2, 37, 2, 5, 24), (1, 66, 1, 4, 40), (1, 66, 1, 5, 32)])
def test_parity_with_the_reference_in_float64(bfloat16_on_cpu, size):
    """Outputs, states, every gradient; documents, padding, a state to start from; keys and values that fill no group and no warp."""
    xs, state = make(PALIMPSA, size)
    xs, segments = rounded(xs), split_documents(*size[:2])
    ours = run_torch(PALIMPSA, xs, state, segments, "bfloat16", "triton", scale=0.5)
    reference = run_torch(PALIMPSA, xs, state, segments, "float64", "reference", scale=0.5)
    errors = {n: error(ours[n], reference[n]) for n in reference}
    assert max(errors.values()) <= TOLERANCES["bfloat16"] and max(errors["end 0"], errors["end 1"]) <= TOLERANCES["float32"], errors


@interpreted
@pytest.mark.parametrize("log_decay", [-0.05, -0.2, -0.5, -20.0])
def test_decays_mild_and_strong(bfloat16_on_cpu, log_decay):
    """Blocks whose tokens are taken out of the states again, and those that are gone through forth and back."""
    xs, state = make(PALIMPSA, (1, 70, 1, 4, 32))
    xs = rounded(xs)
    xs["log_decay"] = log_decay * np.random.default_rng(0).random(xs["log_decay"].shape)
    ours, reference = (run_torch(PALIMPSA, xs, state, None, *how) for how in (("bfloat16", "triton"), ("float64", "reference")))
    errors = {n: error(ours[n], reference[n]) for n in reference}
    assert max(errors.values()) <= TOLERANCES["bfloat16"], errors


@interpreted
def test_one_block_at_hand(bfloat16_on_cpu, monkeypatch):
    """Where there is no room for two blocks: as with two, but for the order in which groups of keys are added."""
    xs, state = make(PALIMPSA, (1, 70, 1, 4, 32))
    xs["log_decay"][:, ::25] = -3.0
    start = cuda._launch
    runs = []
    for ways in (None, ((1, 8, 1),)):
        monkeypatch.setattr(
            cuda,
            "_launch",
            lambda name, v, K, chunk, shared, own, *given, ways=ways: start(
                name, v, K, chunk, shared, ways if ways and name == "gradients" else own, *given
            ),
        )
        runs.append(run_torch(PALIMPSA, rounded(xs), state, None, "bfloat16", "triton"))
    assert (
        all(error(runs[1][n], x) <= 4e-6 for n, x in runs[0].items() if n not in ("d q", "d k", "d v"))
        and error(runs[1]["d k"], runs[0]["d k"]) <= 8e-3
    )


@interpreted
def test_a_document_moves_no_other_and_no_token_an_earlier_one(bfloat16_on_cpu):
    """Bit for bit, with documents that end inside blocks and at their ends."""
    size, ids = (1, 60, 1, 3, 8), torch.tensor(np.repeat([[0, 1, 2]], [16, 21, 23], axis=1).astype(np.int32))
    (xs, state), (other, _) = make(PALIMPSA, size), make(PALIMPSA, size, seed=5)
    second, late = (ids == 1).numpy()[..., None], np.arange(60)[None, :, None] >= 50

    def run(where):
        mixed = {n: x if n in PALIMPSA.fixed else np.where(where if x.ndim == 3 else where[..., None], other[n], x) for n, x in xs.items()}
        given, start = to_torch(PALIMPSA, mixed, state, "bfloat16", gradient=True)
        o, end, _ = call(PALIMPSA, given, start, ids)
        return o, end, torch.autograd.grad(o[ids == 2].float().square().sum() + end[0].square().sum(), list(given.values()))

    (o, end, gradients), (o_second, end_second, gradients_second), (o_late, *_) = run(second & False), run(second), run(late)
    assert (
        torch.equal(o[ids != 1], o_second[ids != 1])
        and not torch.equal(o[ids == 1], o_second[ids == 1])
        and torch.equal(end[0], end_second[0])
    )
    for a, b in list(zip(gradients, gradients_second, strict=True))[:-1]:
        assert torch.equal(a[ids == 2], b[ids == 2]) and (a[ids != 2] == 0).all() and a.abs().sum() > 0
    assert torch.equal(o[:, :50], o_late[:, :50]) and not torch.equal(o[:, 50:], o_late[:, 50:])


def test_what_begins_between_sixteen_bytes_is_copied():
    x = torch.randn(68)
    assert cuda.aligned(x) is x and cuda.aligned(part := x[4:]) is part
    assert cuda.aligned(x[1:]).storage_offset() == 0 and torch.equal(cuda.aligned(x[1:]), x[1:])


@pytest.mark.skipif(launch.INTERPRETED, reason="the interpreter runs no bfloat16, and is not asked for NVRTC")
def test_torch_compile_traces_the_choice():
    def chosen(x):
        return x if cuda.refusal({"K": 96, "V": 192}, "bfloat16", "cuda") is None else -x

    x = torch.ones(1)
    assert torch.equal(torch.compile(chosen, fullgraph=True, backend="eager")(x), chosen(x)) and (chosen(x) > 0) == (
        nvrtc.refusal() is None
    )


@pytest.mark.skipif(nvrtc.refusal() is not None, reason="for NVRTC (pip install nvidia-cuda-nvrtc)")
@pytest.mark.parametrize("K, V", [(96, 192), (128, 128), (256, 256), (5, 24)])
def test_it_compiles_for_hopper(monkeypatch, tmp_path, K, V):
    """Within 168 registers a thread; what is spilled is not of the loop over keys."""
    seen = []
    monkeypatch.setattr(
        nvrtc, "launch", lambda source, name, grid, threads, shared, *arguments, **constants: seen.append((source, shared, constants))
    )
    n = lambda *shape: torch.empty(shape)  # noqa: E731
    cuda.outputs(n(1), n(1, 1), n(1, 64, 2, V), *(n(1),), n(1, 2, K, V), *(n(1),), n(1, 2, 3, K, V), *(n(1),) * 4, scale=1.0, chunk=32)
    cuda.gradients(
        n(1), n(1, 1), n(1, 64, 2, V), *(n(1),) * 2, n(1, 2, 3, K, V), *(n(1),) * 2, n(1, 2, K, V), *(n(1),) * 6, scale=1.0, chunk=32
    )
    assert len(seen) == 2
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    for source, shared, constants in seen:
        code = nvrtc.compiled(nvrtc.text(source), "sm_90", tuple(constants.items()))
        path = tmp_path / "kernel.cubin"
        path.write_bytes(code)
        said = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
        registers, stack = (int(x) for x in re.search(r"REG:(\d+) STACK:(\d+)", said).groups())
        assert constants["RESIDENT"] * (shared + cuda.RESERVED) <= cuda.SHARED and stack <= 256, (source.stem, registers, stack)
