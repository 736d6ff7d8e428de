"""Where a driver gives work, without Ray: the nodes are made up."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import pytest

from pipelines import check, head, placement
from pipelines.board import Board
from pipelines.driver import Driver, Work
from pipelines.environment import CODE
from pipelines.placement import SLICE, TOPOLOGY, TYPE, Offer
from pipelines.reading import load
from pipelines.run import place
from pipelines.work import Request

H100 = {"kind": "gpu", "name": "h100", "type": "H100", "flops": 1e15}
V5P = {"kind": "tpu", "name": "v5p", "type": "TPU-V5P", "flops": 5e14}
CARD = place("train", {"cpus": 1, "chip": H100, "count": 1})
TPU = place("train", {"cpus": 1, "chip": V5P, "count": 8, "topology": "2x2x2"})
NODES = [Offer({"CPU": 8, "GPU": 1}, {TYPE: "H100"}, "card")]
NODES += [Offer({"CPU": 8, "TPU": 4}, {TYPE: "TPU-V5P", TOPOLOGY: "2x2x2", SLICE: "a"}, f"host {host}") for host in range(2)]
MORE = [{"nodes": 2, "cpus": 8, "count": 1, "topology": None, "kind": "gpu", "type": "H100"}]


@pytest.fixture
def driver(tmp_path, monkeypatch):
    monkeypatch.delenv(head.MARK, raising=False)
    return Driver(str(tmp_path), "study", "session", "job")


def work(driver: Driver, *places: placement.Place, later: list | None = None, name: str = "cell") -> Work:
    spec = {"stage": "train", "versions": {}, "parameters": {"name": name}}
    request = Request("train", name, spec, {}, str(driver.store.where), "study", places=[asdict(one) for one in places], later=later or [])
    return Work(request, {"id"}, 0)


def given(driver: Driver, one: Work, free: list[Offer], nodes: list[Offer] = NODES) -> str | None:
    driver._nodes = lambda: (nodes, free)
    found = driver._place(one)
    return found.name if found else None


@pytest.mark.parametrize(
    ("places", "free", "later", "name"),
    [
        ([CARD, TPU], NODES, [], "1 x h100"),
        ([CARD, TPU], NODES[1:], [], "2x2x2 of v5p"),
        ([CARD, TPU], NODES[1:2], [], None),  # it waits for what comes free first
        ([CARD, TPU], NODES[1:2], MORE, "1 x h100"),  # in Ray's queue, where an autoscaler sees it
        ([TPU], [], [], "2x2x2 of v5p"),
    ],
)
def test_the_first_with_room_else_it_waits(driver, places, free, later, name):
    one = work(driver, *places, later=later)
    assert given(driver, one, free) == name and (one.again > time.monotonic()) is (name is None)


def test_what_was_given_a_moment_ago_counts(driver):
    """Two cells, one GPU, and Ray has not yet taken the first up: the second does not go to its second choice because of that."""
    before, after = work(driver, CARD, TPU, name="before"), work(driver, CARD, TPU, name="after")
    before.task, before.place, before.given = object(), CARD, time.monotonic()
    driver.work["before"] = before
    assert given(driver, after, NODES) is None
    before.given -= 60  # it waits in the queue for good
    assert given(driver, after, NODES[1:]) == "2x2x2 of v5p"


def test_what_fits_nowhere_is_answered_when_it_is_first_seen(driver):
    one = work(driver, CARD).request
    Board(driver.store.where, "study").put(one, "session", ahead=4)  # nobody waits for it, and its inputs are not made
    driver._nodes = lambda: (NODES[1:], NODES[1:])
    driver.turn()
    outcome = driver.board.outcome("session", one.key)
    assert outcome.kind == "mistake" and "no node has the accelerator H100" in outcome.error and not driver.work


def test_a_driver_leaves_what_is_asked_of_other_code(driver, monkeypatch, tmp_path):
    one = work(driver, CARD).request
    one.environment = {"code": "new"}
    Board(driver.store.where, "study").put(one, "session")
    driver.turn()
    assert driver.outdated and not driver.work and driver.board.outcome("session", one.key) is None
    monkeypatch.setenv(CODE, "new")
    newer = Driver(str(tmp_path), "study", "session", "job")
    newer._nodes = lambda: ([], [])
    newer.turn()
    assert not newer.outdated and newer.board.outcome("session", one.key).kind == "mistake"


def test_check_asks_the_cluster(monkeypatch):
    """Before anything begins: each scale that fits nowhere, once for training and once for what follows."""
    params = load(Path(__file__).parents[2])
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    monkeypatch.setattr(head, "address_from_environment", lambda: head.Address("http://head:8265"))
    monkeypatch.setattr(placement, "nodes_at", lambda _: NODES[1:])
    found = check._accelerators(params)
    assert any("train of 140m fits nowhere" in one and "no node has the accelerator H100" in one for one in found)
    assert not any("of 1b" in one for one in found), found  # its second worker is such a slice
    monkeypatch.setattr(placement, "nodes_at", lambda _: NODES)
    assert not [one for one in check._accelerators(params) if "140m" in one and "accelerator" in one]
