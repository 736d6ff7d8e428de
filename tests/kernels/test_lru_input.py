"""What the RG-LRU takes, and its gradients: each implementation against the formulas written out in float64."""

from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from kernels import launch
from kernels.lru_input import lru_input
from tests.kernels.operations import BACKEND

BACKENDS = ["triton"] if BACKEND == "triton" else ["library"]
DTYPES = [torch.float32] if launch.INTERPRETED else [torch.float32, torch.bfloat16]
SIZES = {"one token": (2, 1, 2, 16), "odd": (2, 37, 3, 20), "several tiles": (1, 70, 2, 48)}  # B, T, H, J
NAMES = ("u", "f", "g", "f_bias", "g_bias", "steps")
OPTIONS = {"rate": 8.0, "steepest": 1000.0}


def inputs(B, T, H, J, dtype):
    """Gates from nearly shut to nearly open, decays from fast to slow; a document's first token here and there."""
    random = torch.Generator(torch.get_default_device()).manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=random)  # noqa: E731
    u, f, g = draw(B, T, H * J).to(dtype), (2 * draw(H, B, T, J)).to(dtype), (2 * draw(H, B, T, J)).to(dtype)
    steps = torch.exp(draw(H * J) - 4)
    return [u, f, g, draw(H * J), draw(H * J), steps], torch.rand(B, T, generator=random) < 0.2


def written_out(leaves, first, rate, steepest):
    u, f, g, f_bias, g_bias, steps = leaves
    together = lambda x: x.permute(1, 2, 0, 3).reshape(u.shape)  # noqa: E731
    r, i = torch.sigmoid(together(f) + f_bias), torch.sigmoid(together(g) + g_bias)
    log_a = -rate * r * steps
    y = -torch.expm1(2 * log_a)
    assert (1 / (4 * y).sqrt()).max() < steepest
    return torch.where(first[..., None], 1.0, y.sqrt()) * i * u, log_a


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_it_is_what_is_written(size, dtype, backend):
    given, first = inputs(*SIZES[size], dtype)
    leaves, ours = [x.double().requires_grad_() for x in given], [x.clone().requires_grad_() for x in given]
    exact, found = written_out(leaves, first, **OPTIONS), lru_input(*ours, first, **OPTIONS, backend=backend)
    do = [torch.randn(given[0].shape).to(dtype), torch.randn(given[0].shape)]
    exact += torch.autograd.grad(exact, leaves, [x.double() for x in do])
    found += torch.autograd.grad(found, ours, do)
    assert [x.dtype for x in found] == [dtype, torch.float32, dtype, dtype, dtype, *[torch.float32] * 3]
    for name, a, b in zip(("x", "log_a", *NAMES), found, exact, strict=True):
        bound = 2e-5 if dtype == torch.float32 or name == "log_a" else 1e-2
        assert (a - b).abs().max() < bound * b.abs().max(), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_roots_slope_is_bounded(backend):
    """Where nothing decays, the derivative by the gate is `steepest`'s and not infinite."""
    shape = (1, 3, 16)
    u, f, g, bias, first = (
        torch.ones(shape),
        torch.zeros(1, *shape),
        torch.zeros(1, *shape),
        torch.zeros(16),
        torch.zeros(1, 3, dtype=torch.bool),
    )
    steps = torch.full((16,), 1e-12, requires_grad=True)
    x, _ = lru_input(u, f, g, bias, bias, steps, first, rate=8.0, steepest=10.0, backend=backend)
    (gradient,) = torch.autograd.grad(x.sum(), steps)
    torch.testing.assert_close(gradient, torch.full((16,), 3 * 0.5 * 10.0 * 2 * 8.0 * 0.5))


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_compiled_whole(backend):
    given, first = inputs(*SIZES["odd"], torch.float32)
    results = []
    run = lambda *xs: lru_input(*xs, first, **OPTIONS, backend=backend)[0]  # noqa: E731
    for f in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_() for x in given]
        results.append(torch.autograd.grad(f(*leaves).square().sum(), leaves))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_wrong_shape_is_one_sentence():
    given, first = inputs(*SIZES["odd"], torch.float32)
    with pytest.raises(ValueError, match="lru_input: first has 36 along T"):
        lru_input(*given, first[:, 1:], **OPTIONS)


@pytest.mark.skipif(launch.INTERPRETED, reason="the interpreter and the compiler cannot share a process")
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_compiles_for_hopper(dtype, tmp_path: Path):
    pytest.importorskip("triton")
    from tests.kernels.test_compile import resources

    with FakeTensorMode(), launch.recording() as seen:
        given, first = inputs(2, 2048, 12, 160, dtype)
        leaves = [x.requires_grad_() for x in given]
        sum(o.sum() for o in lru_input(*leaves, first, **OPTIONS, backend="triton")).backward()
    assert len(seen) == 2
    for launched in seen:
        used = resources(launched, tmp_path)
        assert used["stack"] == 0 and used["shared"] <= 227 * 1024, used
