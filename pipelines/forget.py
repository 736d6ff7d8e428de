"""`strata forget`: remove artifacts from the store, so that they are made again."""

from __future__ import annotations

import shutil
from pathlib import Path

from pipelines import workspace
from pipelines.params import cells
from pipelines.resolve import context, roles
from pipelines.run import root_of
from pipelines.store import Busy
from pipelines.upkeep import chosen, open_study


def forget(folder: Path, names: list[str]) -> list[str]:
    """Remove what `names` say: cells (both stages), sources, stages, "stage/cell", or beginnings of keys. Returns a line for each.

    ValueError for a name that is nothing of the study's, before anything is removed.
    """
    params, study, store = open_study(folder)
    named = chosen(study, names)
    lines = []
    for stage, cell in named:
        key = study[stage, cell].key
        try:
            removed = store.forget(key)
        except Busy as busy:
            raise ValueError(f"{stage} of {cell} is being made ({busy}); `strata stop {cell}` first.") from busy
        paths = [workspace.output(stage, cell, roles(params).get(cell)), workspace.provenance_file(stage, cell)]
        for target in (folder / path for path in paths + [workspace.history_file(cell)] * (stage == "train")):
            shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
        lines.append(f"{stage} {cell}: {'forgotten' if removed else 'was not in the store'} ({key[:12]}); `dvc repro` makes it again")
    groups = {cell.name: cell.group for cell in cells(params)}
    _from_dvc(folder, root_of(context(params), folder), [workspace.dvc_stage(stage, cell, groups.get(cell)) for stage, cell in named])
    return lines


def _from_dvc(folder: Path, root: Path, stages: list[str]) -> None:
    """Take stages out of dvc.lock and empty DVC's memory of runs, which would bring back what is forgotten; the store serves for the rest."""
    from dvc.utils.serialize import modify_yaml

    if (folder / "dvc.lock").exists():
        with modify_yaml(folder / "dvc.lock") as lock:
            for stage in stages:
                lock.get("stages", {}).pop(stage, None)
    shutil.rmtree(root / ".dvc" / "cache" / "runs", ignore_errors=True)
