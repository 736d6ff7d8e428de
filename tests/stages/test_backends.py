"""A cell trained by JAX instead of torch: exact whatever ends it, and each framework goes on from, and scores, what the other left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models import checkpoint
from stages import artifact, engine, evaluate, schemas, train
from stages.spec import Spec, Stopped, canonical
from tests.stages.small_study import GLA, LENGTH, MESA, context, evaluate_spec, make_packed, make_tokens, train_spec

pytest.importorskip("jax")
pytest.importorskip("optax")

ROOT = Path(__file__).parents[2]
TIMINGS = ("seconds", "tokens_per_second", "mfu", "mfu_without_cg")
SPEC = train_spec(model=MESA, steps=30, learning_rate=0.003)


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> dict[str, Path]:
    """Packed rows, a text set, and the same run by each framework, undisturbed."""
    folder = tmp_path_factory.mktemp("study")
    found = {"budget": make_packed(folder / "packed"), "evaluation/books": make_tokens(folder / "books", lengths=[5, 30, 16, 9], seed=1)}
    for backend in ("torch", "jax"):
        do(found, folder / backend, backend)
        found[backend] = folder / backend
    return found


def do(study: dict[str, Path], out: Path, backend: str, spec: Spec = SPEC, **changes: Any) -> None:
    out.mkdir(exist_ok=True)
    train.run(spec, out, {"budget": study["budget"]}, context(settings={"backend": backend}, **changes)[0])


def rows(out: Path) -> list[dict[str, Any]]:
    return schemas.read(out / train.HISTORY, "history").to_pylist()


def stop_at(step: int) -> Any:
    """A stop_requested that says so once `step` steps are done."""
    polls = iter(range(1_000_000))
    return lambda: next(polls) >= step


def test_the_same_run_by_either(study):
    """The same schedule, rows and losses; a history and provenance of the same form."""
    ours, theirs = rows(study["jax"]), rows(study["torch"])
    assert [row["learning_rate"] for row in ours] == [row["learning_rate"] for row in theirs]
    assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in theirs], rel=2e-4)
    assert [row["cg_steps"] for row in ours] == pytest.approx([row["cg_steps"] for row in theirs], rel=1e-2)
    assert ours[0].keys() == theirs[0].keys()
    for backend in ("torch", "jax"):
        record = json.loads((study[backend] / "provenance.json").read_text())
        assert (record["backend"], record["device"], record["kernels"]["mesa"]) == (backend, "cpu", "chunked")
    a, b = (artifact.read(study[backend], key=SPEC.key, content=True) for backend in ("jax", "torch"))
    assert a["inputs"] == b["inputs"] and a["files"].keys() == b["files"].keys()


def test_killed_and_resumed_under_jax_it_is_the_same_run_bit_for_bit(study, tmp_path):
    (tmp_path / "spec.json").write_text(canonical(SPEC.model_dump()))
    out = tmp_path / "out"
    command = [sys.executable, "-m", "stages.train", str(tmp_path / "spec.json"), str(out), "--input", f"budget={study['budget']}"]
    command += ["--device", "cpu", "--threads", "1", "--backend", "jax"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    first = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list((out / "checkpoints").glob("*.safetensors")) and first.poll() is None:
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.001)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert not (out / "artifact.json").exists(), "it was done before it could be killed"
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "Going on from step" in done.stdout, done.stderr
    a, b = (checkpoint.load(folder / train.WEIGHTS)[0] for folder in (out, study["jax"]))
    assert all(a[name].tobytes() == b[name].tobytes() for name in a)
    kept = [[{name: value for name, value in row.items() if name not in TIMINGS} for row in rows(folder)] for folder in (out, study["jax"])]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("first, second", [("torch", "jax"), ("jax", "torch")])
def test_a_run_begun_under_one_goes_on_under_the_other(study, tmp_path, first, second):
    with pytest.raises(Stopped):
        do(study, tmp_path / "out", first, stop_requested=stop_at(7))
    do(study, tmp_path / "out", second)
    assert json.loads((tmp_path / "out" / "provenance.json").read_text())["resumed_from"] == 7
    mine, whole = rows(tmp_path / "out"), rows(study[first])
    assert [row["step"] for row in mine] == list(range(1, 31)) and [r["loss"] for r in mine[:7]] == [r["loss"] for r in whole[:7]]
    assert [row["loss"] for row in mine] == pytest.approx([row["loss"] for row in whole], rel=2e-4)


@pytest.mark.parametrize("trained", ["torch", "jax"])
def test_either_scores_what_the_other_trained(study, tmp_path, trained):
    spec = evaluate_spec(weights=SPEC, sets=["books"], lengths=[16], settings={"cg-1": {"steps": 1, "eps": 0.0}})
    inputs = {
        "weights": study[trained],
        "validation": study["budget"].parents[1] / "validation",
        "evaluation/books": study["evaluation/books"],
    }
    nll = {}
    for backend in ("torch", "jax"):
        out = tmp_path / backend
        out.mkdir()
        evaluate.run(spec, out, inputs, context(settings={"backend": backend})[0])
        assert json.loads((out / "provenance.json").read_text())["backend"] == backend
        units = ("validation-12", "validation-12-cg-1", "books-16", "books-16-cg-1")
        nll[backend] = np.concatenate([row["nll"] for unit in units for row in schemas.read(out / unit / "nll.parquet", "nll").to_pylist()])
    assert len(nll["torch"]) > 2 * 9 * LENGTH and np.nanmax(np.abs(nll["torch"] - nll["jax"])) < 1e-3
    assert (np.isnan(nll["torch"]) == np.isnan(nll["jax"])).all()


def test_weights_lost_with_the_memory_are_those_of_the_last_checkpoint(study, tmp_path, monkeypatch):
    """XLA takes the arrays that a failed step was given: the run goes back to its checkpoint, with fewer sequences at once."""
    make, calls = engine.trainer, []

    def small(*given: Any, **options: Any) -> Any:
        trainer = make(*given, **options)
        step = trainer.step

        def limited(tokens: np.ndarray, **options: Any) -> dict[str, float]:
            calls.append(options["micro_batch"])
            if len(calls) == 8:
                trainer.params["embedding"].delete()
                raise MemoryError("RESOURCE_EXHAUSTED: Out of memory")
            return step(tokens, **options)

        trainer.step = limited
        return trainer

    monkeypatch.setattr(engine, "trainer", small)
    do(study, tmp_path / "out", "jax")
    assert calls == [4] * 8 + [2] * 25  # steps 1 to 7, the 8th lost; from the checkpoint after 5 again, 6 to 30
    assert [row["loss"] for row in rows(tmp_path / "out")] == pytest.approx([row["loss"] for row in rows(study["jax"])], rel=2e-4)


def test_mistakes_are_named(study, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="'tensorflow' was asked for; it is one of torch, jax"):
        do(study, tmp_path / "out", "tensorflow", train_spec(model=GLA))
    with pytest.raises(ValueError, match="Device cuda was asked for and JAX finds cpu"):
        do(study, tmp_path / "out", "jax", train_spec(model=GLA), device="cuda")
    monkeypatch.setitem(engine.NEEDS, "jax", ("jax", "no_such_library"))
    with pytest.raises(ValueError, match="needs no_such_library"):
        do(study, tmp_path / "out", "jax", train_spec(model=GLA))
