"""The torch trainer: its loss, accumulation, exact resume, weight decay, clipping, and what a bad step does."""

import numpy as np
import pytest
import torch

from models import build
from models.backends.torch import Trainer, aside
from models.layers import LAYERS

SCALE = {"layers": 2, "width": 32, "heads": 2, "key_size": 16, "mlp": 48}
OPTIMIZER = {"beta1": 0.9, "beta2": 0.98, "epsilon": 1e-8, "weight_decay": 0.1, "clip": 1.0}
TRAINABLE = [name for name in LAYERS if build({"layer": name}, SCALE, vocab_size=32).trainable is None]


def trainer_of(name="gla", seed=0, vocab_size=64, **options):
    optimizer = OPTIMIZER | options.pop("optimizer", {})
    return Trainer(build({"layer": name}, SCALE, vocab_size=vocab_size), optimizer=optimizer, seed=seed, threads=1, **options)


def batch(step=0, rows=4, length=24, vocabulary=64):
    return np.random.default_rng(step).integers(0, vocabulary, (rows, length + 1)).astype(np.uint16)


def run(trainer, steps, start=0, **options):
    return [trainer.step(batch(step), learning_rate=3e-3, **options) for step in range(start, start + steps)]


@pytest.mark.parametrize("name", TRAINABLE)
def test_nll_is_the_loss_and_the_forward_pass_(name):
    trainer, tokens = trainer_of(name), batch()
    nll, info = trainer.nll(tokens)
    assert nll.shape == (4, 24) and nll.dtype == np.float32
    logits = trainer.model.forward(trainer.params, torch.from_numpy(tokens[:, :-1].astype(np.int64)))
    target = torch.from_numpy(tokens[:, 1:].astype(np.int64))[..., None]
    assert nll == pytest.approx(-logits.log_softmax(-1).gather(-1, target)[..., 0].detach().numpy(), rel=1e-4, abs=1e-4)
    stepped = trainer.step(tokens, learning_rate=0.0)
    assert stepped["loss"] == pytest.approx(float(nll.mean()), rel=1e-5)
    assert {key: stepped[key] for key in info} == pytest.approx(info, rel=1e-4)


@pytest.mark.parametrize("name", TRAINABLE)
def test_micro_batches_change_nothing(name):
    whole, parts, uneven = trainer_of(name), trainer_of(name), trainer_of(name)
    mask = np.random.default_rng(5).random((4, 24)) < 0.7
    for step in range(3):
        tokens = batch(step)
        a = whole.step(tokens, learning_rate=1e-3, targets_mask=mask)
        b = parts.step(tokens, learning_rate=1e-3, targets_mask=mask, micro_batch=1)
        c = uneven.step(tokens, learning_rate=1e-3, targets_mask=mask, micro_batch=3)
        for other in (b, c):
            assert other.pop("cg_residual", 0) == pytest.approx(a.get("cg_residual", 0), rel=0.02)
            assert other == pytest.approx({key: value for key, value in a.items() if key != "cg_residual"}, rel=2e-4)
    for key, value in whole.weights().items():
        assert parts.weights()[key] == pytest.approx(value, rel=1e-3, abs=2e-4), key


def test_masked_targets_carry_no_loss():
    tokens, mask = batch(), np.zeros((4, 24), bool)
    mask[1, 5:9] = True
    trainer = trainer_of()
    nll, _ = trainer.nll(tokens)
    assert trainer.step(tokens, learning_rate=0.0, targets_mask=mask)["loss"] == pytest.approx(float(nll[1, 5:9].mean()), rel=1e-5)


@pytest.mark.parametrize("name", TRAINABLE)
def test_resume_is_exact(name):
    """Four steps, a state of numpy arrays, another trainer, four more: the bits of eight in one go."""
    straight = trainer_of(name, deterministic=True)
    expected = run(straight, 8)
    first = trainer_of(name, deterministic=True)
    losses = run(first, 4)
    state = {key: value.copy() for key, value in first.state_dict().items()}
    run(first, 1, start=4)  # the state is a copy: going on does not move it
    second = trainer_of(name, seed=9, deterministic=True)
    second.load_state_dict(state)
    losses += run(second, 4, start=4)
    assert losses == expected
    for key, value in straight.state_dict().items():
        assert (second.state_dict()[key] == value).all(), key
    torch.use_deterministic_algorithms(False)


def test_a_state_of_another_model_is_refused():
    state = trainer_of("gla").state_dict()
    with pytest.raises(ValueError, match="another model"):
        trainer_of("mamba2").load_state_dict(state)
    with pytest.raises(ValueError, match="shape"):
        trainer_of("gla", vocab_size=65).load_state_dict(state)


def test_weight_decay_touches_only_what_decays():
    """At a learning rate times decay of 1, what decays is wiped out before the step; what does not moves by AdamW's first step alone."""
    trainer = trainer_of(optimizer={"weight_decay": 10.0})
    before = trainer.weights()
    trainer.step(batch(), learning_rate=0.1)
    for key, after in trainer.weights().items():
        kept = before[key] if not trainer.model.table[key].decay else 0 * before[key]
        assert np.abs(after - kept).max() <= 0.1 * (1 + 1e-4), key
    assert not trainer.model.table["embedding"].decay and trainer.model.table["blocks.0.mixer.q"].decay


def test_the_gradient_is_clipped_by_its_global_norm():
    """AdamW's first mean is 0.1 times the clipped gradient."""
    trainer = trainer_of(optimizer={"clip": 0.01})
    norm = trainer.step(batch(), learning_rate=1e-3)["grad_norm"]
    mean = [value for key, value in trainer.state_dict().items() if key.startswith("mean/")]
    assert norm > 0.1
    assert np.sqrt(sum(float((value**2).sum()) for value in mean)) == pytest.approx(0.1 * 0.01, rel=1e-4)
    free = trainer_of(optimizer={"clip": 1e6})
    free.step(batch(), learning_rate=1e-3)
    mean = [value for key, value in free.state_dict().items() if key.startswith("mean/")]
    assert np.sqrt(sum(float((value**2).sum()) for value in mean)) == pytest.approx(0.1 * norm, rel=1e-4)


def test_one_step_is_adamw_written_out():
    trainer = trainer_of()
    before = trainer.weights()
    trainer.step(batch(), learning_rate=0.0)
    gradient = {key: trainer.state_dict()[f"mean/{key}"] / 0.1 for key in before}
    other = trainer_of()
    other.step(batch(), learning_rate=1e-2)
    for key, value in other.weights().items():
        decay = 0.1 if trainer.model.table[key].decay else 0.0
        expected = before[key] * (1 - 1e-2 * decay) - 1e-2 * gradient[key] / (np.abs(gradient[key]) + 1e-8)
        assert value == pytest.approx(expected, rel=1e-4, abs=2e-4), key


def test_a_step_that_is_not_finite_is_skipped_where_asked():
    trainer = trainer_of()
    run(trainer, 2)
    state = trainer.state_dict()
    with torch.no_grad():
        kept = trainer.params["final_norm"].clone()
        trainer.params["final_norm"][0] = float("nan")
    bad = trainer.step(batch(9), learning_rate=1e-3, skip_nonfinite=True)
    with torch.no_grad():
        trainer.params["final_norm"].copy_(kept)
    assert bad["finite"] == 0.0 and np.isnan(bad["loss"])
    for key, value in trainer.state_dict().items():
        assert (value == state[key]).all(), key
    with torch.no_grad():
        trainer.params["final_norm"][0] = float("nan")
    assert trainer.step(batch(9), learning_rate=1e-3)["finite"] == 0.0
    assert np.isnan(trainer.weights()["embedding"]).any()


@pytest.mark.parametrize("name", TRAINABLE)
def test_it_learns(name):
    """Twelve steps on one batch, in float32 and with bfloat16 activations."""
    for precision in ("float32", "bfloat16"):
        trainer = trainer_of(name, precision=precision)
        losses = [trainer.step(batch(), learning_rate=1e-2)["loss"] for _ in range(12)]
        assert losses[-1] < losses[0] - 0.5


def test_segments_reach_the_layers():
    trainer, tokens = trainer_of(), batch()
    segments = np.repeat(np.arange(2, dtype=np.int32), 12)[None].repeat(4, 0)
    nll, _ = trainer.nll(tokens, segments=segments)
    alone, _ = trainer.nll(tokens[:, 12:])
    assert nll[:, 12:] == pytest.approx(alone, rel=1e-4, abs=1e-4)
    assert trainer.step(tokens, learning_rate=0.0, segments=segments)["loss"] == pytest.approx(float(nll.mean()), rel=1e-5)


def test_weights_are_by_the_tables_names():
    trainer = trainer_of()
    weights = trainer.weights()
    assert list(weights) == list(trainer.model.table)
    assert all(value.dtype == np.float32 and value.shape == trainer.model.table[key].shape for key, value in weights.items())
    weights["embedding"][:] = 0
    assert trainer.weights()["embedding"].any()


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="float32, bfloat16"):
        trainer_of(precision="float16")


def test_what_is_computed_aside_leaves_torch_as_deterministic_as_it_was():
    torch.use_deterministic_algorithms(True)
    try:
        with aside():
            assert not torch.are_deterministic_algorithms_enabled() and not torch.is_grad_enabled()
        assert torch.are_deterministic_algorithms_enabled() and torch.is_grad_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
