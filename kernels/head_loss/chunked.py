"""The loss a few rows of logits at a time, its gradient computed with it, in torch's own operations.

Shapes: N tokens, D width, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch

from kernels.head_loss import SOFT_CAP

CHUNK = {"cpu": 1 << 19, "cuda": 1 << 28}
"""Logits held at once: a processor's cache, a card's spare memory."""

Loss = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def head_loss(
    x_ND: torch.Tensor, embedding_VD: torch.Tensor, target_N: torch.Tensor, weight_N: torch.Tensor, *, run: Callable | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.head_loss.head_loss`. run: `loss_and_gradient`, or another form of it."""
    differentiate = torch.is_grad_enabled() and (x_ND.requires_grad or embedding_VD.requires_grad)
    nll_N, total = _HeadLoss.apply(run or loss_and_gradient, differentiate, x_ND, embedding_VD, target_N, weight_N)
    return total, nll_N


class _HeadLoss(torch.autograd.Function):
    """(nll_N, which carries no gradient; the sum over n of weight_n nll_n)."""

    @staticmethod
    def forward(ctx: Any, run: Callable, differentiate: bool, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nll_N, dx_ND, dembedding_VD = run(*inputs, differentiate=differentiate)
        ctx.save_for_backward(dx_ND, dembedding_VD)
        ctx.mark_non_differentiable(nll_N)
        return nll_N, (nll_N * inputs[-1]).sum()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor, gradient: torch.Tensor) -> tuple[None, None, torch.Tensor, torch.Tensor, None, None]:
        dx_ND, dembedding_VD = ctx.saved_tensors
        return None, None, dx_ND * gradient.to(dx_ND.dtype), dembedding_VD * gradient, None, None


def loss_and_gradient(
    x_ND: torch.Tensor, embedding_VD: torch.Tensor, target_N: torch.Tensor, weight_N: torch.Tensor, *, differentiate: bool
) -> Loss:
    """(nll_N, and of the sum of weight_n nll_n: dx_ND in x's dtype, dembedding_VD float32, or None for both)."""
    matrix_VD = embedding_VD.to(x_ND.dtype)
    nll_N = torch.empty(len(x_ND), device=x_ND.device)
    dx_ND = torch.empty_like(x_ND) if differentiate else None
    dembedding_VD = torch.zeros_like(embedding_VD) if differentiate else None
    rows = max(1, CHUNK[x_ND.device.type] // len(matrix_VD))
    for start in range(0, len(x_ND), rows):
        chunk = slice(start, start + rows)
        x, target, weight = x_ND[chunk], target_N[chunk, None], weight_N[chunk, None]
        # 30 tanh(z / 30) = 60 s - 30 with s = sigmoid(z / 15), which is six times faster; a softmax does not see the -30
        s = product(x, matrix_VD.T).mul_(2 / SOFT_CAP).sigmoid_()
        p = s * (2 * SOFT_CAP)
        torch.softmax(p, -1, out=p)  # logits differ by 60 at most: no probability underflows
        nll_N[chunk] = -p.gather(-1, target)[:, 0].log()
        if differentiate:
            dlogits = p.mul_(4 * weight).scatter_add_(-1, target, -4 * weight)
            dlogits = dlogits.mul_(s.addcmul_(s, s, value=-1)).to(x.dtype)  # d logits / d z = 4 s (1 - s)
            dx_ND[chunk] = dlogits @ matrix_VD
            dembedding_VD += product(dlogits.T, x)
    return nll_N, dx_ND, dembedding_VD


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b, summed and returned in float32."""
    if a.is_cuda and a.dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())
