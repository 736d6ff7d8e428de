"""FLOPs and states of every layer against counts made by hand, at the paper's 140M scale."""

import pytest

from models import build
from models.layers import LAYERS

SCALE = {"layers": 1, "width": 768, "heads": 6, "key_size": 128, "mlp": 2304}
T, D, H, N, C, V = 2048, 768, 6, 128, 64, 50257
MLP = 3 * 2 * D * 2304
REST = MLP + 2 * V * D  # with the head, a token
QKVO, CONV, GATE = 4 * 2 * D * D, 2 * 4 * D, 2 * D * H
READ, WRITE = 4 * C * N + 2 * N * N, 2 * N * N
HAND = {
    "attention": QKVO + 4 * D * (T + 1) / 2,
    "mamba2": QKVO + 2 * CONV + GATE + H * (READ + WRITE),
    "gla": QKVO + 2 * CONV + 2 * GATE + H * (READ + WRITE),
    "deltanet": QKVO + 2 * CONV + GATE + H * (10 * C * N + 6 * N * N),
    "gated_deltanet": QKVO + 2 * CONV + 2 * GATE + H * (10 * C * N + 6 * N * N),
    "mlstm": QKVO + 2 * CONV + 2 * GATE + H * (READ + WRITE + 4 * N),
    "palimpsa_d": 5 * 2 * D * D + 3 * CONV + 2 * GATE + 2 * 48 * (D + D) + H * 6 * N * N,
    "palimpsa_m": 2 * 2 * D * D + 3 * 2 * D * 2 * D + 4 * CONV + GATE + 2 * 48 * (D + 2 * D) + H * 6 * N * 2 * N - MLP,
    "hawk": 3 * 2 * D * 960 + 2 * 4 * 960 + 2 * 2 * 960 * 160 + 2 * 960,
}
MESA = QKVO + 2 * CONV + 2 * GATE + H * (READ + 2 * WRITE)
STATE = {
    "attention": 2 * D * T, "mamba2": H * N * N, "gla": H * N * N, "deltanet": H * N * N, "gated_deltanet": H * N * N,
    "mlstm": H * (N * N + N), "hawk": 960, "mesa": 2 * H * N * N,
    "rls_mesa": 2 * H * N * N + H, "palimpsa_d": 2 * H * N * N, "palimpsa_m": 2 * H * N * 2 * N,
}  # fmt: skip


def one(name, **options):
    return build({"layer": name, **options}, SCALE, vocab_size=V)


@pytest.mark.parametrize("name", HAND)
def test_flops_by_hand(name):
    assert one(name).flops(T) == pytest.approx(REST + HAND[name], rel=1e-12)
    assert one(name).flops(T, training=True) == pytest.approx(3 * (REST + HAND[name]), rel=1e-12)
    assert one(name).flops(T, steps=7) == one(name).flops(T), "no solver, no steps"


def test_mesa_counts_the_steps_that_were_taken():
    """A step is 4CN + 2N^2 a head: once forward, once more backward, and only the steps taken (MesaNet, Eq. 39-41)."""
    for steps in (0, 5.5, 30):
        assert one("mesa").flops(T, steps=steps) == pytest.approx(REST + MESA + H * steps * READ, rel=1e-12)
        assert one("mesa").flops(T, steps=steps, training=True) == pytest.approx(3 * (REST + MESA) + 2 * H * steps * READ, rel=1e-12)
        unrolled = one("mesa", gradient="unrolled").flops(T, steps=steps, training=True)
        assert unrolled == pytest.approx(3 * (REST + MESA) + 3 * H * steps * READ, rel=1e-12)
    assert one("mesa").flops(T) == one("mesa").flops(T, steps=30)
    assert one("mesa", steps=10).flops(T) == one("mesa").flops(T, steps=10)
    assert one("mesa", solve=False).flops(T) == one("mesa").flops(T, steps=0)


def test_rls_mesa_solves_once_each_way_and_factorises_once():
    """Chunks of 16: Woodbury's identity twice and a residual between; a Cholesky factor and its inverse a chunk."""
    small = 16
    solve, factors = 2 * (4 * small * N + 4 * N * N) + 4 * small * N + 2 * N * N, 2 / 3 * N**3 / small + 2 * N * N + 3 * small * N
    common = QKVO + 2 * CONV + GATE + H * (READ + 2 * WRITE)
    assert one("rls_mesa").flops(T) == pytest.approx(REST + common + H * (solve + factors), rel=1e-12)
    assert one("rls_mesa").flops(T, training=True) == pytest.approx(3 * (REST + common) + H * (2 * solve + factors), rel=1e-12)
    assert one("rls_mesa", forget_minimum=0.99).flops(T) == one("rls_mesa").flops(T) + GATE


def test_options_are_counted():
    """Values of 2 K: v, gate and out are twice as wide, and so is what the recurrence makes of them."""
    wide = 2 * (2 * D * D) + 3 * (2 * D * 2 * D) + 2 * CONV + 2 * GATE
    read, write = 2 * C * N + 2 * C * 2 * N + 2 * N * 2 * N, 2 * N * 2 * N
    gla = one("gla", value_expansion=2, output_gate=True)
    assert gla.flops(T) == REST + wide + H * (read + write) and gla.state_floats(T) == 2 * H * N * N
    delta = one("gated_deltanet", value_expansion=2, output_gate=True)
    assert delta.flops(T) == REST + wide + H * (6 * C * N + 4 * C * 2 * N + 6 * N * 2 * N)
    mesa = one("mesa", value_expansion=2, output_gate=True)
    assert mesa.flops(T, steps=4) == REST + wide + H * (read + write + WRITE + 4 * READ) and mesa.state_floats(T) == 3 * H * N * N
    plain = one("palimpsa_d", metaplasticity=False)
    assert plain.flops(T) == REST + 5 * 2 * D * D + 3 * CONV + 2 * GATE + H * (READ + WRITE) and plain.state_floats(T) == H * N * N


@pytest.mark.parametrize("scale, extra", [((14, 768, 6), 0.33e9), ((28, 1024, 8), 0.88e9), ((28, 1536, 12), 1.32e9)])
def test_thirty_steps_cost_what_the_paper_implies(scale, extra):
    layers, width, heads = scale
    model = build({"layer": "mesa"}, {"layers": layers, "width": width, "heads": heads, "key_size": 128, "mlp": 3 * width}, vocab_size=V)
    assert model.flops(T, training=True) - model.flops(T, steps=0, training=True) == pytest.approx(extra, rel=0.01)


@pytest.mark.parametrize("window, seen", [(1, 1), (4, (1 + 2 + 3 + 4 * 7) / 10), (10, 5.5), (99, 5.5)])
def test_attention_counts_the_mean_of_keys_seen(window, seen):
    assert one("attention", window=window).flops(10) == pytest.approx(REST + QKVO + 4 * D * seen, rel=1e-12)


@pytest.mark.parametrize("name", STATE)
def test_states(name):
    assert one(name).state_floats(T) == STATE[name]
    assert one("attention", window=64).state_floats(T) == 2 * D * 64


def test_every_layer_is_counted_here():
    assert set(HAND) | {"mesa", "rls_mesa"} == set(LAYERS) == set(STATE), "a new layer needs its count by hand"


def test_training_costs_about_six_flops_a_parameter():
    model = one("gla")
    assert model.flops(T, training=True) == pytest.approx(6 * model.parameters, rel=0.02)
