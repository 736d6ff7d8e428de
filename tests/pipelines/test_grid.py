"""A grid in parallel under plain `dvc repro`: on a cluster of our own, with jobs that may not wait, by a target alone, detached, and by two clones."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.store import Store
from stages.spec import Spec
from tests.pipelines.clone import Study

pytestmark = pytest.mark.slow
PORT, DASHBOARD = 6411, 8311


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Ray head with two processors, whose jobs fail when they wait for resources for 5 s."""
    folder = tmp_path_factory.mktemp("ray")
    environment = os.environ | {
        "RAY_JOB_START_TIMEOUT_SECONDS": "5", "RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_ADDRESS": "",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={PORT}",
        "--dashboard-host=127.0.0.1", f"--dashboard-port={DASHBOARD}", "--num-cpus=2", "--object-store-memory=100000000",
        "--disable-usage-stats", f"--temp-dir=/tmp/strata-{os.getpid()}", "--dashboard-agent-listen-port=0",
    ]  # fmt: skip
    with (folder / "log").open("w") as log:
        head = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    yield f"http://127.0.0.1:{DASHBOARD}"
    head.terminate()
    head.wait(timeout=60)


def on(cluster: str, root: Path, *, models: int = 6, steps: int = 12, store: Path | None = None) -> Study:
    """A study of so many cells whose workers want one processor each. store: a folder that clones share; its own if None."""
    study = Study(root, ray=True)
    study.environment |= {"RAY_ADDRESS": cluster, "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    params = copy.deepcopy(study.params)
    params["study"] = root.name
    params["grid"]["models"] = names = [f"gla_{number}" for number in range(models)]
    params["models"] = {name: {"layer": "gla", "convolution": 2 + number} for number, name in enumerate(names)}
    params["learning_rates"] = {name: {"tiny": {"1m": 0.001}} for name in names}
    params["analysis"]["baseline"] = None
    params["sweep"] = {"models": [], "scales": [], "budgets": []}
    params["budgets"]["1m"]["tokens"] = 4 * 32 * steps
    params["cluster"] = {"workers": {"default": {"cpus": 1}}, "storage": str(store) if store else None}
    study.params = params
    study.write(params)
    study.commit("Ask for a grid")
    deadline = time.monotonic() + 60
    while subprocess.run(["curl", "-sf", f"{cluster}/api/version"], capture_output=True).returncode:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    return study


def keys(study: Study, stage: str) -> dict[str, str]:
    """cell -> key"""
    return {path.stem: Spec.load(path).key for path in (study.root / "specs" / stage).glob("*.json")}


def made(study: Study, stage: str, root: Path | None = None) -> dict[str, int]:
    """cell -> how many attempts, of those published. root: the store's folder, where it is not the study's own."""
    store = Store(root or study.root / ".strata")
    return {cell: len(store.attempts(key)) for cell, key in keys(study, stage).items() if (store.folder(key) / "published").exists()}


def spans(study: Study) -> list[tuple[float, float]]:
    """When each training began and ended."""
    records = [json.loads(path.read_text()) for path in (study.root / "provenance" / "train").glob("*.json")]
    return [(record["started"], record["started"] + record["seconds"]) for record in records]


def test_a_grid_of_six_runs_two_at_a_time_though_jobs_may_not_wait(cluster: str, tmp_path: Path) -> None:
    study = on(cluster, tmp_path / "six")
    done = study.dvc("repro")
    assert "Released: 6 cells to train" in done.stderr
    assert list(made(study, "train").values()) == [1] * 6 and list(made(study, "evaluate").values()) == [1] * 6
    whole = spans(study)
    assert any(a[0] < b[1] and b[0] < a[1] for i, a in enumerate(whole) for b in whole[:i]), "no two trainings overlapped"

    # A fresh store with an up-to-date lock trains nothing, ahead or not.
    (study.root / ".strata").rename(tmp_path / "aside")
    assert study.ran(study.dvc("repro").stdout) == set()
    assert not list((study.root / ".strata").glob("artifacts/*/*/attempts"))


def test_a_target_starts_itself_alone(cluster: str, tmp_path: Path) -> None:
    study = on(cluster, tmp_path / "one", models=3)
    study.dvc("repro", "train@gla_1-tiny-1m")
    time.sleep(3)
    assert set(made(study, "train")) == {"gla_1-tiny-1m"} and made(study, "evaluate") == {}


def test_after_ctrl_c_the_cluster_finishes_the_study(cluster: str, tmp_path: Path) -> None:
    import signal

    study = on(cluster, tmp_path / "detached", models=4, steps=60)
    process = subprocess.Popen(
        [sys.executable, "-m", "dvc", "repro"], cwd=study.root, env=study.environment, start_new_session=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not list(study.root.glob(".strata/artifacts/*/*/attempts/*/history.parquet")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    assert "goes on at" in process.communicate(timeout=60)[0]
    deadline = time.monotonic() + 180
    while len(made(study, "evaluate")) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert list(made(study, "train").values()) == [1] * 4
    study.dvc("repro")
    assert list(made(study, "train").values()) == [1] * 4, "collecting trained again"


def test_two_clones_share_the_work(cluster: str, tmp_path: Path) -> None:
    """Both run `dvc repro` of the same study at once, over one store: each key is made once, and both end with the same bytes."""
    store = tmp_path / "store"
    clones = []
    for place in ("a", "b"):
        (tmp_path / place / "shared").mkdir(parents=True)
        clones.append(on(cluster, tmp_path / place / "shared", models=3, steps=40, store=store))
    logs = [(study.root / "repro.log").open("w+") for study in clones]
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "dvc", "repro"], cwd=study.root, env=study.environment, stdout=log, stderr=subprocess.STDOUT
        )
        for study, log in zip(clones, logs, strict=True)
    ]
    ends = [process.wait(timeout=400) for process in running]
    said = []
    for log in logs:
        log.seek(0)
        said.append(log.read())
        log.close()
    assert ends == [0, 0], "\n".join(said)
    for stage in ("vocabulary", "tokenize", "pack", "train", "evaluate", "analyze"):
        numbers = made(clones[0], stage, store)
        assert numbers and set(numbers.values()) == {1}, f"{stage} was made more than once: {numbers}"
    assert keys(clones[0], "train") == keys(clones[1], "train") and len(keys(clones[0], "train")) == 3
    for name in (
        "weights/gla_0-tiny-1m/weights.safetensors",
        "packed/artifact.json",
        "analysis/metrics.json",
        "evaluations/gla_2-tiny-1m/artifact.json",
    ):
        assert (clones[0].root / name).read_bytes() == (clones[1].root / name).read_bytes(), name
    for study in clones:
        assert study.changed() == set()
    assert sum(text.count(": made, key") for text in said) >= 1
