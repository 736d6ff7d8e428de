"""A study's folder: where each stage's outputs stand in it, and what the last `resolve` wrote down of the place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipelines.files import link, link_tree
from stages import artifact, provenance
from stages.command import HISTORY, WORKSPACE, default_input
from stages.spec import Spec

CONTEXT = Path("context.json")
BULK = ("tokenize", "pack", "train")  # what `outputs: pointers` leaves in the store
STAGES = ("vocabulary", "tokenize", "pack", "items", "train", "evaluate", "analyze")
# What an attempt's folder holds beside the artifact: the work's own, never an output.
WORKING = ("checkpoints", "progress.jsonl", HISTORY, "heartbeat", "outcome.json", "log.txt", "stop", "published", provenance.NAME)


def spec_file(stage: str, cell: str) -> Path:
    return Path("specs") / stage / f"{cell}.json"


def output(stage: str, cell: str, role: str | None = None) -> Path:
    """The folder of a stage's artifact, seen from the study's. role: of the source, for tokenize."""
    match stage:
        case "tokenize":
            return Path("tokens") / str(role) / cell
        case "pack":
            return Path("packed")
        case "train":
            return Path(WORKSPACE["weights"].format(cell=cell))
        case "evaluate":
            return Path("evaluations") / cell
        case "analyze":
            return Path("analysis")
    return Path(stage)


def dvc_stage(stage: str, cell: str, group: str | None = None) -> str:
    """What dvc.yaml calls a stage of a cell. group: the table of params.yaml that selects the cell."""
    if stage == cell:
        return stage
    return f"{stage}@{cell}" if group in (None, "grid") else f"{stage}-{group}@{cell}"


def history_file(cell: str) -> Path:
    return Path("history") / f"{cell}.parquet"


def provenance_file(stage: str, cell: str) -> Path:
    return Path("provenance") / stage / f"{cell}.json"


def inputs(spec: Spec, cell: str, source: str | None = None) -> dict[str, Path]:
    """Where each input of a spec stands in the study's folder. source: the cell whose weights a training starts from."""
    return {name: default_input(name, cell, source) for name in spec.inputs}


def place(stage: str, cell: str, role: str | None, made: Path, folder: Path = Path("."), *, data: bool = True) -> None:
    """Link a published artifact's files to where the study keeps them. With data=False, of a bulk artifact its records alone (`outputs: pointers`)."""
    target = folder / output(stage, cell, role)
    shutil.rmtree(target, ignore_errors=True)
    wanted = placed(stage, data=data)
    link_tree(made, target, lambda name: _is_output(name) and wanted(name))
    records = {provenance.NAME: provenance_file(stage, cell)} | ({HISTORY: history_file(cell)} if stage == "train" else {})
    for name, place in records.items():
        if not (made / name).is_file():
            raise ValueError(f"The store's {stage} of {cell} lacks {name}: `strata forget {stage}/{cell}` has it made again.")
        link(made / name, folder / place)


def placed(stage: str, *, data: bool) -> Callable[[str], bool]:
    """Whether a study's folder has a file of an artifact: all of them, or of a bulk artifact (tokens, packed rows, weights) only what is small."""
    if data or stage not in BULK:
        return lambda name: True
    small = ("budgets/",) if stage == "pack" else ()  # what training depends on: always here
    return lambda name: name.endswith(artifact.NAME) or name in (provenance.NAME, HISTORY) or name.startswith(small)


def record(folder: Path) -> dict[str, Any]:
    """The record of an output, with its data or without (`outputs: pointers`). ValueError where it is damaged, or has some of its data."""
    found = artifact.read(folder, data=False)
    data = [name for name in found["files"] if not name.endswith(".json")]
    return artifact.read(folder) if not data or any((folder / name).exists() for name in data) else found


def _is_output(name: str) -> bool:
    first = name.split("/")[0]
    return first not in WORKING and not first.startswith(".")


def context(folder: Path = Path(".")) -> dict[str, Any]:
    """What `resolve` wrote down of the place. ValueError where it has not run."""
    try:
        return json.loads((folder / CONTEXT).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / CONTEXT} is not readable ({error}); `strata run resolve` in the study's folder writes it.") from error


def prune(wanted: set[tuple[str, str]], roles: dict[str, str], folder: Path = Path(".")) -> list[Path]:
    """Remove from the study's folder the outputs of what it no longer has; the store keeps them. Returns what went.

    wanted: (stage, cell) of every spec. roles: tokenize's source -> role.
    """
    keep = {output(stage, cell, roles.get(cell)) for stage, cell in wanted}
    keep |= {history_file(cell) for stage, cell in wanted if stage == "train"}
    keep |= {provenance_file(stage, cell) for stage, cell in wanted}
    parents = [
        Path("weights"),
        Path("evaluations"),
        Path("history"),
        *(Path("tokens") / role for role in ("training", "validation", "evaluation")),
    ]
    parents += [Path("provenance") / stage for stage in STAGES]
    gone = []
    for parent in parents:
        for path in (folder / parent).iterdir() if (folder / parent).is_dir() else ():
            name = path.relative_to(folder)
            if name not in keep and not path.name.startswith("."):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                gone.append(name)
    return gone
