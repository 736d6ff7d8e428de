"""The board: what is wanted, by whom, and what is cleared away with a driver that is gone."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pipelines import driver, head
from pipelines.board import Board
from pipelines.work import Request


def request(store: Path, number: int) -> Request:
    spec = {"stage": "probe", "versions": {}, "parameters": {"number": number}}
    return Request(stage="probe", cell="cell", spec=spec, inputs={}, store=str(store), study="nano")


@pytest.fixture
def dead() -> dict:
    """The identity of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    who = head.identity(psutil.Process(process.pid))
    process.communicate()
    return who


def test_a_driver_first_clears_away_what_dead_ones_on_its_host_left(tmp_path, dead, monkeypatch):
    board, here, alive = Board(tmp_path, "nano"), socket.gethostname(), head.identity(psutil.Process())
    drivers = {
        "gone": dead | {"host": here},
        "reused": alive | {"host": here, "started": alive["started"] - 100},  # another process has its number now
        "alive": alive | {"host": here},
        "elsewhere": dead | {"host": "another"},
        "own": dead | {"host": here},  # the one before this, on the same head: its requests are ours now
    }
    for number, (session, facts) in enumerate(drivers.items()):
        board.beat(session, facts)
        board.put(request(tmp_path, number), session)

    def init(**options: object) -> None:
        raise ConnectionError("no Ray here")

    monkeypatch.setattr(driver.ray, "init", init)
    with pytest.raises(ConnectionError):
        driver.main([str(tmp_path), "nano", "own"])
    kept = ["alive", "elsewhere", "own"]
    assert [record["session"] for record in board.drivers()] == kept
    assert [session for session in drivers if board.wanted(session)] == kept
