"""The driver's own work: a grid released at once, its stages stubs that publish at once."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.scale import stubs
from pipelines import driver as driving
from pipelines import run as running
from pipelines import workspace
from pipelines.board import Board
from pipelines.driver import Driver
from pipelines.store import Store
from pipelines.work import Outcome, Request
from stages.spec import Spec

SESSION = "session_of_the_benchmark"
AHEAD = ("train", "evaluate")
PATIENCE, IDLE_TURNS = 3600.0, 20


class Cluster:
    """What the driver sees of Ray: so many nodes of one processor, tasks that wait for one, run in order, and end at the next look."""

    def __init__(self, nodes: int) -> None:
        self.count, self.queue, self.done, self.stub_seconds, self.paused = nodes, deque(), {}, 0.0, False

    # What the driver calls

    def options(self, **_: Any) -> Cluster:
        return self

    def remote(self, request: dict[str, Any], threads: int) -> object:
        task = object()
        self.queue.append((task, Request(**request)))
        return task

    def wait(self, tasks: list[object], num_returns: int, timeout: float) -> tuple[list[object], list[object]]:
        for _ in range(0 if self.paused else min(self.count, len(self.queue))):
            task, request = self.queue.popleft()
            began = time.process_time()
            out = stubs.publish(Store(Path(request.store)), Spec.model_validate(request.spec))
            self.stub_seconds += time.process_time() - began
            self.done[task] = asdict(Outcome("succeeded", folder=str(out)))
        return [task for task in tasks if task in self.done], [task for task in tasks if task not in self.done]

    def get(self, task: object) -> dict[str, Any]:
        return self.done.pop(task)

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": f"node{number}", "Resources": {"CPU": 1.0}, "Labels": {}, "Alive": True} for number in range(self.count)]

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": float(self.count)}

    def available(self) -> dict[str, dict[str, float]]:
        return {node["NodeID"]: node["Resources"] for node in self.nodes()}


def simulated(folder: Path, cells: int, nodes: int) -> dict[str, Any]:
    """A grid of `cells` on `nodes` nodes: two artifacts a cell."""
    requests = _requests(folder, cells)
    cluster = Cluster(nodes)
    before = (driving.ray, driving.perform, driving.available_resources_per_node, os.environ.pop(driving.head.MARK, None))
    driving.ray, driving.perform, driving.available_resources_per_node = cluster, cluster, cluster.available  # type: ignore[assignment]
    try:
        idle = _idle(folder, requests, cluster)
        row = _drive(folder, requests)
    finally:
        driving.ray, driving.perform, driving.available_resources_per_node = before[:3]
    count = len(requests)
    return {"cells": cells, "nodes": nodes} | row | {
        "idle turn cpu ms": idle,
        "driver cpu ms an artifact": 1000 * (row.pop("cpu s") - cluster.stub_seconds) / count,
        "stub cpu ms an artifact": 1000 * cluster.stub_seconds / count,
    }  # fmt: skip


def real(folder: Path, cells: int) -> dict[str, Any]:
    """The same on a Ray of this machine, a worker process for each task."""
    import ray

    requests = _requests(folder, cells)

    @ray.remote(max_calls=1, max_retries=0)
    def stub(request: dict[str, Any], threads: int) -> dict[str, Any]:
        wanted = Request(**request)
        return asdict(Outcome("succeeded", folder=str(stubs.publish(Store(Path(wanted.store)), Spec.model_validate(wanted.spec)))))

    os.environ["PYTHONPATH"] = str(stubs.ROOT)
    began = time.perf_counter()
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="error", object_store_memory=100_000_000)
    up, before = time.perf_counter() - began, driving.perform
    driving.perform = stub
    try:
        row = _drive(folder, requests)
        nodes = int(ray.cluster_resources()["CPU"])
    finally:
        driving.perform = before
        ray.shutdown()
    return {"cells": cells, "slots": nodes, "Ray up s": up, "wall s an artifact": row["wall s"] / len(requests)} | row


def _requests(folder: Path, cells: int) -> list[Request]:
    """Of a resolved study whose data is made."""
    from pipelines.resolve import resolve

    made = stubs.clone(folder, cells)
    with contextlib.chdir(folder):
        resolve(Path("."))
        context, store = workspace.context(), Store(folder / ".strata")
        for path in sorted(Path("specs").rglob("*.json")):
            if path.parent.name not in (*AHEAD, "analyze"):
                stubs.publish(store, Spec.load(path))
        found = []
        for stage in AHEAD:
            for path in sorted((Path("specs") / stage).glob("*.json")):
                found.append(running.request(stage, path.stem, Spec.load(path), context, store))
    assert made.params["cluster"]["ahead"] >= len(found)
    return found


def _idle(folder: Path, requests: list[Request], cluster: Cluster) -> float:
    """Processor milliseconds of a turn in which nothing is new, all nodes being at work."""
    board = Board(folder / ".strata", requests[0].study)
    for request in requests:
        board.put(request, SESSION, ahead=len(requests))
    driver, cluster.paused = Driver(folder / ".strata", requests[0].study, SESSION, ""), True
    driver.turn()
    used = time.process_time()
    for _ in range(IDLE_TURNS):
        driver.turn()
    cluster.paused = False
    cluster.queue.clear()
    return 1000 * (time.process_time() - used) / IDLE_TURNS


def _drive(folder: Path, requests: list[Request]) -> dict[str, Any]:
    """Release all at once and let the driver turn until nothing is left."""
    study = requests[0].study
    board, place = Board(folder / ".strata", study), folder / ".strata" / "studies" / study
    gc.collect()
    rss, began = _resident(), time.perf_counter()
    for request in requests:
        board.put(request, SESSION, ahead=len(requests))
    released = time.perf_counter() - began
    size = sum(path.stat().st_size for path in (place / "requests").rglob("*.json"))
    driver = Driver(folder / ".strata", study, SESSION, "")
    turns, longest = 0, 0.0
    began, used = time.perf_counter(), time.process_time()
    while True:
        turn = time.perf_counter()
        left = driver.turn()
        longest, turns = max(longest, time.perf_counter() - turn), turns + 1
        if not left:
            break
        if time.perf_counter() - began > PATIENCE:
            raise RuntimeError(f"{len(driver.work)} of {len(requests)} are left after {PATIENCE:.0f} s")
    wall, used = time.perf_counter() - began, time.process_time() - used
    outcomes = [json.loads(path.read_text())["outcome"]["status"] for path in (place / "outcomes").rglob("*.json")]
    assert len(outcomes) == len(requests) and set(outcomes) == {"succeeded"}, f"{len(outcomes)} outcomes: {set(outcomes)}"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "artifacts": len(requests), "released s": released, "board MB": size / 1e6, "wall s": wall, "cpu s": used, "turns": turns,
        "longest turn s": longest, "driver MB": peak, "grown MB": max(0.0, _resident() - rss),
    }  # fmt: skip


def _resident() -> float:
    import psutil

    return psutil.Process().memory_info().rss / (1 << 20)
