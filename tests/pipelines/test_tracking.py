"""MLflow: logged once, found again by key, and never in anybody's way."""

import json
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines import head, tracking
from pipelines.tracking import Tracker, clean, flat
from stages import schemas
from stages.spec import Spec

ROOT = Path(__file__).parents[2]
STEPS = 1000


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """A database without runs: making one takes seconds."""
    folder = tmp_path_factory.mktemp("empty")
    with Tracker(folder, "nano")._database():
        return folder / "mlflow.db"


@pytest.fixture(autouse=True)
def place(request, tmp_path, empty, monkeypatch):
    """No tracking server, and an empty database in `tmp_path`, but for tests of its making (named `first_use`)."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if "first_use" not in request.node.name:
        shutil.copyfile(empty, tmp_path / "mlflow.db")


def history(path, steps=STEPS):
    rows = range(1, steps + 1)
    table = pa.table(
        {
            "step": pa.array(rows, pa.int64()),
            "tokens": pa.array([4096 * step for step in rows], pa.int64()),
            "loss": pa.array([None if step == 3 else 8.0 / step for step in rows], pa.float64()),
            "learning_rate": pa.array([0.001] * steps, pa.float64()),
            "grad_norm": pa.array([1.0] * steps, pa.float64()),
            "seconds": pa.array([0.5] * steps, pa.float64()),
            "tokens_per_second": pa.array([8192.0] * steps, pa.float64()),
            "mfu": pa.array([None] * steps, pa.float64()),
            "mfu_without_cg": pa.array([None] * steps, pa.float64()),
            "event": pa.array([None] * steps, pa.string()),
            "cg_residual": pa.array([1e-4] * steps, pa.float64()),
        }
    )
    schemas.write(path, table, name="history", key="k" * 64, schema=schemas.schema("history", extra=["cg_residual"]))
    return path


PROVENANCE = {
    "started": 1700000000.0,
    "commit": "c0ffee",
    "dirty": True,
    "device": "cpu",
    "kernels": {"mesa": "chunked"},
    "libraries": {"torch": "2.13.0"},
    "seconds": 500.0,
}
PARAMETERS = {
    "model": {"layer": "mesa", "steps": 30},
    "batch": 16,
    "betas": [0.9, 0.98],
    "long": "x" * 900,
    "api_key": "hunter2",
    "url": "https://me:hunter2@host/data?token=hunter2",
}
DATASET = ("text", "sha256:" + "d" * 64)


def train(tracker, folder, key="a" * 64, **options):
    return tracker.log_training(
        "mesa-tiny-1m", key, PARAMETERS, history(folder / "history.parquet"), PROVENANCE, dataset=DATASET, **options
    )


def runs(tracker):
    client = tracking._mlflow().MlflowClient(tracking_uri=tracker.uri)
    return client, client.search_runs([client.get_experiment_by_name(tracker.study).experiment_id])


def evaluation(path, setting=""):
    row = {
        "set": "validation",
        "length": 256,
        "setting": setting,
        "sequences": 4,
        "tokens": 1024,
        "nll": 2.0,
        "perplexity": 7.389,
        "steps_taken": None,
        "residual": None,
    }
    schemas.write(path, pa.Table.from_pylist([row], schema=schemas.schema("perplexity")), name="perplexity", key="k" * 64)
    return path


def test_a_cell_is_one_run_with_everything_in_it(tmp_path, capfd):
    tracker = Tracker(tmp_path, "nano")
    assert train(tracker, tmp_path)
    assert tracker.log_evaluation("mesa-tiny-1m", "b" * 64, "a" * 64, evaluation(tmp_path / "perplexity.parquet"), PROVENANCE)
    out, err = capfd.readouterr()
    assert out == "" and err == ""
    client, [run] = runs(tracker)
    assert run.info.status == "FINISHED" and run.info.run_name == "mesa-tiny-1m"
    assert run.data.params["model.steps"] == "30" and run.data.params["betas"] == "[0.9, 0.98]" and len(run.data.params["long"]) == 500
    tags = run.data.tags
    assert tags["strata.key"] == "a" * 64 and tags["commit"] == tags["mlflow.source.git.commit"] == "c0ffee" and tags["dirty"] == "true"
    assert tags["kernels.mesa"] == "chunked" and tags["libraries.torch"] == "2.13.0" and tags["device"] == "cpu"
    assert "hunter2" not in json.dumps([run.data.params, tags])
    assert run.data.metrics["perplexity/validation/256"] == 7.389
    loss = client.get_metric_history(run.info.run_id, "loss")
    assert 150 <= len(loss) <= 205 and loss[0].step == 1 and loss[-1].step == STEPS and loss[-1].value == 8.0 / STEPS
    assert loss[-1].timestamp == 1700000500000 and "mfu" not in run.data.metrics and run.data.metrics["cg_residual"] == 1e-4
    [dataset] = run.inputs.dataset_inputs
    assert dataset.dataset.name == "text" and dataset.dataset.digest == "d" * 36
    assert [item.path for item in client.list_artifacts(run.info.run_id, "evaluation")] == ["evaluation/perplexity.parquet"]
    assert (tmp_path / "mlflow.db").is_file() and list((tmp_path / "mlruns" / "nano").rglob("perplexity.parquet"))


def test_logging_again_adds_nothing(tmp_path):
    tracker = Tracker(tmp_path, "nano")

    def state():
        client, found = runs(tracker)
        return [
            (
                run.info.run_id,
                run.data.params,
                run.data.tags,
                {name: len(client.get_metric_history(run.info.run_id, name)) for name in run.data.metrics},
            )
            for run in found
        ]

    def log():
        assert train(tracker, tmp_path)
        assert tracker.log_evaluation("mesa-tiny-1m", "b" * 64, "a" * 64, evaluation(tmp_path / "perplexity.parquet"), PROVENANCE)

    log()
    before = state()
    log()
    assert state() == before and len(before) == 1
    # The mark of completeness lost, as after a kill in the middle: the points are not doubled, even at other times.
    tracking._mlflow().MlflowClient(tracking_uri=tracker.uri).delete_tag(before[0][0], "strata.training")
    tracker.log_training(
        "mesa-tiny-1m", "a" * 64, PARAMETERS, tmp_path / "history.parquet", PROVENANCE | {"started": 1800000000.0}, dataset=DATASET
    )
    assert state()[0][3] == before[0][3]


def test_a_new_setting_joins_the_run_of_its_weights(tmp_path):
    tracker = Tracker(tmp_path, "nano")
    train(tracker, tmp_path)
    tracker.log_evaluation("mesa-tiny-1m", "b" * 64, "a" * 64, evaluation(tmp_path / "perplexity.parquet"), PROVENANCE)
    tracker.log_evaluation("mesa-tiny-1m", "c" * 64, "a" * 64, evaluation(tmp_path / "perplexity.parquet", "cg-5"), PROVENANCE)
    _, [run] = runs(tracker)
    assert {"perplexity/validation/256", "perplexity/validation/256/cg-5"} <= set(run.data.metrics)


@pytest.mark.parametrize("status", ["FAILED", "KILLED"])
def test_a_run_tells_how_it_ended_and_can_still_finish(tmp_path, status):
    tracker = Tracker(tmp_path, "nano")
    train(tracker, tmp_path, status=status)
    assert runs(tracker)[1][0].info.status == status
    train(tracker, tmp_path)
    client, [run] = runs(tracker)
    assert run.info.status == "FINISHED"
    steps = [point.step for point in client.get_metric_history(run.info.run_id, "loss")]
    assert len(steps) == len(set(steps))


def test_the_report(tmp_path):
    tracker, folder = Tracker(tmp_path, "nano"), tmp_path / "analysis"
    (folder / "figures").mkdir(parents=True)
    (folder / "report.html").write_text("<html>")
    (folder / "figures" / "loss.png").write_bytes(b"png")
    (folder / "metrics.json").write_text('{"mesa-tiny-1m": {"loss": 2.5, "perplexity": {"validation": 7.4, "long": null}}}')
    assert tracker.log_report("e" * 64, folder) and tracker.log_report("e" * 64, folder)
    client, [run] = runs(tracker)
    assert run.data.metrics == {"mesa-tiny-1m/loss": 2.5, "mesa-tiny-1m/perplexity/validation": 7.4} and run.info.run_name == "report"
    assert sorted(item.path for item in client.list_artifacts(run.info.run_id)) == ["figures", "metrics.json", "report.html"]


FIRST_USE = """
import sys, time
from pathlib import Path
from pipelines import tracking
root, letter, number = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
tracking._mlflow()
(root / f"ready-{number}").touch()
while len(list(root.glob("ready-*"))) < 4:
    time.sleep(0.005)
tracker = tracking.Tracker(root, "nano")
sys.exit(not tracker.log_training(f"cell-{letter}", letter * 64, {"key": letter}, root / "history.parquet", {}, dataset=("text", letter)))
"""


def test_first_use_by_four_at_once(tmp_path):
    history(tmp_path / "history.parquet")
    started = [
        subprocess.Popen([sys.executable, "-c", FIRST_USE, str(tmp_path), letter, str(number)], cwd=ROOT)
        for number, letter in enumerate("aabc")
    ]
    assert [process.wait(timeout=120) for process in started] == [0] * 4
    _, found = runs(Tracker(tmp_path, "nano"))
    assert sorted(run.info.run_name for run in found) == ["cell-a", "cell-b", "cell-c"]
    assert {run.info.status for run in found} == {"FINISHED"}


def test_what_the_stages_of_a_cell_have_made_is_remembered(tmp_path):
    made = {stage: tmp_path / stage for stage in ("train", "evaluate", "analyze")}
    for folder in made.values():
        folder.mkdir()
        (folder / "provenance.json").write_text(json.dumps(PROVENANCE))
        (folder / "artifact.json").write_text(json.dumps({"inputs": {"budget": DATASET[1]}}))
    history(made["train"] / "history.parquet")
    evaluation(made["evaluate"] / "perplexity.parquet")
    scores = {"task": ["needle"] * 2, "shots": [1] * 2, "setting": [""] * 2, "score": [20.0, 40.0]}
    pq.write_table(pa.table(scores), made["evaluate"] / "scores.parquet")
    (made["analyze"] / "metrics.json").write_text('{"mesa-tiny-1m": {"loss": 2.5}}')
    context = {
        "study": "nano",
        "tracking": None,
        "cells": {"mesa-tiny-1m": {"name": "mesa-tiny-1m", "group": "grid"}},
        "roles": {"text": "training", "held-out": "validation"},
    }
    spec = {
        stage: Spec(stage=stage, versions={}, parameters={"batch": 16}, inputs={"train": {"budget": "b" * 64}}.get(stage, {}))
        for stage in ("train", "analyze")
    }
    spec["evaluate"] = Spec(stage="evaluate", versions={}, parameters={}, inputs={"weights": spec["train"].key})
    for stage, cell in (("train", "mesa-tiny-1m"), ("evaluate", "mesa-tiny-1m"), ("analyze", "analyze")):
        assert tracking.remember(stage, cell, spec[stage], context, made[stage], root=tmp_path)
    _, found = runs(Tracker(tmp_path, "nano"))
    run, report = sorted(found, key=lambda run: run.info.run_name)
    assert run.data.params == {"batch": "16", "cell.group": "grid"} and run.data.tags["strata.key"] == spec["train"].key
    assert (
        run.inputs.dataset_inputs[0].dataset.digest == "d" * 36
        and "loss" in run.data.metrics
        and "perplexity/validation/256" in run.data.metrics
        and run.data.metrics["tasks/needle/1"] == 30.0  # over the draws
    )
    assert report.info.run_name == "report" and report.data.metrics == {"mesa-tiny-1m/loss": 2.5}


def test_first_use_after_a_process_was_killed_at_it(tmp_path):
    (tmp_path / ".mlflow.db.partial").write_bytes(b"half")
    assert train(Tracker(tmp_path, "nano"), tmp_path)
    assert not (tmp_path / ".mlflow.db.partial").exists()


def test_an_experiment_deleted_by_hand_comes_back(tmp_path):
    tracker = Tracker(tmp_path, "nano")
    train(tracker, tmp_path)
    client = tracking._mlflow().MlflowClient(tracking_uri=tracker.uri)
    client.delete_experiment(client.get_experiment_by_name("nano").experiment_id)
    assert train(tracker, tmp_path, key="f" * 64)


def one_warning(capsys, *words):
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("Warning: MLflow at ") and all(word in lines[0] for word in words), lines


def test_a_server_that_is_away_is_one_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter2@127.0.0.1:1")
    assert not train(Tracker(tmp_path, "nano"), tmp_path)
    one_warning(capsys, "http://127.0.0.1:1 did not take train mesa-tiny-1m", "after the next that MLflow takes")


def test_a_server_that_never_answers_costs_seconds(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tracking, "BUSY_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        assert not Tracker(tmp_path, "nano").log_report("e" * 64, tmp_path)
        assert time.monotonic() - began < 5
    one_warning(capsys, "did not take report")


def test_what_a_server_that_was_away_did_not_take_is_told_after_the_next_that_it_takes(tmp_path, monkeypatch, capsys):
    context = {"study": "nano", "cells": {}, "roles": {"text": "training"}}

    def tell(number: int, status: str = "FINISHED") -> bool:
        made = tmp_path / f"made-{number}"
        made.mkdir(exist_ok=True)
        history(made / "history.parquet", steps=5)
        spec = Spec(stage="train", versions={}, inputs={"budget": "d" * 64}, parameters={"number": number})
        return tracking.remember("train", f"cell-{number}", spec, context, made, root=tmp_path, status=status)

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    assert not tell(0) and not tell(1, "KILLED") and not tell(2)
    (tmp_path / ".strata" / "owed" / "nano" / "train@torn.json").write_text("{")
    shutil.rmtree(tmp_path / "made-2")  # forgotten meanwhile: nothing to tell any more
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert tell(3)
    found = {run.data.params["number"]: run.info.status for run in runs(Tracker(tmp_path, "nano"))[1]}
    assert found == {"0": "FINISHED", "1": "KILLED", "3": "FINISHED"}
    assert not list((tmp_path / ".strata" / "owed" / "nano").iterdir())
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_a_store_that_mlflow_refuses_is_one_warning(tmp_path, capsys):
    (tmp_path / "mlflow.db").write_text("this is no database")
    assert not train(Tracker(tmp_path, "nano"), tmp_path)
    one_warning(capsys, "mlflow.db did not take train mesa-tiny-1m")


def test_the_environment_comes_before_the_study_and_the_study_before_the_default(tmp_path, monkeypatch):
    assert Tracker(tmp_path, "nano").uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert Tracker(tmp_path, "nano", "http://host:5000").uri == "http://host:5000"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///other.db")
    assert Tracker(tmp_path, "nano", "http://host:5000").uri == "sqlite:///other.db"


def test_what_gives_access_is_left_out():
    assert clean("hf://me:pw@host/x https://h/x?sig=abc&n=1 Bearer abcdefghijkl") == "hf://host/x https://h/x?sig=...&n=1 Bearer ..."
    assert flat({"tokens": 5, "batch_tokens": 6, "auth_token": "t", "a": {"password": "p", "key_size": 32}}) == {
        "tokens": "5",
        "batch_tokens": "6",
        "a.key_size": "32",
    }


def test_mlflow_is_not_imported_before_it_is_needed():
    code = "import sys; from pipelines import tracking; print('mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=head.CODE, capture_output=True, text=True, check=True).stdout.strip() == "False"
