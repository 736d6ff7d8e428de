"""The backbone against its equations, written out in numpy; settings of the solver; the number of steps taken."""

import numpy as np
import pytest
import torch

from models import build
from models.backends.torch import Trainer
from models.layers import LAYERS

SCALE = {"layers": 3, "width": 32, "heads": 2, "key_size": 16, "mlp": 40}
OPTIMIZER = {"beta1": 0.9, "beta2": 0.98, "epsilon": 1e-8, "weight_decay": 0.1, "clip": 1.0}


def silent(model, seed=0):
    """Parameters as lists of numpy arrays, with every layer's output at 0: what is left is the backbone."""
    params = model.init(seed)
    return {name: value * 0 if name.endswith("mixer.out") else value for name, value in params.items()}


def rms_norm(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def test_it_is_its_equations():
    """sqrt(d) on the input, pre-RMSNorm, SwiGLU, final norm, tied head, soft cap at 30: float64 numpy against ours."""
    model = build({"layer": "attention"}, SCALE, vocab_size=50)
    params = {name: value + (0.3 if "norm" in name else 0.0) for name, value in silent(model).items()}
    p = {name: value.double().numpy() for name, value in params.items()}
    p["embedding"] *= 4
    params["embedding"] = params["embedding"] * 4  # far enough for the cap to bend
    tokens = np.array([[3, 1, 4, 1, 5]])
    x = p["embedding"][tokens] * np.sqrt(32)
    for i in range(3):
        z = rms_norm(x, p[f"blocks.{i}.mlp_norm"])
        g = z @ p[f"blocks.{i}.mlp.gate"]
        x = x + (g / (1 + np.exp(-g)) * (z @ p[f"blocks.{i}.mlp.up"])) @ p[f"blocks.{i}.mlp.down"]
    raw = rms_norm(x, p["final_norm"]) @ p["embedding"].T
    assert np.abs(raw).max() > 15
    assert model.forward(params, torch.from_numpy(tokens)).numpy() == pytest.approx(30 * np.tanh(raw / 30), rel=1e-4, abs=1e-4)


def test_the_stream_starts_at_unit_variance():
    model = build({"layer": "gla"}, {**SCALE, "width": 256}, vocab_size=500)
    stream = model.init(0)["embedding"] * 256**0.5
    assert float(stream.var()) == pytest.approx(1.0, rel=0.02)


def test_embeddings_are_tied():
    """A token that is not read still has its row in the head, and only its own logit moves with it."""
    model = build({"layer": "gla"}, SCALE, vocab_size=50)
    params, tokens = model.init(0), torch.tensor([[1, 2, 3]])
    moved = {**params, "embedding": params["embedding"].clone()}
    moved["embedding"][40] += 0.5
    change = (model.forward(moved, tokens) - model.forward(params, tokens)).abs().amax((0, 1))
    assert change[40] > 0.01 and torch.cat((change[:40], change[41:])).max() == 0


def test_logits_never_pass_the_cap():
    model = build({"layer": "gla"}, SCALE, vocab_size=50)
    params = {name: value * 50 for name, value in model.init(0).items()}
    assert model.forward(params, torch.tensor([[1, 2, 3]])).abs().max() <= 30


def test_patterns_repeat_over_the_depth():
    model = build({"pattern": [{"layer": "gla"}, {"layer": "attention"}]}, SCALE, vocab_size=50)
    assert [layer.name for layer in model.layers] == ["gla", "attention", "gla"]


def test_rope_turns_only_with_distance():
    """Attention depends on how far apart tokens are, not on where: a prefix of padding shifts nothing, and order matters."""
    model = build({"layer": "attention"}, {**SCALE, "layers": 1}, vocab_size=50)
    params = model.init(0)
    a = model.forward(params, torch.tensor([[5, 6, 7, 8]]))[0, -1]
    assert (a - model.forward(params, torch.tensor([[6, 5, 7, 8]]))[0, -1]).abs().max() > 1e-3


def test_settings_change_the_solver():
    trainer = Trainer(build({"layer": "mesa"}, SCALE, vocab_size=50), optimizer=OPTIMIZER, seed=0)
    tokens = np.random.default_rng(0).integers(0, 50, (2, 65))
    nll, info = trainer.nll(tokens)
    exact, exact_info = trainer.nll(tokens, setting={"eps": 0.0})
    none, none_info = trainer.nll(tokens, setting={"solve": False})
    one, one_info = trainer.nll(tokens, setting={"steps": 1, "eps": 0.0})
    assert 1 < info["cg_steps"] < exact_info["cg_steps"] <= 30
    assert none_info["cg_steps"] == 0 and one_info["cg_steps"] == pytest.approx(1, abs=0.1)
    assert exact_info["cg_residual"] < 1e-6 < info["cg_residual"] < 1e-4 < one_info["cg_residual"]
    assert np.abs(nll - exact).max() < 1e-3 < np.abs(none - exact).max()


def test_unsolved_mesa_is_gated_linear_attention():
    """With gamma's bound at 1 and the same weights, mesa without its solve is GLA."""
    mesa = build({"layer": "mesa", "solve": False, "forget_bound": 1.0}, SCALE, vocab_size=50)
    gla = build({"layer": "gla"}, SCALE, vocab_size=50)
    params, tokens = mesa.init(0), torch.arange(20)[None]
    shared = {name: value for name, value in params.items() if not name.endswith("lambda")}
    assert (mesa.forward(params, tokens) - gla.forward(shared, tokens)).abs().max() < 1e-5


def test_palimpsa_without_metaplasticity_is_gated_linear_attention_in_its_block(monkeypatch):
    """The same names, the same weights; the read-out's scale apart, which gla does not have."""
    plain = build({"layer": "palimpsa_d", "metaplasticity": False}, SCALE, vocab_size=50)
    gla = build({"layer": "gla", "forget_gate": "mamba", "convolve_values": True, "output_gate": True, "skip": True}, SCALE, vocab_size=50)
    params, tokens = plain.init(0), torch.arange(20)[None]
    assert set(params) == set(gla.table)
    monkeypatch.setattr(LAYERS["palimpsa_d"], "settings", lambda self: {})
    assert (plain.forward(params, tokens) - gla.forward(params, tokens)).abs().max() < 1e-5


def test_under_a_huge_prior_palimpsa_is_without_metaplasticity():
    """Mamba2's limit in the block: values of any size, as the norm takes the prior away."""
    for layer in ("palimpsa_d", "palimpsa_m"):
        models = [
            build({"layer": layer, "skip": False} | entry, SCALE, vocab_size=50)
            for entry in ({"prior": 1e6}, {"metaplasticity": False}, {})
        ]
        params, tokens = models[0].init(0), torch.arange(20)[None]
        params = {name: value * 1e13 if name.endswith("mixer.v") else value for name, value in params.items()}
        huge, plain, ordinary = (model.forward({name: params[name] for name in model.table}, tokens) for model in models)
        assert (huge - plain).abs().max() < 1e-4 < 1e-3 < (ordinary - plain).abs().max()


def test_rls_mesa_is_mesa_until_something_is_forgotten():
    """The same weights: Mesa with its gamma at 1, solved exactly."""
    rls, mesa = (
        build({"layer": "rls_mesa"}, SCALE, vocab_size=50),
        build({"layer": "mesa", "eps": 0.0, "forget_bound": 1.0}, SCALE, vocab_size=50),
    )
    params, tokens = rls.init(0), torch.arange(20)[None]
    shut = {name: mesa.table[name].init(np.random.default_rng(0), mesa.table[name].shape, 3) for name in mesa.table if name not in params}
    shut = {name: torch.from_numpy(value * 0 + (40 if name.endswith("bias") else 0)) for name, value in shut.items()}
    assert {name.rpartition(".")[2] for name in shut} == {"forget", "forget_bias"}
    assert (mesa.forward(params | shut, tokens) - rls.forward(params, tokens)).abs().max() < 1e-5


def test_a_block_may_have_no_mlp():
    model = build({"pattern": [{"layer": "palimpsa_m"}, {"layer": "gla"}]}, SCALE, vocab_size=50)
    names = [name for name in model.table if "mlp" in name]
    assert names == [f"blocks.1.{name}" for name in ("mlp_norm", "mlp.gate", "mlp.up", "mlp.down")]
    assert model.forward(model.init(0), torch.arange(5)[None]).isfinite().all()


def test_a_setting_that_no_layer_has_is_refused():
    with pytest.raises(ValueError, match="steps"):
        build({"layer": "gla"}, SCALE, vocab_size=50).with_setting({"steps": 5})
    with pytest.raises(ValueError, match="'eps'"):
        build({"layer": "mesa"}, SCALE, vocab_size=50).with_setting({"epps": 5})


def test_only_layers_with_the_option_take_a_setting():
    model = build({"pattern": [{"layer": "gla"}, {"layer": "mesa"}]}, SCALE, vocab_size=50).with_setting({"steps": 3})
    assert [getattr(layer, "steps", None) for layer in model.layers] == [None, 3, None]
