"""What the desk's commands take by the number of a study's cells."""

from __future__ import annotations

import contextlib
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.scale import stubs
from pipelines import ahead, workspace
from pipelines.store import Store


def measure(folder: Path, cells: int) -> dict[str, Any]:
    """Wall seconds (processor seconds beside them, which a busy machine does not stretch) of each command."""
    made = stubs.clone(folder, cells)

    def timed(*command: str) -> tuple[float, float]:
        before, began = _used(), time.perf_counter()
        done = subprocess.run([sys.executable, "-m", *command], cwd=folder, env=made.environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-1500:]}{done.stderr[-1500:]}")
        if command[:2] == ("dvc", "repro") and len(command) == 2 and "Running stage" in done.stdout:
            raise RuntimeError(f"a dvc repro with nothing to do ran stages:\n{done.stdout[-1500:]}")
        return time.perf_counter() - began, _used() - before

    row: dict[str, Any] = {"cells": cells}

    def add(name: str, seconds: tuple[float, float]) -> None:
        row[f"{name} s"], row[f"{name} cpu s"] = seconds

    add("resolve", timed("pipelines", "run", "resolve"))
    artifacts = stubs.place_all(folder)
    row["stages"] = stubs.lock(folder)
    add("plan", timed("pipelines", "plan"))
    add("dvc repro, nothing to do", timed("dvc", "repro"))
    add("dvc status", timed("dvc", "status"))
    cell = sorted((folder / "specs" / "train").glob("*.json"))[0].stem
    _unlock(folder, f"train@{cell}")
    add("dvc repro -s, one cell collected", timed("dvc", "repro", "-s", f"train@{cell}"))
    with contextlib.chdir(folder):
        began = time.process_time()
        unmade = ahead.unmade(workspace.context(), Store(folder / "empty"))
        row["what is unmade, cpu s"] = time.process_time() - began
    return row | {"artifacts": artifacts, "unmade": len(unmade), "dvc.lock MB": (folder / "dvc.lock").stat().st_size / 1e6}


def _used() -> float:
    """Processor seconds of the children that have ended."""
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


def _unlock(folder: Path, stage: str) -> None:
    from dvc.utils.serialize import modify_yaml

    with modify_yaml(folder / "dvc.lock") as locked:
        del locked["stages"][stage]
