"""What tells a process from a later one of the same number, though the clock may be set meanwhile."""

from __future__ import annotations

from typing import Any

import psutil

TOLERANCE = 2.0  # seconds: Linux states the time of its boot in whole ones


def started(process: psutil.Process) -> float:
    """When it began, in seconds since the machine's boot: the time of day of both moves with a clock that is set, their difference does not."""
    return round(process.create_time() - psutil.boot_time(), 2)


def identity(process: psutil.Process) -> dict[str, Any]:
    """What tells a process from a later one of the same number."""
    return {"pid": process.pid, "started": started(process)}


def runs(who: dict[str, Any] | None) -> bool:
    """Whether that very process still runs (a zombie does not)."""
    try:
        process = psutil.Process(who["pid"]) if who else None
        return process is not None and abs(started(process) - who["started"]) < TOLERANCE and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, KeyError, TypeError, ValueError, OverflowError):  # it ended, or the record of it is damaged
        return False
