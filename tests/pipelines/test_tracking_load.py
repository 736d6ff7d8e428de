"""Sixty runs at once into one MLflow server, with clients and the server killed on the way: each point once, none missing, and true statuses.

A test and no benchmark: what counts is what is there at the end, and that does not depend on the machine.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipelines import tracking
from pipelines.tracking import Tracker
from stages import schemas
from stages.spec import Spec

pytestmark = pytest.mark.slow
RUNS, STEPS, KILLS = 60, 300, 3
NOT_TAKEN = 3  # the exit code of a client that warned
STATUS = {number: "FAILED" if number % 10 == 3 else "KILLED" if number % 10 == 7 else "FINISHED" for number in range(RUNS)}


def database(folder: Path) -> str:
    return f"sqlite:///{folder / 'mlflow.db'}"


class Server:
    """`mlflow server` as the documentation starts it, on loopback; its processes are a group that can be killed."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder, self.process = folder, None
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [
            sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1",
            "--backend-store-uri", database(self.folder), "--artifacts-destination", str(self.folder / "artifacts"),
        ]  # fmt: skip
        with (self.folder / "server.log").open("a") as log:
            self.process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 300
        while not self.answers():
            assert self.process.poll() is None and time.monotonic() < deadline, (self.folder / "server.log").read_text()[-2000:]
            time.sleep(0.5)

    def answers(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
        except (OSError, urllib.error.URLError):
            return False
        return True

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with Tracker(folder, "load")._database():  # the tables, before processes of the server make them at once
        pass
    made = Server(folder)
    made.start()
    yield made
    made.kill()


def spec(number: int) -> Spec:
    return Spec(stage="train", versions={}, inputs={"budget": "d" * 64}, parameters={"batch": 4, "number": number})


def made(folder: Path, number: int) -> Path:
    """What a training leaves: a history whose every value tells its run and step."""
    import pyarrow as pa

    path = folder / f"{number}" / "history.parquet"
    steps = range(1, STEPS + 1)
    columns = {"step": pa.array(steps, pa.int64()), "tokens": pa.array([64 * step for step in steps], pa.int64())}
    for place, name in enumerate(("loss", "learning_rate", "grad_norm", "seconds", "tokens_per_second")):
        columns[name] = pa.array([number + step / 1000 + place for step in steps], pa.float64())
    columns |= {name: pa.array([None] * STEPS, pa.float64()) for name in ("mfu", "mfu_without_cg")}
    columns["event"] = pa.array([None] * STEPS, pa.string())
    schemas.write(path, pa.table(columns), name="history", key=spec(number).key, schema=schemas.schema("history"))
    (path.parent / "provenance.json").write_text(json.dumps({"started": 1700000000.0 + number}))
    return path


def log(url: str, folder: Path, number: int) -> bool:
    """What the collecting process does when a training of the study has ended."""
    context = {"study": "load", "tracking": url, "cells": {}, "roles": {"text": "training"}}
    return tracking.remember("train", f"cell-{number}", spec(number), context, folder / f"{number}", root=folder, status=STATUS[number])


def fork(work: Callable[[], bool]) -> int:
    """The process that does it: its exit code is 0 for True."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if work() else NOT_TAKEN
        finally:
            os._exit(code)
    return pid


def test_sixty_runs_at_once_with_kills_leave_each_point_once(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    mlflow, chosen = tracking._mlflow(), random.Random(0)
    histories = [made(tmp_path, number) for number in range(RUNS)]

    def begin(number: int) -> int:
        return fork(lambda: log(server.url, tmp_path, number))

    running = {begin(number): number for number in range(RUNS)}
    killed: set[int] = set()
    for turn in range(KILLS):
        time.sleep(chosen.uniform(1, 3))
        alive = [pid for pid in running if pid not in killed]
        for pid in chosen.sample(alive, 4):
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        if turn == 1:
            server.kill()
            server.start()
    codes = {number: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, number in running.items()}
    again = [number for number, code in codes.items() if code == -signal.SIGKILL]
    assert again and set(codes.values()) <= {0, NOT_TAKEN, -signal.SIGKILL}, f"a client ended otherwise: {codes}"

    for number in again:  # as the next `dvc repro` does of these; what the server did not take follows by itself
        assert os.waitstatus_to_exitcode(os.waitpid(begin(number), 0)[1]) == 0
    assert not list((tmp_path / tracking.OWED / "load").glob("*")), "not told though the server was there"

    client = mlflow.MlflowClient(tracking_uri=server.url)
    found = client.search_runs([client.get_experiment_by_name("load").experiment_id], max_results=1000)
    assert sorted(run.data.tags["strata.key"] for run in found) == sorted(spec(number).key for number in range(RUNS))
    names = {"loss", "learning_rate", "grad_norm", "tokens_per_second"}
    for run in found:
        number = int(run.data.params["number"])
        assert run.info.status == STATUS[number] and run.data.tags["strata.training"] == STATUS[number]
        expected = sorted((name, step, value) for name, value, _, step in tracking.curves(histories[number], 0))
        points = [(name, point.step, point.value) for name in names for point in client.get_metric_history(run.info.run_id, name)]
        assert sorted(points) == expected, f"run {number}: a point twice, or none"
    assert len(expected) > 100 * len(names)
