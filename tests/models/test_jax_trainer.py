"""The JAX trainer against torch's for every layer: gradients, and the same curve over 20 steps; states that each can load; exact resume."""

import numpy as np
import pytest
import torch

from models import build, build_layer
from models.backends.torch import Trainer as TorchTrainer
from models.layers import LAYERS

jax = pytest.importorskip("jax")

from models.backends import jax as backend  # noqa: E402
from models.backends.jax import Trainer  # noqa: E402

SCALE = {"layers": 1, "width": 32, "heads": 2, "key_size": 16, "mlp": 48}
OPTIMIZER = {"beta1": 0.9, "beta2": 0.98, "epsilon": 1e-5, "weight_decay": 0.1, "clip": 1.0}
ENTRIES = {name: {"layer": name} for name in LAYERS if build_layer({"layer": name}, SCALE).trainable is None}
ENTRIES |= {
    "mesa": {"layer": "mesa", "eps": 0.0},
    "hawk_mesa": {"pattern": [{"layer": "hawk"}, {"layer": "mesa", "eps": 0.0}]},
    "swa": {"layer": "attention", "window": 5},
    "gated_deltanet_block": {
        "layer": "gated_deltanet", "forget_gate": "mamba", "convolve_values": True, "output_gate": True, "value_expansion": 1.5
    },
}  # fmt: skip
MASK = np.random.default_rng(7).random((4, 24)) < 0.8


def trainer_of(name="attention", kind=Trainer, seed=0, **options):
    scale = SCALE | {"layers": len(ENTRIES[name].get("pattern", "1"))}
    model = build(ENTRIES[name], scale, vocab_size=64, backend="jax" if kind is Trainer else "torch")
    return kind(model, optimizer=OPTIMIZER, seed=seed, **options)


def batch(step=0):
    return np.random.default_rng(step).integers(0, 64, (4, 25)).astype(np.uint16)


def step(trainer, number, rate=3e-3, **options):
    return trainer.step(batch(number), learning_rate=rate, targets_mask=MASK, skip_nonfinite=True, **options)


@pytest.mark.parametrize("name", ENTRIES)
def test_gradients_and_twenty_steps_are_torchs(name):
    """Float32 on the CPU, eps 0, from weights away from their special initial values. After a step at rate 0, AdamW's mean is a tenth of
    the clipped gradient; over the curve, rounding alone parts the two, which gated layers amplify (tests/models/test_golden.py)."""
    ours, theirs = trainer_of(name), trainer_of(name, TorchTrainer)
    random = np.random.default_rng(0)
    weights = {key: value + 0.1 * random.standard_normal(value.shape).astype(np.float32) for key, value in ours.weights().items()}
    ours.load_weights(weights), theirs.load_weights(weights)
    step(ours, 50, rate=0.0), step(theirs, 50, rate=0.0)
    mine, other = ours.state_dict(), theirs.state_dict()
    largest = max(np.abs(value).max() for key, value in other.items() if key.startswith("mean/"))
    for key, value in other.items():
        if key.startswith("mean/"):
            assert np.abs(mine[key] - value).max() < 3e-4 * max(np.abs(value).max(), 1e-2 * largest), key
        elif key.startswith("parameters/"):
            assert (mine[key] == value).all(), key
    for number in range(20):
        a, b = step(ours, number), step(theirs, number)
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-4) and a["grad_norm"] == pytest.approx(b["grad_norm"], rel=2e-2)
        assert set(a) == set(b)


def test_each_goes_on_from_the_others_state():
    """Both ways, bit for bit what was given; the weights alone too."""
    ours, theirs = trainer_of(), trainer_of(kind=TorchTrainer, seed=5)
    for number in range(3):
        step(ours, number)
    theirs.load_state_dict(ours.state_dict())
    for number in (3, 4):
        assert theirs.state_dict().keys() == ours.state_dict().keys()
        assert all((value == ours.state_dict()[key]).all() for key, value in theirs.state_dict().items())
        assert step(theirs, number)["loss"] == pytest.approx(step(ours, number)["loss"], rel=1e-5)
        ours.load_state_dict(theirs.state_dict())
    again = trainer_of(seed=6)
    again.load_weights(theirs.weights())
    assert list(again.weights()) == list(theirs.weights())
    assert again.nll(batch())[0] == pytest.approx(theirs.nll(batch())[0], rel=1e-4, abs=1e-4)


def test_resume_is_exact_and_micro_batches_change_nothing():
    straight, first, second, parts = trainer_of(), trainer_of(), trainer_of(seed=3), trainer_of()
    for number in range(4):
        assert step(parts, number, micro_batch=2) == pytest.approx(step(straight, number), rel=2e-4)
    for number in range(2):
        step(first, number)
    second.load_state_dict(first.state_dict())
    for number in (2, 3):
        step(second, number)
    for key, value in straight.state_dict().items():
        assert (second.state_dict()[key] == value).all(), key


def test_a_step_that_is_not_finite_is_skipped_where_asked():
    trainer = trainer_of()
    step(trainer, 0)
    broken = trainer.state_dict() | {"parameters/final_norm": np.full(32, np.nan, np.float32)}
    trainer.load_state_dict(broken)
    assert step(trainer, 1)["finite"] == 0.0
    for key, value in trainer.state_dict().items():
        assert np.array_equal(value, broken[key], equal_nan=True), key


def test_bfloat16_activations_and_segments_are_torchs():
    """Losses of activations of eight bits, of pieces that do not see each other; without segments they are others."""
    segments = np.repeat(np.arange(2, dtype=np.int32), 12)[None].repeat(4, 0)
    ours, theirs = (trainer_of("gla", kind, precision="bfloat16") for kind in (Trainer, TorchTrainer))
    for number in range(3):
        a, b = (step(trainer, number, segments=segments)["loss"] for trainer in (ours, theirs))
        assert a == pytest.approx(b, rel=3e-3)
    (apart, _), (together, _) = (theirs.nll(batch(), segments=given) for given in (segments, None))
    assert np.abs(apart - together)[:, 12:].mean() > 0.1
    assert ours.params["embedding"].dtype == np.float32


def test_a_reference_in_float64(monkeypatch):
    """The recurrence as the paper writes it, all in float64, against the chunked form, whose blocks are computed again going backward."""
    single, curves = [step(trainer, number)["loss"] for trainer in [trainer_of("gla")] for number in range(4)], {}
    with pytest.raises(ValueError, match="JAX_ENABLE_X64"):
        trainer_of("gla", precision="float64")
    with jax.enable_x64(True):
        for kernel in ("chunked", "reference"):
            monkeypatch.setenv("STRATA_KERNELS", kernel)
            trainer = trainer_of("gla", precision="float64", rematerialise=kernel == "chunked")
            assert all(value.dtype == np.float64 for value in jax.tree.leaves(trainer.params))
            curves[kernel] = [step(trainer, number)["loss"] for number in range(4)]
    assert curves["chunked"] == pytest.approx(curves["reference"], rel=1e-11)
    assert single == pytest.approx(curves["reference"], rel=1e-5)


def test_the_step_takes_its_states_memory():
    trainer = trainer_of()
    before = jax.tree.leaves((trainer.params, trainer.moments))
    step(trainer, 0)
    assert all(value.is_deleted() for value in before) and not trainer.lost


def test_memory_errors_are_the_same_of_both(monkeypatch):
    def too_much(*given, **options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3 GiB\nand more")

    ours, theirs = trainer_of(), trainer_of(kind=TorchTrainer)
    monkeypatch.setattr(backend, "compiled", lambda *given: too_much)
    with pytest.raises(MemoryError, match="^RESOURCE_EXHAUSTED.*3 GiB$"):
        step(ours, 0)

    def too_much_for_torch(*given):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")

    monkeypatch.setattr(theirs, "_descend", too_much_for_torch)
    with pytest.raises(MemoryError, match="3 GiB"):
        step(theirs, 0)


def test_mistakes_are_named():
    trainer = trainer_of()
    with pytest.raises(ValueError, match="divisor"):
        step(trainer, 0, micro_batch=3)
    with pytest.raises(ValueError, match="float32, bfloat16"):
        trainer_of(precision="float16")
    with pytest.raises(ValueError, match="99 devices"):
        trainer_of(devices=99)
    with pytest.raises(ValueError, match="'final_norm' is not in these weights"):
        trainer.load_weights({name: value for name, value in trainer.weights().items() if name != "final_norm"})
    with pytest.raises(ValueError, match="'mean/embedding' has shape"):
        trainer.load_state_dict(trainer.state_dict() | {"mean/embedding": np.zeros((3, 32), np.float32)})
