"""Whatever ends a `dvc repro` by Ray, nothing is left running, nothing that was made is lost, and the next one ends as if nothing had been."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pipelines.store import Store
from tests.pipelines.clone import Study

pytestmark = pytest.mark.slow
CELL = "mesa-tiny-1m"
STEPS = 120


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Study]:
    """The small study up to its packed rows, with one cell that trains for a while."""
    made = Study(tmp_path_factory.mktemp("study"), ray=True)
    params = copy.deepcopy(made.params)
    params["grid"]["models"] = ["mesa"]
    params["analysis"]["baseline"] = None
    params["budgets"]["1m"]["tokens"] = 4 * 32 * STEPS
    params["sweep"] = {"models": [], "scales": [], "budgets": []}
    made.params = params
    made.write(params)
    made.dvc("repro", "pack")
    yield made
    assert not left(made)


def left(study: Study) -> list[psutil.Process]:
    """Processes that work for this study."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and (
                str(study.root) in " ".join(process.cmdline()) or process.environ().get("PYTHONPATH", "").startswith(str(study.root))
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found


def begin(study: Study) -> subprocess.Popen[bytes]:
    """Start the training by `dvc repro`, and wait until it is well under way."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dvc", "repro", f"train@{CELL}"], cwd=study.root, env=study.environment, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while True:
        assert time.monotonic() < deadline and process.poll() is None
        if any(path.stat().st_size for path in study.root.glob(".strata/artifacts/*/*/attempts/*/checkpoints/*.safetensors")):
            return process
        time.sleep(0.05)


def wait_until_nothing_runs(study: Study, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while left(study):
        assert time.monotonic() < deadline, left(study)
        time.sleep(0.2)


def undisturbed(study: Study, tmp_path: Path) -> bytes:
    """The weights of the same cell, trained alone and at once."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "stages.train", f"specs/train/{CELL}.json", str(out), "--threads", "2"]
    subprocess.run(command, cwd=study.root, env=study.environment, check=True, capture_output=True)
    return (out / "weights.safetensors").read_bytes()


def forget(study: Study) -> None:
    subprocess.run(
        [sys.executable, "-m", "pipelines", "forget", CELL], cwd=study.root, env=study.environment, check=True, capture_output=True
    )


def weights(study: Study) -> bytes:
    return (study.root / "weights" / CELL / "weights.safetensors").read_bytes()


def steps_seen(study: Study) -> list[int]:
    import pyarrow.parquet as pq

    return pq.read_table(study.root / "history" / f"{CELL}.parquet", columns=["step"])["step"].to_pylist()


def killed_stage(study: Study, process: subprocess.Popen[bytes]) -> None:
    """kill -9 of the process that trains; the stage fails, or Ray's retry goes on with it."""
    for worker in left(study):
        if "execute" in " ".join(worker.cmdline()) or worker.name().startswith("ray::"):
            worker.kill()


@pytest.mark.parametrize("victim", ["dvc", "everything", "worker"])
def test_kill_9_then_dvc_repro_gives_the_undisturbed_weights(study: Study, tmp_path: Path, victim: str) -> None:
    forget(study)
    process = begin(study)
    if victim == "dvc":
        process.kill()
    elif victim == "everything":
        for each in left(study):
            try:
                each.kill()
            except psutil.Error:
                continue
    else:
        killed_stage(study, process)
    process.wait()
    wait_until_nothing_runs(study)
    study.dvc("repro", f"train@{CELL}")
    wait_until_nothing_runs(study)
    assert weights(study) == undisturbed(study, tmp_path)
    assert steps_seen(study) == list(range(1, STEPS + 1))
    record = json.loads((study.root / "provenance" / "train" / f"{CELL}.json").read_text())
    assert victim == "dvc" or record["resumed_from"] > 0


def test_ctrl_c_stops_at_a_checkpoint_and_leaves_nothing_running(study: Study, tmp_path: Path) -> None:
    forget(study)
    process = begin(study)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) != 0
    wait_until_nothing_runs(study)
    store = Store(study.root / ".strata")
    key = (
        json.loads((study.root / "weights" / CELL / "artifact.json").read_text())["key"]
        if (study.root / "weights" / CELL).exists()
        else None
    )
    stopped = [json.loads(path.read_text()) for path in store.root.glob("artifacts/*/*/attempts/*/outcome.json")]
    assert key is None and "stopped" in [outcome["status"] for outcome in stopped]
    study.dvc("repro", f"train@{CELL}")
    assert weights(study) == undisturbed(study, tmp_path)
    assert steps_seen(study) == list(range(1, STEPS + 1))


def test_two_repros_in_two_clones_share_the_work(study: Study, tmp_path: Path) -> None:
    """The second clone names the first one's store, asks while it trains, and takes what it makes."""
    forget(study)
    other = Study(tmp_path, ray=True)
    params = copy.deepcopy(study.params)
    params["cluster"]["storage"] = str(study.root / ".strata")
    other.write(params)
    other.dvc("repro", "pack")
    process = begin(study)
    other.dvc("repro", f"train@{CELL}")
    assert process.wait() == 0
    attempts = list((study.root / ".strata").glob("artifacts/*/*/attempts/*/weights.safetensors"))
    assert len(attempts) == 1
    assert (other.root / "weights" / CELL / "weights.safetensors").read_bytes() == weights(study)
    wait_until_nothing_runs(other)
