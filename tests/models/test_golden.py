"""Identity versions against stored curves: the loss over 20 steps of each layer, at a tiny size, on the CPU in float32.

A curve may differ from the stored one by a relative 2e-4, which covers other processors and library versions. Gated layers amplify
rounding: RMSNorm(o) turns over where k . q passes 0. At this learning rate, weights changed by 1e-6 move the curves by at most 1.6e-4
(mamba2; attention and hawk: 2e-7), sums in another order by a tenth of that; at 1e-2 both reach 1 %. When a change of numbers is meant, raise the layer's version (or the backbone's) in
stages/versions.yaml and store the new curve: `python tests/models/test_golden.py LAYER` (all layers' without a name).
"""

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from models import build
from models.layers import LAYERS

FOLDER = Path(__file__).parent / "golden"
VERSIONS = Path(__file__).parents[2] / "stages" / "versions.yaml"
TOLERANCE = 2e-4
SCALE = {"layers": 2, "width": 32, "heads": 2, "key_size": 16, "mlp": 64}
OPTIMIZER = {"beta1": 0.9, "beta2": 0.98, "epsilon": 1e-5, "weight_decay": 0.1, "clip": 1.0}


def versions(name: str) -> dict[str, int]:
    """What the curve of a layer depends on, as the version table has it."""
    table = yaml.safe_load(VERSIONS.read_text())
    return {"backbone": table["model"]["backbone"], "layer": table["layers"][name]}


def curve(name: str) -> list[float]:
    """Losses of 20 steps on sequences that repeat themselves, so that there is something to recall."""
    from models.backends.torch import Trainer

    random = np.random.default_rng(0)
    trainer = Trainer(build({"layer": name}, SCALE, vocab_size=64), optimizer=OPTIMIZER, seed=0, threads=1)
    losses = []
    for step in range(20):
        half = random.integers(0, 64, (4, 24))
        losses.append(trainer.step(np.concatenate([half, half, half[:, :1]], 1), learning_rate=3e-3 * min(1, (step + 1) / 5))["loss"])
    return losses


@pytest.mark.parametrize("name", LAYERS)
def test_the_curve_is_the_stored_one(name):
    stored = json.loads((FOLDER / f"{name}.json").read_text())
    assert stored["versions"] == versions(name), f"the version of {name} changed: store its curve, `python {Path(__file__).name}`"
    assert curve(name) == pytest.approx(stored["losses"], rel=TOLERANCE), (
        f"{name} computes other numbers than its version stands for: raise it in stages/versions.yaml and store the curve, "
        f"`python {Path(__file__).name}`, or find what moved them"
    )


def test_curves_tell_layers_apart():
    """The tolerance is far below what any two layers differ by."""
    curves = [np.array(json.loads((FOLDER / f"{name}.json").read_text())["losses"]) for name in LAYERS]
    for a, b in itertools.combinations(curves, 2):
        assert np.abs(a / b - 1).max() > 10 * TOLERANCE


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for layer in sys.argv[1:] or LAYERS:
        record = {"versions": versions(layer), "losses": [round(loss, 6) for loss in curve(layer)]}
        (FOLDER / f"{layer}.json").write_text(json.dumps(record, indent=1) + "\n")
