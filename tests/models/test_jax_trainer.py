"""The JAX trainer against torch's: the same curve over 20 steps, states that each can load, exact resume, accumulation."""

import numpy as np
import pytest

from models import build
from models.backends.torch import Trainer as TorchTrainer

jax = pytest.importorskip("jax")

from models.backends.jax import Trainer  # noqa: E402

SCALE = {"layers": 1, "width": 32, "heads": 2, "key_size": 16, "mlp": 48}
OPTIMIZER = {"beta1": 0.9, "beta2": 0.98, "epsilon": 1e-5, "weight_decay": 0.1, "clip": 1.0}


def trainer_of(kind=Trainer, seed=0, **entry):
    return kind(
        build(entry or {"layer": "gla"}, SCALE, vocab_size=64, backend="jax" if kind is Trainer else "torch"),
        optimizer=OPTIMIZER,
        seed=seed,
    )


def batch(step=0):
    return np.random.default_rng(step).integers(0, 64, (4, 25)).astype(np.uint16)


@pytest.mark.parametrize(
    "entry", [{"layer": "attention"}, {"layer": "gla"}, {"layer": "mesa", "eps": 0.0}], ids=lambda entry: entry["layer"]
)
def test_twenty_steps_are_torchs(entry):
    """Float32 on the CPU, eps 0; rounding alone parts them (tests/models/test_golden.py)."""
    ours, theirs = trainer_of(**entry), trainer_of(TorchTrainer, **entry)
    mask = np.random.default_rng(7).random((4, 24)) < 0.8
    for step in range(20):
        options = {"learning_rate": 3e-3, "targets_mask": mask}
        a, b = ours.step(batch(step), **options), theirs.step(batch(step), **options)
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-4) and a["grad_norm"] == pytest.approx(b["grad_norm"], rel=2e-2)
        assert set(a) == set(b)
    a, b = ours.nll(batch(99))[0], theirs.nll(batch(99))[0]
    assert np.abs(a - b).mean() < 1e-3


def test_each_goes_on_from_the_others_state():
    ours, theirs = trainer_of(), trainer_of(TorchTrainer, seed=5)
    for step in range(3):
        ours.step(batch(step), learning_rate=3e-3)
    theirs.load_state_dict(ours.state_dict())
    for key, value in theirs.state_dict().items():
        assert (value == ours.state_dict()[key]).all(), key
    assert theirs.step(batch(3), learning_rate=3e-3)["loss"] == pytest.approx(ours.step(batch(3), learning_rate=3e-3)["loss"], rel=1e-5)
    again = trainer_of(seed=6)
    again.load_weights(theirs.weights())
    assert again.nll(batch())[0] == pytest.approx(theirs.nll(batch())[0], rel=1e-4, abs=1e-4)


def test_resume_is_exact_and_micro_batches_change_nothing():
    straight, first, second, parts = trainer_of(), trainer_of(), trainer_of(seed=3), trainer_of()
    for step in range(4):
        expected = straight.step(batch(step), learning_rate=1e-3)
        assert parts.step(batch(step), learning_rate=1e-3, micro_batch=2) == pytest.approx(expected, rel=2e-4)
    for step in range(2):
        first.step(batch(step), learning_rate=1e-3)
    second.load_state_dict(first.state_dict())
    for step in (2, 3):
        second.step(batch(step), learning_rate=1e-3)
    for key, value in straight.state_dict().items():
        assert (second.state_dict()[key] == value).all(), key
    with pytest.raises(ValueError, match="divisor"):
        parts.step(batch(), learning_rate=1e-3, micro_batch=3)


def test_a_step_that_is_not_finite_is_skipped_where_asked():
    trainer = trainer_of()
    trainer.step(batch(), learning_rate=1e-3)
    broken = trainer.state_dict() | {"parameters/final_norm": np.full(32, np.nan, np.float32)}
    trainer.load_state_dict(broken)
    assert trainer.step(batch(1), learning_rate=1e-3, skip_nonfinite=True)["finite"] == 0.0
    for key, value in trainer.state_dict().items():
        assert np.array_equal(value, broken[key], equal_nan=True), key
