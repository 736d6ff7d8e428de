"""A clock that is set moves every time of day that the system tells, and makes no live process look dead."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from pipelines import processes
from pipelines.store import Busy, Store


@pytest.fixture
def set_clock(monkeypatch):
    """Setting the system's clock moves the boot's time of day and with it each process's beginning, as psutil tells them."""
    real_boot, real_create = psutil.boot_time, psutil.Process.create_time

    def ahead(seconds: float) -> None:
        monkeypatch.setattr(psutil, "boot_time", lambda: real_boot() + seconds)
        monkeypatch.setattr(psutil.Process, "create_time", lambda process: real_create(process) + seconds)

    return ahead


@pytest.mark.parametrize("jump", [-86400.0, 3600.0])
def test_a_live_process_stays_itself_when_the_clock_is_set(set_clock, jump):
    who = processes.identity(psutil.Process())
    set_clock(jump)
    assert processes.runs(who)
    assert not processes.runs(who | {"started": who["started"] - 100}), "another process of the same number"


def test_a_process_that_ended_does_not_run():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    who = processes.identity(psutil.Process(child.pid))
    assert processes.runs(who)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not processes.runs(who), "a zombie"
    child.communicate()
    assert not processes.runs(who) and not processes.runs(None) and not processes.runs({"pid": os.getpid()})


@pytest.mark.parametrize("jump", [-86400.0, 3600.0])
def test_a_lease_holds_when_the_clock_is_set(tmp_path, set_clock, jump):
    store = Store(tmp_path)
    with store.acquire("k" * 64, "{}").beating():
        set_clock(jump)
        with pytest.raises(Busy):
            store.acquire("k" * 64, "{}")
