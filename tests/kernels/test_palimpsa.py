"""What is Palimpsa's own: its two forms, its limits, the memory it takes."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.linear_attention import linear_attention
from kernels.mesa import mesa
from kernels.palimpsa import chunked, palimpsa
from tests.kernels.harness import error


def inputs(B=2, T=40, H=2, K=8, V=12, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    normal = lambda *s: torch.randn(*s, generator=g, dtype=torch.float64)  # noqa: E731
    q, k = (F.normalize(F.silu(normal(B, T, H, K)), dim=-1) for _ in range(2))
    beta = torch.rand(B, T, H, V, generator=g, dtype=torch.float64)
    log_decay = -0.1 * torch.rand(B, T, H, generator=g, dtype=torch.float64)
    return [x.to(dtype) for x in (q, k, normal(B, T, H, V), beta, log_decay, 0.5 + torch.rand(H, generator=g, dtype=torch.float64))]


def test_it_is_the_posterior_in_its_importance_form():
    """I <- a I + (1 - a) prior + beta k^2 and mu <- (a I_old mu_old + v k) / I, read with q (the paper's own recurrence)."""
    q, k, v, beta, log_decay, prior = xs = inputs()
    o, state = palimpsa(*xs, scale=0.5)
    base = prior[None, :, None, None]
    importance, mu = base.expand(2, 2, 8, 12), torch.zeros(2, 2, 8, 12, dtype=torch.float64)
    for t in range(40):
        a = log_decay[:, t, :, None, None].exp()
        old, importance = importance, a * importance + (1 - a) * base + k[:, t, :, :, None] ** 2 * beta[:, t, :, None]
        mu = (a * old * mu + k[:, t, :, :, None] * v[:, t, :, None]) / importance
        assert error(o[:, t], 0.5 * torch.einsum("bhk,bhkv->bhv", q[:, t], mu)) <= 1e-12
    assert error(state.J_BHKV + base, importance) <= 1e-12


@pytest.mark.parametrize("size", [1e6, 1e12])
def test_under_a_huge_prior_it_is_linear_attention(size):
    """Mamba2's limit: J / prior vanishes, what is left is v / prior."""
    q, k, v, beta, log_decay, prior = inputs()
    o, _ = palimpsa(q, k, v, beta, log_decay, prior * size)
    expected, _ = linear_attention(q, k, v / (prior * size)[:, None], log_decay)
    assert error(o, expected) <= 100 / size


def test_without_precision_it_is_linear_attention():
    q, k, v, beta, log_decay, prior = inputs()
    o, _ = palimpsa(q, k, v, beta * 0, log_decay, prior)
    assert error(o, linear_attention(q, k, v / prior[:, None], log_decay)[0]) <= 1e-14


def test_with_one_beta_for_all_values_it_is_mesas_jacobi_start():
    """y = G q / (Lambda + diag H): Mesa with zero steps, whose beta also multiplies v, and Lambda = prior."""
    q, k, v, beta, log_decay, prior = inputs()
    beta = beta[..., 0]
    o, state = palimpsa(q, k, v * beta[..., None], beta[..., None].expand(v.shape), log_decay, prior)
    expected, diagonal, _ = mesa(q, k, v, log_decay, beta, prior[:, None].expand(2, 8), steps=0)
    assert error(o, expected) <= 1e-13
    assert error(state.J_BHKV, torch.diagonal(diagonal.H_BHKK, dim1=-2, dim2=-1)[..., None].expand(2, 2, 8, 12)) <= 1e-13


@pytest.mark.parametrize("chunk", [1, 7, 40])
def test_results_do_not_depend_on_the_chunk(chunk):
    xs = [x.requires_grad_() for x in inputs()]
    results = [chunked.palimpsa(*xs, chunk=c)[0] for c in (16, chunk)]
    assert error(*results) <= 1e-13
    for a, b in zip(*(torch.autograd.grad(o.square().sum(), xs) for o in results), strict=True):
        assert error(a, b) <= 1e-12


def test_states_are_held_for_a_chunk_at_a_time():
    """No array holds a state for every token, forward or backward."""

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            results = function(*arguments, **(options or {}))
            self.size = max([self.size, *(x.numel() for x in torch.utils._pytree.tree_leaves(results) if isinstance(x, torch.Tensor))])
            return results

    B, T, H, K, V = 1, 512, 1, 16, 16
    xs = [x.requires_grad_() for x in inputs(B, T, H, K, V, torch.float32)]
    with Largest() as largest:
        palimpsa(*xs)[0].square().sum().backward()
    assert 16 * K * V <= largest.size <= T / 16 * K * V
