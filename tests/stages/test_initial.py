"""Fine-tuning: where a training starts from, which layers it replaces, and that nothing of this is lost on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import models
from models import checkpoint
from models.windows import longest, memory_windows
from stages import artifact, engine, evaluate, initial, schemas, train
from stages.initial import replaced, taken
from stages.rows import Rows
from stages.spec import Spec, Stopped
from stages.training import Replace
from tests.stages.small_study import BOS, GLA, LENGTH, SCALE, VOCABULARY, context, evaluate_spec, key_of, make_packed, notes, train_spec

DEEP = SCALE | {"layers": 3}
PALIMPSA = {"layer": "palimpsa_d", "beta_start": "uniform"}
PLAIN = {"layer": "palimpsa_d", "metaplasticity": False}


@pytest.fixture(scope="module")
def budget(tmp_path_factory) -> Path:
    return make_packed(tmp_path_factory.mktemp("study") / "packed")


@pytest.fixture(scope="module")
def source(tmp_path_factory, budget) -> tuple[Spec, Path]:
    """(spec, artifact) of a plain Palimpsa-D."""
    spec, out = train_spec(model=PLAIN, steps=6), tmp_path_factory.mktemp("source")
    train.run(spec, out, {"budget": budget}, context()[0])
    return spec, out


def tuned_spec(source: Spec, *, drop: list[str] | None = None, replace: dict[str, Any] | None = None, **changes: Any) -> Spec:
    spec = train_spec(**{"model": source.parameters["model"], "scale": source.parameters["scale"], "steps": 6, **changes})
    spec.parameters["init"] = {"drop": drop or [], "replace": replace}
    return spec.model_copy(update={"inputs": spec.inputs | {"initial": source.key}})


def tune(spec: Spec, out: Path, budget: Path, source: Path, **changes: Any) -> list[dict[str, Any]]:
    out.mkdir(exist_ok=True)
    given, lines = context(**changes)
    train.run(spec, out, {"budget": budget, "initial": source}, given)
    return lines


def weights(out: Path) -> dict[str, np.ndarray]:
    return checkpoint.load(out / train.WEIGHTS)[0]


def started_with(spec: Spec, tmp_path: Path, budget: Path, source: Path) -> dict[str, np.ndarray]:
    """The weights that a training of `spec` begins with: those of a run stopped before its first step."""
    with pytest.raises(Stopped):
        tune(spec, tmp_path / "begun", budget, source, stop_requested=lambda: True)
    state = checkpoint.load(tmp_path / "begun" / "checkpoints" / "00000000.safetensors")[0]
    return {name.removeprefix("parameters/"): array for name, array in state.items() if name.startswith("parameters/")}


def provenance(out: Path) -> dict[str, Any]:
    return json.loads((out / "provenance.json").read_text())["initial"]


def test_a_tuned_run_starts_with_the_loss_that_its_source_ended_with(tmp_path, budget, source):
    before, folder = source
    tune(tuned_spec(before), tmp_path / "out", budget, folder)
    model = models.build(PLAIN, SCALE, vocab_size=VOCABULARY)
    trainer = engine.trainer(model, context()[0], device="cpu", precision="float32")
    trainer.load_weights(weights(folder))
    tokens_BT1 = Rows(budget).read(0, 4)[0].astype(np.int32)
    wanted = trainer.nll(tokens_BT1)[0][tokens_BT1[:, 1:] != BOS].mean()
    first = schemas.read(tmp_path / "out" / train.HISTORY, "history").to_pylist()[0]
    assert first["step"] == 1 and first["loss"] == pytest.approx(wanted, rel=1e-5)
    assert artifact.read(tmp_path / "out")["inputs"]["initial"] == artifact.read(folder)["digest"]
    said = provenance(tmp_path / "out")
    assert set(said["copied"]) == set(weights(folder)) and said["fresh"] == said["left"] == []


def test_what_is_dropped_or_new_starts_as_from_nothing(tmp_path, budget, source):
    before, folder = source
    spec = tuned_spec(before, model=PALIMPSA, drop=["*.mixer.write*"])
    begun, old = started_with(spec, tmp_path, budget, folder), weights(folder)
    new = models.build(PALIMPSA, SCALE, vocab_size=VOCABULARY).init(0)
    fresh = {name for name in begun if "write" in name or "beta_" in name}
    assert len(fresh) == 5
    for name, value in begun.items():
        assert np.array_equal(value, new[name].numpy() if name in fresh else old[name]), name
    scale = begun["blocks.0.mixer.beta_scale"]
    assert (scale >= 0.1).all() and (scale <= 1).all() and len(set(scale.tolist())) == 2
    tune(spec, tmp_path / "begun", budget, folder)
    said = provenance(tmp_path / "begun")
    assert set(said["fresh"]) == fresh and set(said["copied"]) == set(begun) - fresh
    assert set(said["left"]) == {name for name in old if "write" in name}


def test_another_shape_is_named(tmp_path, budget, source):
    before, folder = source
    with pytest.raises(ValueError, match=r"'blocks.0.mixer.q_conv' has shape \(4, 16\) in the source and \(2, 16\).*drop: \['\*.q_conv'\]"):
        tune(tuned_spec(before, model=PLAIN | {"convolution": 2}), tmp_path / "out", budget, folder)
    tune(tuned_spec(before, model=PLAIN | {"convolution": 2}, drop=["*_conv"]), tmp_path / "out", budget, folder)


def test_drop_by_hand():
    model, source = {"a.x": (2,), "a.y": (2,), "b.z": (3,)}, {"a.x": (2,), "a.y": (9,), "c": (1,)}
    found = taken(model, source, ["*.y"])
    assert (found.copied, found.fresh, found.left) == (["a.x"], ["a.y", "b.z"], ["a.y", "c"])
    with pytest.raises(ValueError, match="'d\\*' means no parameter"):
        taken(model, source, ["*.y", "d*"])


def test_a_source_of_another_key_or_damaged_is_refused(tmp_path, budget, source):
    before, folder = source
    spec = tuned_spec(before)
    other = spec.model_copy(update={"inputs": spec.inputs | {"initial": key_of("another")}})
    with pytest.raises(ValueError, match="was made under key"):
        tune(other, tmp_path / "out", budget, folder)
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    data = bytearray((copy / train.WEIGHTS).read_bytes())
    data[-3] ^= 1
    (copy / train.WEIGHTS).write_bytes(data)
    with pytest.raises(ValueError, match="does not hold the data"):
        tune(spec, tmp_path / "out", budget, copy)
    with pytest.raises(ValueError, match="--input initial="):
        train.run(spec, tmp_path / "out", {"budget": budget}, context()[0])


def test_another_key_of_the_source_is_another_key(source):
    before, _ = source
    assert tuned_spec(before).key != tuned_spec(train_spec(model=PLAIN, steps=6, seed=1)).key


# Layers that are replaced

REPLACE = {"count": 1, "by": "memory_window", "layer": {"layer": "palimpsa_d"}}


@pytest.fixture(scope="module", params=[0, 1, 2])
def remembering(request, tmp_path_factory, budget) -> tuple[Spec, Path, int]:
    """(spec, artifact, layer) of three plain layers, of which one was set to remember longest."""
    spec, out = train_spec(model=PLAIN, scale=DEEP, steps=2), tmp_path_factory.mktemp("remembering")
    train.run(spec, out, {"budget": budget}, context()[0])
    arrays = weights(out)
    for index in range(3):
        arrays[f"blocks.{index}.mixer.forget"][:] = 0
        arrays[f"blocks.{index}.mixer.forget_rate"][:] = 0
        arrays[f"blocks.{index}.mixer.forget_bias"][:] = -5 if index == request.param else -2  # a step of 0.0067, and of 0.13
    checkpoint.save(out / train.WEIGHTS, arrays, {"key": spec.key, "step": "2"})
    artifact.write(out, key=spec.key, stage="train", files=[train.WEIGHTS], inputs={})
    return spec, out, request.param


def test_the_layer_that_remembers_longest_is_replaced(tmp_path, budget, remembering):
    before, folder, longest_one = remembering
    spec, out = tuned_spec(before, replace=REPLACE), tmp_path / "out"
    tune(spec, out, budget, folder)
    said = provenance(out)
    assert said["replaced"] == [longest_one]
    step = [np.log1p(np.exp(-5.0 if index == longest_one else -2.0)) for index in range(3)]
    assert said["windows"] == pytest.approx([1 / (1 - np.exp(-value)) for value in step], rel=1e-4)
    assert (
        {name for name in weights(out) if "beta" in name}
        == {f"blocks.{longest_one}.mixer.beta_{what}" for what in ("in", "out", "scale")}
        == set(said["fresh"])
    )
    record = artifact.read(out, content=True)
    assert sorted(record["files"]) == [initial.MODEL, train.WEIGHTS]
    entry = json.loads((out / initial.MODEL).read_text())["model"]
    assert entry == replaced(PLAIN, 3, [longest_one], REPLACE["layer"])
    planned = models.build(initial.stand_in(PLAIN, 3, Replace(**REPLACE)), DEEP, vocab_size=VOCABULARY)
    assert planned.parameters == sum(array.size for array in weights(out).values())

    again = tmp_path / "again"
    tune(spec, again, budget, folder)
    assert artifact.read(again)["digest"] == record["digest"]

    asked = evaluate_spec(weights=spec, sets=[], lengths=[LENGTH])
    evaluate.run(asked, tmp_path / "scores", {"weights": out, "validation": budget.parent.parent / "validation"}, context()[0])
    assert schemas.read(tmp_path / "scores" / "perplexity.parquet", "perplexity")["nll"].to_pylist()[0] > 0


def test_the_choice_is_kept_when_a_run_goes_on(tmp_path, budget, remembering, monkeypatch):
    before, folder, longest_one = remembering
    spec = tuned_spec(before, replace=REPLACE)
    tune(spec, tmp_path / "undisturbed", budget, folder)
    polls = iter(range(100))
    with pytest.raises(Stopped):
        tune(spec, tmp_path / "first", budget, folder, stop_requested=lambda: next(polls) >= 3)
    monkeypatch.setattr(initial, "_choose", lambda *_: pytest.fail("chosen anew"))
    lines = tune(spec, tmp_path / "second", budget, folder, resume_from=[tmp_path / "first"])
    assert "from step 3" in notes(lines)
    assert artifact.read(tmp_path / "second")["digest"] == artifact.read(tmp_path / "undisturbed")["digest"]
    assert provenance(tmp_path / "second")["replaced"] == [longest_one]


def test_a_source_of_another_layer_has_no_windows_to_go_by(tmp_path, budget, remembering):
    before, folder, _ = remembering
    with pytest.raises(ValueError, match="do not fit this model before its layers are replaced"):
        tune(tuned_spec(before, model=GLA, replace=REPLACE), tmp_path / "out", budget, folder)


def test_longest_by_hand():
    assert longest([3.0, float("inf"), 3.0, 1.0], 2) == [0, 1]
    assert longest([1.0, 2.0, 4.0, 3.0], 2) == [2, 3]


@pytest.mark.parametrize("layer", [{"layer": "gla"}, {"layer": "mesa"}, {"layer": "rls_mesa", "forget_minimum": 0.9}, PLAIN])
def test_windows_are_of_the_gamma_that_the_operation_gets(layer, monkeypatch):
    model = models.build(layer, DEEP, vocab_size=VOCABULARY)
    tokens_BT = np.random.default_rng(0).integers(1, VOCABULARY, (2, LENGTH))
    kind, gammas = type(model.layers[0]), []

    def operands(self: Any, *given: Any, **options: Any) -> Any:
        found = original(self, *given, **options)
        gammas.append(np.exp(found[0].double().numpy()))  # log gamma [B, T, H] comes first in all of these
        return found

    original = kind.operands
    monkeypatch.setattr(kind, "operands", operands)
    windows = memory_windows(model, model.init(3), tokens_BT)
    assert windows == pytest.approx([np.median(1 / (1 - gamma)) for gamma in gammas], rel=1e-5) and len(windows) == 3


def test_windows_are_the_same_under_jax():
    pytest.importorskip("jax")
    tokens_BT = np.random.default_rng(0).integers(1, VOCABULARY, (2, LENGTH))
    both = [models.build(GLA, DEEP, vocab_size=VOCABULARY, backend=backend) for backend in ("torch", "jax")]
    expected, found = (memory_windows(model, model.init(3), tokens_BT) for model in both)
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_layers_are_replaced_under_jax_too(tmp_path, budget, remembering):
    pytest.importorskip("optax")
    before, folder, longest_one = remembering
    spec = tuned_spec(before, replace=REPLACE, steps=2, warmup_steps=0)
    tune(spec, tmp_path / "jax", budget, folder, settings={"backend": "jax"})
    tune(spec, tmp_path / "torch", budget, folder)
    assert provenance(tmp_path / "jax")["replaced"] == [longest_one]
    losses = [[row["loss"] for row in schemas.read(tmp_path / name / train.HISTORY, "history").to_pylist()] for name in ("jax", "torch")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
