"""How much of what nobody waits for yet is handed to Ray: as much as there is room for, and two more, so that a cluster grows."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scale.driver import SESSION, Cluster
from pipelines import driver as driving
from pipelines.board import Board
from pipelines.driver import Driver
from pipelines.work import Request


class Slow(Cluster):
    """Its tasks never end; `taken` is how many of its processors are said to be."""

    taken = 0

    def wait(self, tasks, num_returns, timeout):
        return [], tasks

    def available(self):
        return {node["NodeID"]: node["Resources"] for node in self.nodes()[self.taken :]}


def wanted(store: Path, number: int) -> Request:
    spec = {"stage": "made_up", "versions": {}, "parameters": {"number": number}}
    return Request("made_up", f"cell-{number}", spec, {}, str(store), "study", resources={"cpus": 1})


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Slow:
    made = Slow(10)
    monkeypatch.delenv(driving.head.MARK, raising=False)
    monkeypatch.setattr(driving, "ray", made)
    monkeypatch.setattr(driving, "perform", made)
    monkeypatch.setattr(driving, "available_resources_per_node", made.available)
    monkeypatch.setattr(driving, "LOOK_SECONDS", 0.0)
    return made


def test_as_many_begin_at_once_as_there_is_room_for(tmp_path, cluster):
    board, driver = Board(tmp_path, "study"), Driver(tmp_path, "study", SESSION, "")
    for number in range(30):
        board.put(wanted(tmp_path, number), SESSION, ahead=30)
    driver.turn()
    assert len(cluster.queue) == 10
    driver.turn()
    assert len(cluster.queue) == 10, "handed out again for workers that only take their time to start"

    for _, request in cluster.queue:
        driver.store.acquire(request.key, "{}")  # begun
    cluster.taken = 10
    driver.turn()
    assert len(cluster.queue) == 12
    driver.turn()
    assert len(cluster.queue) == 12, "no more than two wait in Ray's queue"


def test_no_more_than_the_study_allows(tmp_path, cluster):
    board, driver = Board(tmp_path, "study"), Driver(tmp_path, "study", SESSION, "")
    for number in range(30):
        board.put(wanted(tmp_path, number), SESSION, ahead=4)
    driver.turn()
    assert len(cluster.queue) == 4
