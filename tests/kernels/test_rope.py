"""Rotary position embedding: each implementation against the turn written out in float64."""

from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from kernels import launch
from kernels.rope import rope
from tests.kernels.operations import BACKEND

BACKENDS = ["triton"] if BACKEND == "triton" else ["library"]
DTYPES = [torch.float32] if launch.INTERPRETED else [torch.float32, torch.bfloat16]
SIZES = {"one token": (2, 1, 2, 16), "odd": (2, 37, 3, 24), "whole": (1, 64, 12, 128)}


def written_out(x, positions, base):
    K = x.shape[-1]
    frequency = base ** (-torch.arange(K // 2, dtype=torch.float64) / (K // 2))
    angle = (positions.double()[..., None] * frequency)[..., None, :]
    pairs = torch.complex(x[..., : K // 2], x[..., K // 2 :]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((pairs.real, pairs.imag), -1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("own", [False, True], ids=["all alike", "own positions"])
@pytest.mark.parametrize("size", SIZES)
def test_it_turns_and_turns_back(size, own, dtype, backend):
    B, T, H, K = SIZES[size]
    random = torch.Generator(torch.get_default_device()).manual_seed(0)
    x, dy = (torch.randn(B, T, H, K, generator=random).to(dtype) for _ in range(2))
    positions = (torch.randint(0, 200, (B, T), generator=random) if own else 3 + torch.arange(T)).int()
    leaf, ours = x.double().requires_grad_(), x.clone().requires_grad_()
    exact, y = written_out(leaf, positions, 500.0), rope(ours, positions, base=500.0, backend=backend)
    bound = 2e-5 if dtype == torch.float32 else 1e-2
    gradients = torch.autograd.grad(exact, leaf, dy.double())[0], torch.autograd.grad(y, ours, dy)[0]
    assert y.dtype == gradients[1].dtype == dtype
    assert (y - exact).abs().max() < bound * exact.abs().max()
    assert (gradients[1] - gradients[0]).abs().max() < bound * gradients[0].abs().max()


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_change_nothing(backend):
    x = torch.randn(2, 3, 37, 16).transpose(1, 2)
    positions = torch.arange(37, dtype=torch.int32)
    assert torch.equal(rope(x, positions, backend=backend), rope(x.contiguous(), positions, backend=backend))


def test_a_wrong_shape_is_one_sentence():
    with pytest.raises(ValueError, match="rope: positions has 4 along T"):
        rope(torch.ones(2, 5, 3, 16), torch.arange(4, dtype=torch.int32))


@pytest.mark.skipif(launch.INTERPRETED, reason="the interpreter and the compiler cannot share a process")
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_compiles_for_hopper(dtype, tmp_path: Path):
    pytest.importorskip("triton")
    from tests.kernels.test_compile import resources

    with FakeTensorMode(), launch.recording() as seen:
        x = torch.empty(2, 2048, 12, 128, dtype=dtype).requires_grad_()
        rope(x, torch.arange(2048, dtype=torch.int32), backend="triton").sum().backward()
    assert len(seen) == 2
    for launched in seen:
        used = resources(launched, tmp_path)
        assert used["stack"] == 0 and used["shared"] <= 227 * 1024
