"""The head's loss: soft-capped logits and cross-entropy, against logits written out."""

import pytest
import torch

from kernels import head_loss as package
from kernels import launch
from kernels.head_loss import chunked, head_loss
from tests.kernels.operations import BACKEND

DTYPES = [torch.float32] if launch.INTERPRETED else [torch.float32, torch.bfloat16]
BACKENDS = [BACKEND] if BACKEND == "triton" else ["chunked"]


def inputs(N, V, D, dtype):
    """Logits up to the cap, on which nothing underflows; one token without a weight."""
    random = torch.Generator(torch.get_default_device()).manual_seed(0)
    x, embedding = (3 * torch.randn(N, D, generator=random)).to(dtype), 2 * torch.randn(V, D, generator=random)
    target, weight = torch.randint(0, V, (N,), generator=random), torch.rand(N, generator=random)
    weight[N // 5] = 0
    return x, embedding, target, weight


def written_out(x, embedding, target, weight):
    """(total, nll, dx, dembedding) of twice the total, in float64, of x and embedding as rounded."""
    leaves = [x.double().requires_grad_(), embedding.to(x.dtype).double().requires_grad_()]
    logits = 30 * torch.tanh(leaves[0] @ leaves[1].T / 30)
    assert logits.abs().max() > 20
    nll = torch.nn.functional.cross_entropy(logits, target, reduction="none")
    total = (nll * weight).sum()
    return total, nll, *torch.autograd.grad(2 * total, leaves)


@pytest.fixture
def small_chunks(monkeypatch):
    """Of three rows, or of the smallest that Triton's form takes."""
    for device in ("cpu", "cuda"):
        monkeypatch.setitem(chunked.CHUNK, device, 3 * 50)
    if BACKEND == "triton":
        from kernels.head_loss import triton

        monkeypatch.setattr(triton, "CHUNK", 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "V", "D"), [(20, 50, 16), (150, 131, 40)])
def test_loss_and_gradients_are_those_of_the_logits(small_chunks, backend, dtype, N, V, D):
    given = inputs(N, V, D, dtype)
    total, nll, *gradients = written_out(*given)
    ours = [x.clone().requires_grad_() for x in given[:2]]
    our_total, our_nll = head_loss(*ours, *given[2:], backend=backend)
    (2 * our_total).backward()
    assert (our_nll - nll).abs().max() < 1e-4 and abs(our_total - total) < 1e-5 * N * nll.max()
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    for a, b in zip(ours, gradients, strict=True):
        assert a.grad.dtype == a.dtype and (a.grad - b).abs().max() < bound * b.abs().max()
    assert ours[0].grad[N // 5].abs().max() == 0


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_a_loss_alone_needs_no_gradient(backend):
    given = inputs(20, 50, 16, torch.float32)
    with torch.no_grad():
        total, nll = head_loss(*given, backend=backend)
    assert abs(total - written_out(*given)[0]) < 1e-4 and not total.requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_bits_every_time(backend):
    given = inputs(150, 131, 40, torch.float32)
    runs = []
    for _ in range(2):
        leaves = [x.clone().requires_grad_() for x in given[:2]]
        total, nll = head_loss(*leaves, *given[2:], backend=backend)
        runs.append((total, nll, *torch.autograd.grad(total, leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_mistakes_are_named():
    x, embedding, target, weight = inputs(20, 50, 16, torch.float32)
    with pytest.raises(ValueError, match="head_loss: target .* must agree"):
        head_loss(x, embedding, target[1:], weight)
    assert package.SOFT_CAP == 30


def test_scoring_computes_no_gradient(monkeypatch):
    """Where none can be asked for, also of parameters that want one in training."""
    asked = []

    def watched(*given, differentiate):
        asked.append(differentiate)
        return chunked.loss_and_gradient(*given, differentiate=differentiate)

    x, embedding, target, weight = inputs(5, 11, 4, torch.float32)
    embedding.requires_grad_()
    total, _ = chunked.head_loss(x, embedding, target, weight, run=watched)
    with torch.no_grad():
        same, _ = chunked.head_loss(x, embedding, target, weight, run=watched)
    assert asked == [True, False] and total.requires_grad and not same.requires_grad and torch.equal(total, same)
