"""`strata relock`: dvc.lock made anew from the store, training nothing. For a lock that is lost, damaged, or in conflict after a merge.

Every stage whose artifact is published is put in place as `strata run` does it, and `dvc commit` then records what stands there. What the
store lacks, and whatever depends on it, is left out: `dvc repro` makes that.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from pipelines import workspace
from pipelines.cells import Specs
from pipelines.resolve import resolve
from pipelines.run import store_of
from pipelines.store import Store

LOCK, DAMAGED = "dvc.lock", "dvc.lock.damaged"
AT_ONCE = 50  # stages of a `dvc commit`


def relock(folder: Path) -> Iterator[str]:
    """Make dvc.lock of the study in `folder` anew. A line for each stage that is not in it, and one for the whole. ValueError where DVC cannot."""
    study = resolve(folder)
    facts = workspace.context(folder)
    store = store_of(facts, folder)
    ready, missing = _place(study, store, facts, folder)
    lock = folder / LOCK
    before = lock.read_bytes() if lock.exists() else None
    if before is not None:
        os.replace(lock, folder / DAMAGED)
    stages = ["resolve", *(workspace.dvc_stage(stage, cell, facts["cells"].get(cell, {}).get("group")) for stage, cell in ready)]
    for start in range(0, len(stages), AT_ONCE):
        done = _dvc(folder, "commit", "--force", "--quiet", *stages[start : start + AT_ONCE])
        if done.returncode:
            raise ValueError(f"`dvc commit` refused: {(done.stderr or done.stdout).strip()} The lock as it was is {folder / DAMAGED}.")
    (folder / DAMAGED).unlink(missing_ok=True)
    yield from missing
    yield f"{lock}: {len(stages)} stages recorded from {store.where}, {len(missing)} left for `dvc repro`"


def _place(study: Specs, store: Store, facts: dict, folder: Path) -> tuple[list[tuple[str, str]], list[str]]:
    """Put what is published in place. Returns the stages that can be recorded, inputs first, and a line for each that cannot."""
    from pipelines.run import source_of

    data = facts["outputs"] == "files"
    ready: list[tuple[str, str]] = []
    missing: list[str] = []
    owners = {key: maker for maker, spec in study.items() for key in [spec.key]}
    for (stage, cell), spec in study.items():
        inputs = {facts["makers"][key][0] for key in spec.inputs.values()}
        waits = [owners[key] for key in inputs if owners[key] not in ready]
        try:
            made = None if waits else store.find(spec.key, workspace.placed(stage, data=data))
            why = f"waits for {' '.join(waits[0])}" if waits else "is not in the store"
        except ValueError as damaged:
            made, why = None, str(damaged)
        if made is None:
            missing.append(f"{stage} {cell} {why}")
            continue
        workspace.place(stage, cell, facts["roles"].get(cell), made, folder, data=data)
        assert source_of(stage, cell, facts) is None or (stage, source_of(stage, cell, facts)) in ready
        ready.append((stage, cell))
    return ready, missing


def _dvc(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"DVC_NO_ANALYTICS": "1"}
    return subprocess.run([sys.executable, "-m", "dvc", *arguments], cwd=folder, env=environment, capture_output=True, text=True)
