"""Work in a child of this process: the libraries are loaded already, so it begins at once, and it may be killed."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

PATIENCE = 60.0


class Child:
    """One piece of work in a process and a session of its own. work returns the exit code; what it prints goes to `log`."""

    def __init__(self, work: Callable[[], int], folder: Path, log: Path) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.log, self.code = log, None
        self.pid = os.fork()
        if self.pid == 0:
            _be(work, folder, log)

    def wait(self, seconds: float = PATIENCE) -> int | None:
        """Its exit code, negative for a signal; None where it still runs after so long."""
        deadline = time.monotonic() + seconds
        while self.code is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                return None
            else:
                time.sleep(0.005)
        return self.code

    def send(self, number: signal.Signals) -> None:
        if self.code is None:
            os.kill(self.pid, number)

    def left(self, seconds: float = 5.0) -> list[psutil.Process]:
        """What it started and left running, after a while for them to end."""
        deadline = time.monotonic() + seconds
        while found := self._session():
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return found

    def _session(self) -> list[psutil.Process]:
        found = []
        for pid in psutil.pids():
            try:
                if os.getsid(pid) == self.pid and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    found.append(psutil.Process(pid))
            except (ProcessLookupError, PermissionError, psutil.Error):
                continue
        return found

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def _be(work: Callable[[], int], folder: Path, log: Path) -> None:
    code = 70
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.chdir(folder)
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ask(question: Callable[[], Any], folder: Path, log: Path) -> Any:
    """What `question`, asked by a child in `folder`, answers (plain JSON). RuntimeError with its last words where it fails."""
    answer = log.with_suffix(".answer")
    answer.unlink(missing_ok=True)

    def work() -> int:
        answer.write_text(json.dumps(question()))
        return 0

    log.unlink(missing_ok=True)
    child = Child(work, folder, log)
    if child.wait() != 0:
        raise RuntimeError(child.said()[-2000:])
    return json.loads(answer.read_text())
