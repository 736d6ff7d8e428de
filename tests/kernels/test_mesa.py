"""What is Mesa's own: its limits, its solver, and gradients of every size (float32 against float64)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kernels.linear_attention import linear_attention
from kernels.mesa import State, chunked, mesa, reference, step
from tests.kernels.harness import error

BOUND_EXACT = 2e-6  # outputs at eps 0, float32
BOUND_EPS = 1e-3  # gradients at eps 1e-4 against the exact solve's, cond(H + Lambda) <= 150
BOUND_LINEAR = 1e-3  # gradients under a scaled output gradient
# Every key equal for 2048 tokens, cond(H + Lambda) = 700: q* rounds at 6e-8, and G, which grows as H, multiplies that. The decay's gradient
# is what is left of two terms that all but cancel, as G and H decay together.
BOUND_SCREAMING = {"o": 1e-3, "q": 5e-3, "k": 5e-3, "v": 1e-3, "log_decay": 4e-2, "beta": 1e-3, "lam": 1e-2}


def inputs(B=2, T=96, H=2, K=16, decay=0.99, lam=1.0, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    normal = lambda *s: torch.randn(*s, generator=g, dtype=torch.float64)  # noqa: E731
    q, k = (F.normalize(F.silu(normal(B, T, H, K)), dim=-1) for _ in range(2))
    log_decay = torch.full((B, T, H), float(np.log(decay)), dtype=torch.float64) * torch.rand(B, T, H, generator=g, dtype=torch.float64)
    beta = torch.rand(B, T, H, generator=g, dtype=torch.float64)
    return [x.to(dtype) for x in (q, k, normal(B, T, H, K), log_decay, beta, torch.full((H, K), lam, dtype=torch.float64))]


def cast(xs, dtype=torch.float32, gradient=False):
    return [x.detach().to(dtype, copy=True).requires_grad_(gradient) for x in xs]


def gradients(xs, do, **options):
    xs = cast(xs, do.dtype, True)
    return torch.autograd.grad(mesa(*xs, **options)[0], xs, do)


@pytest.mark.parametrize("steps", [30, 200])
@pytest.mark.parametrize("decay", [1.0, 0.9975, 0.9, 0.5])
def test_at_eps_0_the_solve_is_exact(steps, decay):
    """Run on past convergence: every token freezes, nothing becomes NaN."""
    xs = inputs(decay=decay)
    exact, _, _ = mesa(*xs, backend="reference")
    o, _, info = mesa(*cast(xs), steps=steps)
    assert error(o, exact) <= BOUND_EXACT
    assert (info["residual"] <= 1e-6).all() and (info["steps"] <= 30).all() and (info["steps"] >= 1).all()


def test_zero_steps_are_the_jacobi_start():
    q, k, v, log_decay, beta, lam = xs = inputs()
    _, state, _ = mesa(*xs, backend="reference")
    o, _, info = mesa(*xs, steps=0)
    last = q[:, -1] / (torch.diagonal(state.H_BHKK, dim1=-2, dim2=-1) + lam)
    torch.testing.assert_close(o[:, -1], torch.einsum("bhk,bhkv->bhv", last, state.G_BHKV))
    left = q[:, -1] - torch.einsum("bhij,bhj->bhi", state.H_BHKK, last) - lam * last
    torch.testing.assert_close(info["residual"][:, -1].double(), left.norm(dim=-1), rtol=1e-6, atol=0)
    assert (info["steps"] == 0).all()


def test_without_the_solve_it_is_gated_linear_attention():
    q, k, v, log_decay, beta, lam = inputs()
    o, state, info = mesa(q, k, v, log_decay, beta, lam, solve=False)
    expected, linear_state = linear_attention(q, k, v, log_decay, beta, backend="reference")
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(state.G_BHKV, linear_state.S_BHKV)
    assert (info["steps"] == 0).all() and (info["residual"] > 0.1).any()


def test_with_beta_0_everything_is_0_and_the_solution_is_q_over_lambda():
    q, k, v, log_decay, beta, lam = inputs(dtype=torch.float32)
    o, state, info = mesa(q, k, v, log_decay, beta * 0, lam)
    assert (o == 0).all() and (state.H_BHKK == 0).all() and (info["residual"] <= 3e-7).all() and (info["steps"] <= 1).all()
    for g in gradients([q, k, v, log_decay, beta * 0, lam], torch.ones_like(o)):
        assert g.isfinite().all()


def test_without_forgetting_it_is_recursive_least_squares():
    """Phi_t = Phi_{t-1} - (Phi_{t-1} k_t - v_t) k_t^T H_t^-1 from H_0 = Lambda (MesaNet, Eq. 46-52)."""
    q, k, v, _, _, lam = inputs(B=1, H=1, T=40)
    o, _, _ = mesa(q, k, v, torch.zeros(1, 40, 1), torch.ones(1, 40, 1), lam)
    H, phi = torch.diag(lam[0]), torch.zeros(16, 16, dtype=torch.float64)
    for t in range(40):
        H = H + torch.outer(k[0, t, 0], k[0, t, 0])
        phi = phi - torch.outer(phi @ k[0, t, 0] - v[0, t, 0], torch.linalg.solve(H, k[0, t, 0]))
        torch.testing.assert_close(o[0, t, 0], phi @ q[0, t, 0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("eps", [0.0, 1e-4])
def test_gradients_are_linear_in_the_output_gradient(eps):
    xs = inputs(T=64)
    do = torch.randn(2, 64, 2, 16, generator=torch.Generator().manual_seed(1))
    ones = gradients(xs, do, eps=eps)
    for exponent in range(-1, -13, -1):
        scale = 10.0**exponent
        for name, g, one in zip("q k v log_decay beta lam".split(), gradients(xs, do * scale, eps=eps), ones, strict=True):
            assert error(g.double() / scale, one.double()) <= BOUND_LINEAR, (name, scale)


def test_gradients_at_eps_1e_4_are_those_of_the_exact_solve():
    """On keys of low rank: cond(H + Lambda) up to 79."""
    xs = inputs(B=1, T=512, lam=0.25)
    g = torch.Generator().manual_seed(2)
    basis, weights = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((4, 16), (1, 512, 2, 4)))
    xs[1], xs[3] = F.normalize(F.silu(weights) @ basis, dim=-1), torch.full_like(xs[3], float(np.log(0.99)))
    _, state, _ = mesa(*xs, backend="reference")
    condition = torch.linalg.cond(state.H_BHKK + torch.diag_embed(xs[5])).max()
    assert 50 <= condition <= 150, condition
    do = torch.randn(1, 512, 2, 16, generator=g)
    exact = gradients(xs, do.double(), steps=100)
    for name, g, e in zip("q k v log_decay beta lam".split(), gradients(xs, do, eps=1e-4), exact, strict=True):
        assert error(g, e) <= BOUND_EPS, name


@pytest.mark.parametrize("eps", [0.0, 1e-4])
def test_screaming(eps):
    """2048 equal tokens at gamma 0.9975: H has one huge eigenvalue; the output and every gradient, against float64."""
    T = 2048
    q, k, v, _, _, lam = inputs(B=1, H=1, T=1, lam=0.25)
    xs = [x.repeat(1, T, 1, 1) for x in (q, k, v)] + [torch.full((1, T, 1), float(np.log(0.9975))), torch.full((1, T, 1), 0.44), lam]
    exact, state, _ = mesa(*cast(xs, torch.float64), steps=100)
    assert error(exact[:, -1], _dense(q, state, lam)) <= 1e-10
    o, _, info = mesa(*cast(xs), eps=eps)
    assert error(o, exact) <= BOUND_SCREAMING["o"] and (info["residual"] <= 2e-4).all()
    do = torch.randn(1, T, 1, 16, generator=torch.Generator().manual_seed(1))
    for name, g, e in zip(
        "q k v log_decay beta lam".split(), gradients(xs, do, eps=eps), gradients(xs, do.double(), steps=100), strict=True
    ):
        assert error(g, e) <= BOUND_SCREAMING[name], name


def _dense(q, state, lam):
    solution = torch.linalg.solve(state.H_BHKK + torch.diag_embed(lam), q[:, 0])
    return torch.einsum("bhk,bhkv->bhv", solution, state.G_BHKV)


@pytest.mark.parametrize("options", [{"eps": 1e-2}, {"eps": 1e-1, "criterion": "r0"}, {"steps": 3}, {"eps": 1e-3, "start": "zero"}])
def test_results_depend_on_neither_chunk_nor_neighbours_and_steps_equal_the_forward_pass(options):
    """At every eps and cap: a token stops by itself."""
    xs = inputs(T=70, decay=0.95, dtype=torch.float32)
    whole, end, info = mesa(*xs, **options)
    for chunk in (1, 7, 70):
        o, _, other = chunked.mesa(*xs, chunk=chunk, **options)
        assert error(o, whole) <= 4e-6 and (other["steps"] != info["steps"]).float().mean() <= 0.01
    alone, _, _ = mesa(*[x[1:, :, 1:] if x.ndim > 2 else x[1:] for x in xs], **options)
    assert error(whole[1:, :, 1:], alone) <= 4e-6
    early, _, _ = mesa(*[x[:, :33] if x.ndim > 2 else x for x in xs], **options)
    assert error(whole[:, :33], early) <= 4e-6
    state = None
    for t in range(70):
        o, state, now = step(*[x[:, t] if x.ndim > 2 else x for x in xs], state=state, **options)
        assert error(o, whole[:, t]) <= 4e-6
    assert error(state.H_BHKK, end.H_BHKK) <= 4e-6
    if "steps" in options:
        assert info["steps"].max() == 3


@pytest.mark.parametrize("criterion", ["b", "r0"])
@pytest.mark.parametrize("eps", [1e-1, 1e-3])
def test_the_criterion_is_what_it_says_and_the_residual_is_true(criterion, eps):
    q, k, v, log_decay, beta, lam = xs = inputs(T=48, decay=0.9975, lam=0.25)
    _, _, info = mesa(*xs, eps=eps, criterion=criterion)
    _, _, first = mesa(*xs, steps=0)
    bound = eps * (first["residual"].clamp(max=1) if criterion == "b" else first["residual"])
    assert (info["residual"] <= bound * 1.0001).all()
    stopped_at_once = info["steps"] == 0
    fewer = torch.stack([mesa(*xs, steps=n, eps=0.0)[2]["residual"] for n in range(31)])
    before = fewer.gather(0, (info["steps"].long() - 1).clamp(min=0)[None])[0]
    assert (stopped_at_once | (before > bound * 0.9999)).all(), "a token went on after it could have stopped"


def test_a_huge_first_residual_does_not_stop_a_token_early():
    """On repeated tokens the Jacobi start is far off: the paper's criterion is then loose, ours is not."""
    q, k, v, _, _, _ = inputs(B=1, H=1, T=1, dtype=torch.float32)
    lam = torch.linspace(0.25, 4, 16)[None]
    xs = [x.repeat(1, 256, 1, 1) for x in (q, k, v)] + [torch.zeros(1, 256, 1), torch.ones(1, 256, 1), lam]
    start = mesa(*xs, steps=0)[2]["residual"].max()
    ours, paper = (mesa(*xs, eps=0.1, criterion=c)[2]["residual"].max() for c in ("b", "r0"))
    assert start > 5 and ours <= 0.1 and 0.5 < paper <= 0.1 * start


def test_queries_of_any_size_and_zero():
    q, k, v, log_decay, beta, lam = inputs(dtype=torch.float32)
    whole, _, info = mesa(q, k, v, log_decay, beta, lam, eps=1e-3)
    for size in (1e-30, 1e-15, 1e15):
        o, _, other = mesa(q * size, k, v, log_decay, beta, lam, eps=1e-3)
        assert error(o.double() / size, whole) <= 4e-6
        assert error(other["residual"], info["residual"]) <= 0.05
    q[:, ::3] = 0
    o, _, info = mesa(q, k, v, log_decay, beta, lam)
    assert (o[:, ::3] == 0).all() and (info["steps"][:, ::3] == 0).all() and (info["residual"][:, ::3] == 0).all() and o.isfinite().all()
    assert all(g.isfinite().all() for g in gradients([q, k, v, log_decay, beta, lam], torch.ones_like(o)))


def test_an_indefinite_system_freezes_finite():
    """A negative decay with a small Lambda can lose positive definiteness; the token stops where it is."""
    xs = inputs(lam=0.05, dtype=torch.float32)
    sign = torch.where(torch.rand(2, 96, 2, generator=torch.Generator().manual_seed(0)) < 0.5, -1.0, 1.0)
    o, _, info = mesa(*xs, sign=sign)
    assert o.isfinite().all() and info["residual"].isfinite().all()


def test_the_solver_never_touches_half_precision():
    """bfloat16 inputs and output, everything between in float32: within the rounding of the output on hard inputs too."""
    q, k, v, log_decay, beta, lam = inputs(B=1, T=512, decay=0.9975, lam=0.25)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    exact = mesa(*cast([q, k, v, log_decay, beta, lam], torch.float64), backend="reference")[0]
    o = mesa(q, k, v, *cast([log_decay, beta, lam]), eps=1e-4)[0]
    assert o.dtype == torch.bfloat16 and float((o.double() - exact).norm() / exact.norm()) <= 3.5e-3


@pytest.mark.parametrize(
    "options",
    [
        {"steps": -1},
        {"eps": -0.1},
        {"criterion": "rel"},
        {"start": "warm"},
        {"gradient": "exact"},
        {"backend": "pallas"},
        {"backend": "cuda"},
    ],
)
def test_options_that_mean_nothing_are_refused(options):
    with pytest.raises(ValueError, match="steps|criterion|start|gradient|pallas|backend"):
        mesa(*inputs(T=3), **options)


@pytest.mark.parametrize("options", [{"steps": 2}, {"steps": 4, "start": "zero"}])
def test_unrolled_gradients_are_those_of_the_steps_taken(options):
    """Against differences of the outputs themselves; the implicit gradient is that of a solved q*, and differs."""
    xs = inputs(T=10, B=1)
    xs[5] = torch.linspace(0.25, 2, 32, dtype=torch.float64).reshape(2, 16)  # many eigenvalues, so that no token is done by then
    do = torch.randn(1, 10, 2, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    random = torch.Generator().manual_seed(2)
    unrolled, implicit = (gradients(xs, do, gradient=g, **options) for g in ("unrolled", "implicit"))
    far = []
    for i in range(len(xs)):
        way = torch.randn(xs[i].shape, generator=random, dtype=torch.float64)
        sides = [(mesa(*xs[:i], xs[i] + h * way, *xs[i + 1 :], **options)[0] * do).sum() for h in (1e-5, -1e-5)]
        slope = (sides[0] - sides[1]) / 2e-5
        torch.testing.assert_close((unrolled[i] * way).sum(), slope, rtol=1e-6, atol=1e-7)
        far.append(((implicit[i] * way).sum() - slope).abs() / slope.abs())
    assert max(far) > 1e-3


def test_unrolled_and_implicit_gradients_meet_where_the_solve_is_exact():
    xs, do = inputs(T=40), torch.randn(2, 40, 2, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for a, b in zip(gradients(xs, do, gradient="unrolled"), gradients(xs, do), strict=True):
        assert error(a, b) <= 1e-9
    segments = torch.tensor([[-1] * 3 + [0] * 20 + [1] * 17, [0] * 40], dtype=torch.int32)
    ys = cast(xs, gradient=True)
    ys[0].data[:, 30] = 0  # a query of 0, padding: nothing to divide by
    both = [torch.autograd.grad(mesa(*ys, segments=segments, gradient=g, eps=1e-4)[0].square().sum(), ys) for g in ("unrolled", "implicit")]
    for a, b in zip(*both, strict=True):
        assert error(a, b) <= 1e-2


def test_unrolled_gradients_in_jax():
    xs = cast(inputs(T=20))
    ours = gradients(xs, torch.ones(2, 20, 2, 16), steps=3, gradient="unrolled")
    loss = lambda xs: mesa(*xs, steps=3, gradient="unrolled")[0].sum()  # noqa: E731
    for a, b in zip(jax.jit(jax.grad(loss))([jnp.asarray(x.numpy()) for x in xs]), ours, strict=True):
        assert error(a, b) <= 1e-5


def test_the_state_is_what_the_equations_say():
    q, k, v, log_decay, beta, lam = inputs(T=5, B=1, H=1)
    _, state, _ = mesa(q, k, v, log_decay, beta, lam)
    G, H = torch.zeros(16, 16, dtype=torch.float64), torch.zeros(16, 16, dtype=torch.float64)
    for t in range(5):
        gamma, b, key = log_decay[0, t, 0].exp(), beta[0, t, 0], k[0, t, 0]
        G, H = gamma * G + b * torch.outer(key, v[0, t, 0]), gamma * H + b * torch.outer(key, key)
    assert isinstance(state, State) and isinstance(state, reference.State)
    torch.testing.assert_close(state.G_BHKV[0, 0], G)
    torch.testing.assert_close(state.H_BHKK[0, 0], H)


@pytest.mark.parametrize("backend", ["reference", "chunked", "step"])
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_of_h_the_lower_triangle_counts(backend, framework):
    """What a step left above the diagonal when it wrote in place is neither read nor handed on, and has no gradient."""
    xs = inputs(T=3, dtype=torch.float32)
    _, (G, H, ids), _ = mesa(*inputs(T=20, dtype=torch.float32, seed=1))
    half = torch.where(torch.ones(16, 16).tril().bool(), H, torch.nan)
    if framework == "jax":
        *xs, G, H, ids, half = (jnp.asarray(x.numpy()) for x in (*xs, G, H, ids, half))

    def run(H):
        if backend == "step":
            o, end, _ = step(*(x[:, 0] if x.ndim > 2 else x for x in xs), state=State(G, H, ids))
        else:
            o, end, _ = mesa(*xs, state=State(G, H, ids), backend=backend)
        return o, end.G_BHKV, end.H_BHKK

    for a, b in zip(run(half), run(H), strict=True):
        assert error(a, b) <= 4e-6
    if backend != "step":
        if framework == "jax":
            gradient = jax.grad(lambda H: run(H)[0].sum())(half)
        else:
            gradient = torch.autograd.grad(run(half.requires_grad_())[0].sum(), half)[0]
        gradient = np.asarray(gradient)
        assert np.isfinite(gradient).all() and (np.triu(gradient, 1) == 0).all() and (np.tril(gradient) != 0).any()
