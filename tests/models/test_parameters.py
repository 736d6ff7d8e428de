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
MILLIONS = {  # spec/mesanet.md section 2, at vocabulary 50,257
    "attention": ("145.97", "433.20", "936.07"),
    "mesa": ("146.20", "433.95", "937.53"),
    "hawk": ("148.35", "437.72", "937.33"),
    "mamba2": ("146.13", "433.69", "936.97"),
    "deltanet": ("146.13", "433.69", "936.97"),
    "gla": ("146.19", "433.92", "937.49"),
    "gated_deltanet": ("146.19", "433.92", "937.49"),
    "mlstm": ("146.19", "433.92", "937.49"),
    "hawk_mesa": ("147.28", "435.83", "937.43"),
}
INITIAL = (0.04456978, 0.5013487, 0.1987742, 0.19840294)
TINY = {"layers": 2, "width": 64, "heads": 2, "key_size": 32, "mlp": 96}


@pytest.mark.parametrize("name", MILLIONS)
def test_counts_are_the_papers(name):
    counts = tuple(f"{build(MODELS[name], scale, vocab_size=50257).parameters / 1e6:.2f}" for scale in SCALES.values())
    assert counts == MILLIONS[name]


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


def test_weight_decay_leaves_out_embeddings_norms_biases_and_scalars():
    for name in LAYERS:
        for key, parameter in build({"layer": name}, TINY, vocab_size=32).table.items():
            plain = key.rpartition(".")[2]
            excluded = plain == "embedding" or "norm" in plain or plain.endswith("bias") or plain in ("lambda", "decay")
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
        ({"layer": "attention", "window": 0}, {}, "window is 0"),
        ({"pattern": []}, {}, "pattern"),
        ({"layers": "mesa"}, {}, "names its `layer`"),
        ({"layer": "mesa"}, {"width": 0}, "`width`"),
        ({"layer": "mesa"}, {"widht": 3}, "did you mean 'width'"),
        ({"layer": "hawk"}, {"width": 66, "heads": 4}, "do not divide"),
    ],
)
def test_mistakes_are_named(model, scale, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        build(model, TINY | scale, vocab_size=32)


def test_unknown_backend_is_named():
    with pytest.raises(ValueError, match="did you mean 'torch'"):
        build({"layer": "gla"}, TINY, vocab_size=32, backend="troch")
