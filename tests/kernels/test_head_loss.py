"""The head's loss: soft-capped logits and cross-entropy, against logits written out."""

import pytest
import torch

import kernels.head_loss.chunked as chunked
from kernels.head_loss import head_loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_loss_gradients_are_autograds(monkeypatch, dtype):
    """In chunks of three rows, against logits written out."""
    monkeypatch.setitem(chunked.CHUNK, "cpu", 3 * 50)
    random = torch.Generator().manual_seed(0)
    x, embedding = (3 * torch.randn(20, 16, generator=random)).to(dtype), 2 * torch.randn(50, 16, generator=random)
    target, weight = torch.randint(0, 50, (20,), generator=random), torch.rand(20, generator=random)
    weight[4] = 0
    ours = [x.clone().requires_grad_(), embedding.clone().requires_grad_()]
    total, nll = head_loss(*ours, target, weight)
    (2 * total).backward()
    theirs = [x.float().requires_grad_(), embedding.to(dtype).float().requires_grad_()]
    logits = 30 * torch.tanh(theirs[0] @ theirs[1].T / 30)
    expected = torch.nn.functional.cross_entropy(logits, target, reduction="none")
    (2 * (expected * weight).sum()).backward()
    assert logits.abs().max() > 20
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    assert (nll - expected).abs().max() < 1e-4 and abs(total - (expected * weight).sum()) < 1e-3
    for a, b in zip(ours, theirs, strict=True):
        assert (a.grad.float() - b.grad).abs().max() < bound * b.grad.abs().max()
    assert ours[0].grad[4].abs().max() == 0
