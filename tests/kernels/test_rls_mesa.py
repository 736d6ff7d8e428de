"""What is RLS Mesa's own: its recursion, its limit, where H begins again, and what forgetting costs."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kernels.mesa import mesa
from kernels.rls_mesa import chunked, rls_mesa, step
from tests.kernels.harness import error


def inputs(B=2, T=96, H=2, K=16, gamma=0.99, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    normal = lambda *s: torch.randn(*s, generator=g, dtype=torch.float64)  # noqa: E731
    q, k = (F.normalize(F.silu(normal(B, T, H, K)), dim=-1) for _ in range(2))
    beta = torch.rand(B, T, H, generator=g, dtype=torch.float64)
    log_decay = torch.full((B, T, H), float(np.log(gamma)), dtype=torch.float64)
    return [x.to(dtype) for x in (q, k, normal(B, T, H, K), log_decay, beta, 0.5 + torch.rand(H, K, generator=g, dtype=torch.float64))]


@pytest.mark.parametrize("gamma", [1.0, 0.97])
def test_it_is_recursive_least_squares(gamma):
    """Phi_t = Phi_{t-1} - beta_t (Phi_{t-1} k_t - v_t) k_t^T H_t^-1, by Sherman and Morrison's update of H^-1 (MesaNet, Eq. 46-52)."""
    q, k, v, _, beta, lam = xs = inputs(B=1, H=1, T=40, gamma=gamma)
    o, _ = rls_mesa(*xs)
    inverse, phi = torch.diag(1 / lam[0]), torch.zeros(16, 16, dtype=torch.float64)
    for t in range(40):
        key, b = k[0, t, 0], beta[0, t, 0]
        gain = inverse @ key / (gamma / b + key @ inverse @ key)
        inverse = (inverse - torch.outer(gain, key @ inverse)) / gamma
        phi = phi - torch.outer(phi @ key - v[0, t, 0], gain)
        torch.testing.assert_close(o[0, t, 0], phi @ q[0, t, 0], rtol=1e-10, atol=1e-10)


def test_without_forgetting_it_is_mesas_exact_solve():
    xs = inputs(gamma=1.0)
    o, state = rls_mesa(*xs)
    expected, other, _ = mesa(*xs, backend="reference")
    assert error(o, expected) <= 1e-12 and error(state.H_BHKK, other.H_BHKK) <= 1e-12 and (state.weight_BH == 1).all()
    with_forgetting = inputs(gamma=0.97)
    assert error(rls_mesa(*with_forgetting)[0], mesa(*with_forgetting, backend="reference")[0]) > 0.1


@pytest.mark.parametrize("log_decay", [-float("inf"), -1e4, -16.0])
def test_where_nothing_is_left_h_begins_again_at_lambda(log_decay):
    """Within a chunk and at its edge; what follows is what follows a fresh start, Lambda undecayed at the first token."""
    for place in (16, 21):
        xs = inputs(T=40)
        xs[3][:, place] = log_decay
        whole, end = rls_mesa(*xs)
        tail = [x[:, place:] if x.ndim > 2 else x for x in xs]
        tail[3] = tail[3].clone()
        tail[3][:, 0] = 0
        alone, alone_end = rls_mesa(*tail)
        assert error(whole[:, place:], alone) <= 1e-13 and error(end.weight_BH, alone_end.weight_BH) <= 1e-13
        assert error(whole, rls_mesa(*xs, backend="reference")[0]) <= 1e-12


@pytest.mark.parametrize("chunk", [1, 7, 32])
def test_results_do_not_depend_on_the_chunk(chunk):
    xs = [x.requires_grad_() for x in inputs(T=50)]
    results = [chunked.rls_mesa(*xs, chunk=c)[0] for c in (16, chunk)]
    assert error(*results) <= 1e-12
    for a, b in zip(*(torch.autograd.grad(o.square().sum(), xs) for o in results), strict=True):
        assert error(a, b) <= 1e-11


@pytest.mark.parametrize("gamma, bound", [(1.0, 1e-6), (0.99, 1e-6), (0.9, 2e-5), (0.8, 2e-3)])
def test_float32_loses_what_has_been_forgotten(gamma, bound):
    """16 directions, each last written about 16 tokens ago: cond(H) grows as gamma^-16 and more, and the error with it."""
    xs = inputs(gamma=gamma)
    exact, _ = rls_mesa(*xs, backend="reference")
    assert error(rls_mesa(*[x.float() for x in xs])[0], exact) <= bound


@pytest.mark.parametrize("gamma", [0.9, 0.5, 1e-3, 1e-6])
@pytest.mark.parametrize("keys", ["mixed", "one", "eight"])
def test_it_stays_finite_whatever_is_forgotten(gamma, keys):
    """H singular in float32, or in every precision: outputs and gradients are finite all the same."""
    q, k, v, log_decay, beta, lam = inputs(T=256, gamma=gamma, dtype=torch.float32)
    k = {"mixed": k, "one": k[:, :1].expand(k.shape), "eight": F.normalize(k[..., :8] @ k[0, :8, 0], dim=-1)}[keys]
    xs = [x.clone().requires_grad_() for x in (q, k, v, log_decay, beta, lam)]
    o, state = rls_mesa(*xs)
    assert all(x.isfinite().all() for x in (o, *state[:-1], *torch.autograd.grad(o.square().sum(), xs)))
    assert step(*[x[:, 0] if x.ndim > 2 else x for x in xs], state=state)[0].isfinite().all()


def test_tokens_that_write_nothing():
    """beta = 0, and keys of 0: the state decays and nothing else."""
    q, k, v, log_decay, beta, lam = inputs(T=20)
    xs = [x.requires_grad_() for x in (q, k, v, log_decay, beta * 0, lam)]
    o, state = rls_mesa(*xs)
    assert (o == 0).all() and error(state.weight_BH, torch.full((2, 2), 0.99**20)) <= 1e-6
    assert all(g.isfinite().all() for g in torch.autograd.grad(o.sum(), xs))
    assert (rls_mesa(q, k * 0, v, log_decay, beta, lam)[0] == 0).all()
