"""Looking inside while a model is trained: the training is the same, and every look is there once, whatever ends it."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models import checkpoint
from stages import artifact, engine, evaluate, schemas, train
from stages.spec import Spec, Stopped, canonical
from stages.training import Internals, Training
from tests.stages.small_study import GLA, LENGTH, MESA, context, course, evaluate_spec, looking_spec, make_packed, notes, train_spec

ROOT = Path(__file__).parents[2]
PALIMPSA = {"layer": "palimpsa_d"}
looking = partial(looking_spec, model=PALIMPSA)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("study") / "packed"
    return {"budget": make_packed(folder), "validation": folder / "validation"}


def do(spec: Spec, out: Path, inputs: dict[str, Path], **changes: Any) -> list[dict[str, Any]]:
    out.mkdir(exist_ok=True)
    given, lines = context(**changes)
    train.run(spec, out, inputs, given)
    return lines


def weights(out: Path) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in checkpoint.load(out / train.WEIGHTS)[0].items()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, inputs) -> Path:
    out = tmp_path_factory.mktemp("undisturbed")
    do(looking(), out, inputs)
    return out


def test_a_row_a_look_block_and_head(undisturbed):
    found = course(undisturbed)
    assert [(row["step"], row["tokens"], row["block"], row["head"]) for row in found] == [
        (step, step * 4 * LENGTH, 0, head) for step in (0, 4, 8, 12) for head in (0, 1)
    ]
    assert all((row["first"], row["position"], row["sequences"]) == (1, LENGTH, 2) for row in found)
    assert all(row["log_window"] > 0 and row["ratio"] > 0 for row in found)
    assert len({row["log_window"] for row in found}) == 8
    record = artifact.read(undisturbed, key=looking().key, content=True)
    assert "memory_course.parquet" in record["files"] and "validation" in record["inputs"]


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
@pytest.mark.parametrize("model, table", [(PALIMPSA, "memory"), (MESA, "internals")])
def test_the_training_is_the_same_in_every_bit(tmp_path, inputs, backend, model, table):
    pytest.importorskip(backend)
    given = {"settings": {"backend": backend}}
    do(looking(model=model), tmp_path / "looking", inputs, **given)
    do(train_spec(model=model), tmp_path / "not", {"budget": inputs["budget"]}, **given)
    assert weights(tmp_path / "looking") == weights(tmp_path / "not")
    losses = [[row["loss"] for row in schemas.read(tmp_path / out / train.HISTORY, "history").to_pylist()] for out in ("looking", "not")]
    assert losses[0] == losses[1]
    assert sorted({row["step"] for row in course(tmp_path / "looking", table)}) == [0, 4, 8, 12]
    assert not (tmp_path / "not" / f"{table}_course.parquet").exists()


def test_the_last_look_is_what_evaluation_sees_of_the_weights(tmp_path, undisturbed, inputs):
    spec = evaluate_spec(weights=looking(), sets=[], lengths=[], internals=2)
    evaluate.run(spec, tmp_path, {"weights": undisturbed, "validation": inputs["validation"]}, context()[0])
    of_bins = schemas.read(tmp_path / "internals" / "memory.parquet", "memory").to_pylist()
    last = [row for row in course(undisturbed) if row["step"] == 12]
    for head, seen in enumerate(last):
        own = [row for row in of_bins if row["head"] == head]
        assert seen["ratio"] == pytest.approx(own[-1]["ratio"], rel=1e-6)
        mean = np.average([row["log_window"] for row in own], weights=[row["position"] - row["first"] + 1 for row in own])
        assert seen["log_window"] == pytest.approx(mean, rel=1e-6)


def test_an_evaluation_hands_the_course_on(tmp_path, undisturbed, inputs):
    spec = evaluate_spec(weights=looking(), sets=[], lengths=[])
    evaluate.run(spec, tmp_path, {"weights": undisturbed, "validation": inputs["validation"]}, context()[0])
    assert course(tmp_path) == course(undisturbed)
    assert "memory_course.parquet" in artifact.read(tmp_path, key=spec.key, content=True)["files"]


@pytest.mark.parametrize("step", [0, 4, 6, 11])
def test_a_stop_loses_no_look_and_makes_none_twice(tmp_path, inputs, undisturbed, step):
    polls = iter(range(99))
    with pytest.raises(Stopped, match=f"step {step} of 12"):
        do(looking(), tmp_path / "1", inputs, stop_requested=lambda: next(polls) >= step)
    said = notes(do(looking(), tmp_path / "2", inputs, resume_from=[tmp_path / "1"]))
    assert f"from step {step}" in said
    assert artifact.read(tmp_path / "2")["files"] == artifact.read(undisturbed)["files"]


@pytest.mark.slow
def test_a_kill_loses_no_look_and_makes_none_twice(tmp_path, inputs):
    spec, out = looking(steps=24, checkpoint_every=3, batch=2, model=MESA), tmp_path / "out"
    do(spec, tmp_path / "undisturbed", inputs)
    (tmp_path / "spec.json").write_text(canonical(spec.model_dump()))
    command = [sys.executable, "-m", "stages.train", str(tmp_path / "spec.json"), str(out), "--device", "cpu", "--threads", "1"]
    command += [part for name, path in inputs.items() for part in ("--input", f"{name}={path}")]
    seed = time.time_ns()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not list(out.glob("checkpoints/0*")):
        time.sleep(0.005)
    time.sleep(random.Random(seed).uniform(0, 0.1))
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, f"the run was not killed (seed {seed})"
    assert "Going on from step" in notes(do(spec, out, inputs))
    assert artifact.read(out, content=True)["files"] == artifact.read(tmp_path / "undisturbed")["files"]


def test_a_checkpoint_whose_looks_are_not_there_is_passed_over(tmp_path, inputs, undisturbed):
    """Its log has every step, but lacks the look after the fourth."""
    out, polls = tmp_path / "out", iter(range(99))
    with pytest.raises(Stopped):
        do(looking(), out, inputs, stop_requested=lambda: next(polls) >= 6)
    log = out / "history.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    short = "".join(line for line in lines if json.loads(line).get("after") != 4)
    log.write_text(short)
    newest = out / "checkpoints" / "00000006.safetensors"
    state, facts = checkpoint.load(newest)
    checkpoint.save(newest, state, facts | {"history": str(len(short))})
    said = notes(do(looking(), out, inputs))
    assert "does not hold the looks" in said
    assert artifact.read(out)["files"] == artifact.read(undisturbed)["files"]


def test_looks_ask_for_validation_rows_and_a_layer_with_something_to_see(tmp_path, inputs):
    with pytest.raises(ValueError, match="validation=packed/validation"):
        do(looking(), tmp_path / "none", {"budget": inputs["budget"]})
    with pytest.raises(ValueError, match="leave it out"):
        do(looking(model=GLA), tmp_path / "gla", inputs)


def test_off_by_default_and_then_in_no_spec():
    training = Training(batch=4)
    assert training.internals is None and "internals" not in training.model_dump(exclude_defaults=True)
    assert Training(batch=4, internals={"every": 10}).internals == Internals(every=10, rows=4)


def test_steps_that_are_rolled_back_are_looked_at_again_and_not_twice(tmp_path, inputs, monkeypatch):
    """The tenth step is not finite: back to the checkpoint of step 5, so the look after step 8 is another."""

    class Failing:
        def __init__(self, trainer: Any) -> None:
            self.trainer, self.calls = trainer, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.trainer, name)

        def submit(self, *given: Any, **options: Any) -> Any:
            self.calls += 1
            bad = {"loss": float("nan"), "grad_norm": float("nan"), "finite": 0.0}
            return (lambda: bad) if self.calls == 10 else self.trainer.submit(*given, **options)

    make = engine.trainer
    monkeypatch.setattr(engine, "trainer", lambda *given, **options: Failing(make(*given, **options)))
    said = notes(do(looking(on_nonfinite="rollback"), tmp_path / "out", inputs))
    assert "Going back" in said and "Going on from step 5" in said
    assert [(row["step"], row["head"]) for row in course(tmp_path / "out")] == [(step, head) for step in (0, 4, 8, 12) for head in (0, 1)]
