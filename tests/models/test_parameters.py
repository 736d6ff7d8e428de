"""Parameter counts against the papers', initial values, and names."""

import math
import subprocess
import sys

import numpy as np
import pytest

from models import build
from models.layers import LAYERS
from models.parameters import Parameter, fan_in, initialise

SCALES = {
    "140m": {"layers": 14, "width": 768, "heads": 6, "key_size": 128, "mlp": 2304},
    "440m": {"layers": 28, "width": 1024, "heads": 8, "key_size": 128, "mlp": 3072},
    "1b": {"layers": 28, "width": 1536, "heads": 12, "key_size": 128, "mlp": 4608},
}
MODELS = {name: {"layer": name} for name in LAYERS} | {"hawk_mesa": {"pattern": [{"layer": "hawk"}, {"layer": "mesa"}]}}
MILLIONS = {  # of the sizes in MesaNet (arXiv 2506.05233), G.2, the scales of its Table 8, at vocabulary 50,257
    "attention": ("145.97", "433.20", "936.07"),
    "mesa": ("146.20", "433.95", "937.53"),
    "hawk": ("148.35", "437.72", "937.33"),
    "mamba2": ("146.13", "433.69", "936.97"),
    "deltanet": ("146.13", "433.69", "936.97"),
    "gla": ("146.19", "433.92", "937.49"),
    "gated_deltanet": ("146.19", "433.92", "937.49"),
    "mlstm": ("146.19", "433.92", "937.49"),
    "rls_mesa": ("146.14", "433.72", "937.01"),  # Mesa's without a forget gate
    "hawk_mesa": ("147.28", "435.83", "937.43"),
}
BLOCK = {"forget_gate": "mamba", "convolve_values": True, "output_gate": True}
SECOND = {  # layers, width, heads, key size, MLP, and millions at vocabulary 32,000 (Palimpsa, arXiv 2602.09075, and its code)
    "D 170M": ({"layer": "palimpsa_d"}, (19, 768, 16, 48, 2048), 172),
    "D 170M expanded": ({"layer": "palimpsa_d", "value_expansion": 2}, (19, 768, 16, 48, 2048), 207),
    "D 760M": ({"layer": "palimpsa_d", "value_expansion": 2}, (19, 1536, 16, 96, 4096), 776),
    "M 170M": ({"layer": "palimpsa_m"}, (30, 768, 16, 48, 1), 170),
    "M 760M": ({"layer": "palimpsa_m"}, (38, 1536, 16, 96, 1), 785),
    "Gated DeltaNet 760M": ({"layer": "gated_deltanet", **BLOCK}, (23, 1536, 16, 96, 4096), 756),
    "Transformer++ 170M": ({"layer": "attention"}, (20, 768, 16, 48, 2048), 166),
}
INITIAL = (0.04456978, 0.5013487, 0.1987742, 0.19840294)
TINY = {"layers": 2, "width": 64, "heads": 2, "key_size": 32, "mlp": 96}


@pytest.mark.parametrize("name", MILLIONS)
def test_counts_are_the_papers(name):
    counts = tuple(f"{build(MODELS[name], scale, vocab_size=50257).parameters / 1e6:.2f}" for scale in SCALES.values())
    assert counts == MILLIONS[name]


@pytest.mark.parametrize("name", SECOND)
def test_counts_are_the_second_papers(name):
    model, sizes, millions = SECOND[name]
    scale = dict(zip(("layers", "width", "heads", "key_size", "mlp"), sizes, strict=True))
    assert round(build(model, scale, vocab_size=32000).parameters / 1e6) == millions


def test_palimpsa_m_by_hand():
    d, h, n, blocks, vocabulary = 768, 16, 48, 30, 32000
    inner, rank = 2 * d, d // 16
    mixer = d * (2 * inner + 2 * h * n + h) + inner * d + 5 * (inner + 2 * h * n) + rank * (d + inner) + inner + 4 * h
    scale = {"layers": blocks, "width": d, "heads": h, "key_size": n, "mlp": 1}
    assert build({"layer": "palimpsa_m"}, scale, vocab_size=vocabulary).parameters == vocabulary * d + blocks * (mixer + d) + d
    plain = build({"layer": "palimpsa_m", "metaplasticity": False}, scale, vocab_size=vocabulary)
    assert plain.parameters == vocabulary * d + blocks * (mixer - rank * (d + inner) - h + d) + d


def test_palimpsa_starts_as_its_code_does():
    """Step sizes in [1e-3, 1e-1], rates up to 16, softplus(1) on beta, a skip of 1, the beta branch's second matrix uniform."""
    values = initialise(build({"layer": "palimpsa_d"}, TINY | {"heads": 64, "key_size": 8}, vocab_size=32).table, seed=0, blocks=2)
    p = {name.removeprefix("blocks.0.mixer."): value for name, value in values.items()}
    step, rate = np.log1p(np.exp(p["forget_bias"].astype(float))), np.exp(p["forget_rate"])
    assert 1e-3 <= step.min() < 2e-3 and 5e-2 < step.max() <= 1e-1 and 0 < rate.min() < 1 and 12 < rate.max() <= 16
    assert (p["beta_scale"] == 1).all() and (p["skip"] == 1).all() and p["beta_in"].shape == (64, 4)
    assert 0.45 < np.abs(p["beta_out"]).max() <= 0.5 and p["beta_out"].std() == pytest.approx(0.5 / 3**0.5, rel=0.05)


def test_mesa_by_hand():
    d, h, n, blocks, vocabulary = 768, 6, 128, 14, 50257
    mixer = 4 * d * h * n + 2 * (d * h + h) + 2 * 4 * h * n + h * n + h * n
    assert (
        build({"layer": "mesa"}, SCALES["140m"], vocab_size=vocabulary).parameters
        == vocabulary * d + blocks * (mixer + 9 * d * d + 2 * d) + d
    )


@pytest.mark.parametrize("name", LAYERS)
def test_every_parameter_starts_as_said(name):
    """Fan-in normal, 2 / blocks on what writes to the stream, named exceptions; all reproducible."""
    model = build({"layer": name}, TINY | {"layers": 8}, vocab_size=512)
    values = initialise(model.table, seed=3, blocks=8)
    assert set(values) == set(model.table)
    for key, value in values.items():
        assert value.dtype == np.float32 and value.shape == model.table[key].shape and np.isfinite(value).all(), key

    def deviation(ending):
        return np.std(np.concatenate([value.ravel() for key, value in values.items() if key.endswith(ending)]))

    assert deviation("embedding") == pytest.approx(64**-0.5, rel=0.02)
    assert any("mlp" in key for key in values) is LAYERS[name].mlp
    if LAYERS[name].mlp:
        assert deviation("mlp.gate") == pytest.approx(64**-0.5, rel=0.02)
        assert deviation("mlp.down") == pytest.approx((2 / 8 / 96) ** 0.5, rel=0.02)
    fan = values["blocks.0.mixer.out"].shape[0]
    assert deviation("mixer.out") == pytest.approx((2 / 8 / fan) ** 0.5, rel=0.02)
    assert deviation("mixer.x" if name == "hawk" else "mixer.q") == pytest.approx(64**-0.5, rel=0.02)


def test_mesa_starts_with_unit_lambda_and_even_gates():
    values = initialise(build({"layer": "mesa"}, TINY, vocab_size=32).table, seed=0, blocks=2)
    assert 0.25 + np.log1p(np.exp(values["blocks.0.mixer.lambda"])) == pytest.approx(1.0, abs=1e-6)
    assert not values["blocks.0.mixer.forget_bias"].any() and not values["blocks.0.mixer.write_bias"].any()


def test_hawk_starts_with_slow_decays():
    decay = initialise(build({"layer": "hawk"}, TINY, vocab_size=32).table, seed=0, blocks=2)["blocks.0.mixer.decay"]
    a = np.exp(-8 * np.log1p(np.exp(decay)))
    assert 0.9 <= a.min() and a.max() <= 0.999 and a.std() > 0.02


def test_adding_a_parameter_changes_no_other():
    table = {name: Parameter((4, 5), fan_in, axes=("a", "b")) for name in ("one", "two")}
    before, after = initialise(table, seed=1, blocks=2), initialise({"zero": table["one"], **table}, seed=1, blocks=2)
    assert all((before[name] == after[name]).all() for name in before)
    assert not (after["zero"] == after["one"]).any()
    assert not (initialise(table, seed=2, blocks=2)["one"] == before["one"]).any()


SCALARS = ("lambda", "decay", "forget_rate", "skip", "beta_scale")


def test_weight_decay_leaves_out_embeddings_norms_biases_and_scalars():
    for name in LAYERS:
        for key, parameter in build({"layer": name}, TINY, vocab_size=32).table.items():
            plain = key.rpartition(".")[2]
            excluded = plain == "embedding" or "norm" in plain or plain.endswith("bias") or plain in SCALARS
            assert parameter.decay is not excluded, key


def test_initial_values_stay():
    """Streams are part of identity: these numbers moving means every study starts elsewhere."""
    value = initialise({"blocks.0.mixer.q": Parameter((2, 2), fan_in, axes=("a", "b"))}, seed=0, blocks=1)["blocks.0.mixer.q"]
    assert value.ravel() == pytest.approx(INITIAL, abs=1e-6)


def test_axes_name_every_dimension_and_sizes_agree():
    for name in LAYERS:
        table = build({"layer": name}, SCALES["140m"], vocab_size=50257).table
        assert all(
            len(parameter.axes) == len(parameter.shape) and math.prod(parameter.shape) == parameter.size for parameter in table.values()
        )


def test_tables_need_no_framework():
    code = (
        "import sys, models, models.layers\n"
        "for name in models.layers.LAYERS:\n"
        "    m = models.build({'layer': name}, dict(layers=14, width=768, heads=6, key_size=128, mlp=2304), vocab_size=50257)\n"
        "    m.parameters, m.flops(2048, training=True), m.state_floats(2048)\n"
        "assert not {'torch', 'jax'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "model, scale, message",
    [
        ({"layer": "messa"}, {}, "did you mean 'mesa'"),
        ({"layer": "mesa", "step": 3}, {}, "did you mean 'steps'"),
        ({"layer": "mesa", "steps": "many"}, {}, "default, 30"),
        ({"layer": "mesa", "steps": -1}, {}, "negative"),
        ({"layer": "mesa", "steps": True}, {}, "default, 30"),
        ({"layer": "mesa", "criterion": "r1"}, {}, "'b' or 'r0'"),
        ({"layer": "mesa", "gradient": "exact"}, {}, "'implicit' or 'unrolled'"),
        ({"layer": "attention", "window": 0}, {}, "window is 0"),
        ({"pattern": []}, {}, "pattern"),
        ({"layers": "mesa"}, {}, "names its `layer`"),
        ({"layer": "mesa"}, {"width": 0}, "`width`"),
        ({"layer": "mesa"}, {"widht": 3}, "did you mean 'width'"),
        ({"layer": "gla", "forget_gate": "mambo"}, {}, "'sigmoid' or 'mamba'"),
        ({"layer": "deltanet", "forget_gate": "mamba"}, {}, "forgets nothing"),
        ({"layer": "rls_mesa", "forget_gate": "mamba"}, {}, "forgets nothing"),
        ({"layer": "rls_mesa", "forget_minimum": 0}, {}, "forget_minimum is 0"),
        ({"layer": "gla", "value_expansion": 1.3}, {}, "whole number"),
        ({"layer": "palimpsa_d", "rank": 0}, {}, "rank is 0"),
        ({"layer": "palimpsa_d", "prior": 0}, {}, "prior is 0"),
        ({"layer": "palimpsa_m", "groups": 3}, {}, "groups is 3"),
        ({"layer": "palimpsa_m", "forget_gate": "sigmoid"}, {}, "must be 'mamba'"),
        ({"layer": "palimpsa_d", "metaplasticty": False}, {}, "did you mean 'metaplasticity'"),
        ({"layer": "hawk"}, {"width": 66, "heads": 4}, "do not divide"),
    ],
)
def test_mistakes_are_named(model, scale, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        build(model, TINY | scale, vocab_size=32)


def test_unknown_backend_is_named():
    with pytest.raises(ValueError, match="did you mean 'torch'"):
        build({"layer": "gla"}, TINY, vocab_size=32, backend="troch")
