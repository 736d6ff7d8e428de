"""A training step whose layers run as Pallas' kernels, interpreted, is the step of the array forms: inside scan, shard_map and jit."""

import numpy as np
import pytest

import kernels
from models import build

jax = pytest.importorskip("jax")

from models.backends.jax import Trainer  # noqa: E402

OPTIMIZER = {"beta1": 0.9, "beta2": 0.98, "epsilon": 1e-5, "weight_decay": 0.1, "clip": 1.0}
ENTRIES = {"gla": "linear_attention", "mesa": "mesa", "gated_deltanet": "delta_rule", "hawk": "rg_lru"}


def gradients(name: str) -> dict[str, np.ndarray]:
    """AdamW's mean after a step at rate 0: a tenth of the clipped gradient."""
    model = build({"layer": name}, {"layers": 2, "width": 32, "heads": 2, "key_size": 16, "mlp": 48}, vocab_size=64, backend="jax")
    trainer = Trainer(model, optimizer=OPTIMIZER, seed=0)
    random = np.random.default_rng(0)
    trainer.load_weights({key: value + 0.1 * random.standard_normal(value.shape) for key, value in trainer.weights().items()})
    trainer.step(random.integers(0, 64, (2, 25)).astype(np.uint16), learning_rate=0.0)
    return {key: value for key, value in trainer.state_dict().items() if key.startswith("mean/")}


@pytest.mark.parametrize("name", [name if name == "mesa" else pytest.param(name, marks=pytest.mark.slow) for name in ENTRIES])
def test_a_step_of_pallas_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = gradients(name)
    monkeypatch.setitem(kernels.PREFERENCE, "cpu", ("pallas", *kernels.PREFERENCE["cpu"]))
    monkeypatch.setattr(kernels, "_chosen", {})
    jax.clear_caches()  # what was traced for the array forms
    ours = gradients(name)
    jax.clear_caches()
    assert kernels.chosen()[ENTRIES[name]] == "pallas"
    largest = max(np.abs(value).max() for value in arrays.values())
    for key, value in arrays.items():
        assert np.abs(ours[key] - value).max() < 3e-4 * max(np.abs(value).max(), 1e-2 * largest), key
