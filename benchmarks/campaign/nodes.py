"""A node lost during a training by two processes on two Ray nodes of this machine: the driver has it go on when there is room again."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.campaign.tally import AGAIN, LOST, ORPHAN, WRONG, Found, Tally

ROOT = Path(__file__).parents[2]
STEPS, PATIENCE = 80, 600.0
WHERE = "train by two"


def campaign(folder: Path, tally: Tally, *, tries: int, only: str = "", seed: int = 0) -> None:
    if not any(only in name for name in FAULTS):
        return
    os.environ |= {
        "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_health_check_timeout_ms": "60000", "RAY_health_check_failure_threshold": "30",  # a busy machine is no lost node
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    import ray
    from ray.cluster_utils import Cluster

    folder = folder / "nodes"
    folder.mkdir()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": 100_000_000})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    try:
        nodes = [cluster.add_node(num_cpus=1, object_store_memory=80_000_000) for _ in range(2)]
        team = Team(folder, cluster, nodes)
        expected = team.train("undisturbed", lambda run: None)[1]
        for turn in range(tries):
            for name, fault in FAULTS.items():
                if only in name:
                    began, chosen = time.monotonic(), random.Random(f"{seed} {name} {turn}")
                    found, weights = team.train(f"{name}-{turn}", lambda run, fault=fault, chosen=chosen: fault(run, chosen))
                    if weights is not None and weights != expected:
                        found.append((WRONG, "the weights differ from the undisturbed run's by as many processes"))
                    tally.add(name, WHERE, time.monotonic() - began, found)
                    print(f"{name}: {time.monotonic() - began:.0f} s, {len(found)} found", file=sys.stderr, flush=True)
    finally:
        ray.shutdown()
        cluster.shutdown()


class Team:
    """The cluster, and the same training on it again and again."""

    def __init__(self, folder: Path, cluster: Any, nodes: list[Any]) -> None:
        from tests.stages.small_study import MESA, make_packed, train_spec

        self.folder, self.cluster, self.nodes = folder, cluster, nodes
        self.budget = make_packed(folder / "packed", rows=4 * STEPS)
        self.spec = train_spec(model=MESA, steps=STEPS, checkpoint_every=5)
        self.attempts = Path()

    def train(self, name: str, disturb: Callable[[Team], None]) -> tuple[Found, bytes | None]:
        """(what was found, the weights file)."""
        import json

        import ray

        from pipelines.board import Board
        from pipelines.driver import Driver
        from pipelines.work import Request
        from stages import artifact
        from stages.train import WEIGHTS

        store = self.folder / name.replace(" ", "-")
        store.mkdir()
        request = Request(
            "train", "cell", self.spec.model_dump(), {"budget": str(self.budget)}, str(store), "study", settings={"checkpoint_every": 5},
            device="cpu", processes=2, threads=2, retries=3,
        )  # fmt: skip
        request.resources = {"cpus": 2}
        session = ray.get_runtime_context().get_node_id()
        board, driver = Board(store, "study"), Driver(store, "study", session, "")
        id = board.put(request, session)
        self.attempts = driver.store.folder(request.key) / "attempts"
        found: Found = []
        deadline, disturbed, saved = time.monotonic() + PATIENCE, False, 0
        while (outcome := board.outcome(session, request.key, id)) is None:
            driver.turn()
            if not disturbed and self.steps():
                saved = self.steps()
                disturb(self)
                disturbed = True
            if time.monotonic() > deadline:
                return [(LOST, f"not done after {PATIENCE:.0f} s, at step {self.steps()}")], None
        if not disturbed:
            raise RuntimeError("The training was over before it was disturbed.")
        if not outcome.done:
            return [(LOST, f"{outcome.status}: {outcome.error}"[-1500:])], None
        made = Path(outcome.folder or "")
        artifact.read(made, key=request.key, content=True)
        if (began := json.loads((made / "provenance.json").read_text())["resumed_from"]) < saved:
            found.append((AGAIN, f"went on from step {began} though step {saved} was saved"))
        for process in self._working(store):
            found.append((ORPHAN, f"process {process.pid} ({process.name()}) goes on"))
            process.kill()
        return found, (made / WEIGHTS).read_bytes()

    def steps(self) -> int:
        """The newest step that a checkpoint holds."""
        return max((int(path.stem) for path in self.attempts.glob("*/checkpoints/0*.safetensors")), default=0)

    def _working(self, store: Path, seconds: float = 20.0) -> list[psutil.Process]:
        """Who still has a file of this store open, after a while."""
        deadline = time.monotonic() + seconds
        while True:
            found = []
            for process in psutil.process_iter():
                try:
                    if process.pid != os.getpid() and any(file.path.startswith(str(store)) for file in process.open_files()):
                        found.append(process)
                except psutil.Error:
                    continue
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.5)


def _node_lost(team: Team, chosen: random.Random) -> None:
    """A node's raylet is killed by -9 some steps later, with all its workers; another node comes in its place."""
    time.sleep(chosen.uniform(0, 0.5))
    number = chosen.randrange(2)
    team.cluster.remove_node(team.nodes[number], allow_graceful=False)
    team.nodes[number] = team.cluster.add_node(num_cpus=1, object_store_memory=80_000_000)


def _process_lost(team: Team, chosen: random.Random) -> None:
    """One of the two training processes is killed by -9."""
    time.sleep(chosen.uniform(0, 0.5))
    mine = [process for process in psutil.Process().children(recursive=True) if "RayTrainWorker" in process.name()]
    if not mine:
        raise RuntimeError("No training process was found among those that this one started.")
    chosen.choice(sorted(mine, key=lambda process: process.pid)).kill()


FAULTS = {"a node lost": _node_lost, "a process of two lost": _process_lost}
