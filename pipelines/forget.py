"""`strata forget`: remove artifacts from the store, so that they are made again."""

from __future__ import annotations

import shutil
from pathlib import Path

from pipelines import workspace
from pipelines.cells import specs, version_table
from pipelines.params import load, nearest
from pipelines.resolve import context, roles
from pipelines.run import root_of, store_of
from pipelines.store import Busy

SHORTEST_KEY = 6
# DVC's memory of what commands made from what: it would bring back what is forgotten here. The store serves for the rest.
DVC_RUNS = Path(".dvc") / "cache" / "runs"


def forget(folder: Path, names: list[str]) -> list[str]:
    """Remove what `names` say: cells (both stages), sources, stages, "stage/cell", or beginnings of keys. Returns a line for each.

    ValueError for a name that is nothing of the study's, before anything is removed.
    """
    params = load(folder)
    study, store = specs(params, version_table()), store_of(context(params), folder)
    chosen: list[tuple[str, str]] = []
    for name in names:
        found = [
            (stage, cell)
            for (stage, cell), spec in study.items()
            if name in (stage, cell, f"{stage}/{cell}") or (len(name) >= SHORTEST_KEY and spec.key.startswith(name))
        ]
        if not found:
            raise ValueError(
                f"{name!r} is no cell, source, stage or key of this study; {nearest(name, sorted({cell for _, cell in study}))}"
            )
        chosen += found
    lines = []
    for stage, cell in dict.fromkeys(chosen):
        key = study[stage, cell].key
        try:
            removed = store.forget(key)
        except Busy as busy:
            raise ValueError(f"{stage} of {cell} is being made ({busy}); `strata stop {cell}` first.") from busy
        for path in (
            workspace.output(stage, cell, roles(params).get(cell)),
            workspace.provenance_file(stage, cell),
            workspace.history_file(cell),
        ):
            if path == workspace.history_file(cell) and stage != "train":
                continue
            target = folder / path
            shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
        shutil.rmtree(root_of(context(params), folder) / DVC_RUNS, ignore_errors=True)
        lines.append(f"{stage} {cell}: {'forgotten' if removed else 'was not in the store'} ({key[:12]}); `dvc repro` makes it again")
    return lines
