"""The first stage: params.yaml and the version table to one spec file a stage and cell, and the study's context."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipelines import costs, slices, tuning, workspace
from pipelines.cells import Specs, makers, specs, version_table
from pipelines.params import Params, cells
from pipelines.reading import NAME, load
from stages.artifact import write_atomically
from stages.items import EXAMPLES, TEXT


def resolve(folder: Path = Path(".")) -> Specs:
    """Validate the whole study and write specs/ and context.json; remove outputs of cells that it no longer has.

    ValueError for a mistake, before anything is written. A params.yaml that changes meanwhile is read again, so that what
    DVC records of it afterwards is what the specs were made from.
    """
    while True:
        before = (folder / NAME).read_bytes() if (folder / NAME).is_file() else b""
        params = load(folder)
        study = specs(params, version_table())
        if (folder / NAME).read_bytes() != before:
            continue
        _write(folder, params, study)
        if (folder / NAME).read_bytes() == before:
            return study


def _write(folder: Path, params: Params, study: Specs) -> None:
    wanted = {folder / workspace.spec_file(stage, cell): spec for (stage, cell), spec in study.items()}
    for path in (folder / "specs").rglob("*") if (folder / "specs").is_dir() else ():
        if path.is_file() and path not in wanted:
            path.unlink()
    for path, spec in wanted.items():
        # One value a line: a person can read a change of it, and so can git.
        write_atomically(path, json.dumps(spec.model_dump(), indent=1, sort_keys=True) + "\n")
    write_atomically(folder / workspace.CONTEXT, json.dumps(context(params) | {"makers": makers(study)}, indent=1, sort_keys=True) + "\n")
    workspace.prune(set(study), roles(params), folder)
    for role in ("training", "validation", "evaluation"):
        (folder / "tokens" / role).mkdir(parents=True, exist_ok=True)  # a role without sources is an empty folder to DVC, not a missing one


def roles(params: Params) -> dict[str, str]:
    return {name: source.role for name, source in params.data.sources.items()}


def context(params: Params) -> dict[str, Any]:
    """What a stage needs to know of the place and what no result depends on."""
    return {
        "study": params.study,
        "root": params.root,
        "storage": params.cluster.storage,
        "outputs": params.outputs,
        "tracking": params.tracking,
        "retries": params.cluster.retries,
        "ahead": params.cluster.ahead,
        "confirm_hours": params.cluster.confirm_hours,
        "settings": {"checkpoint_every": params.training.checkpoint_every, "batch_tokens": params.evaluation.batch_tokens},
        "sources": {name: source.files for name, source in params.data.sources.items()},
        "items": task_files(params),
        "roles": roles(params),
        "cells": {cell.name: asdict(cell) for cell in cells(params)},
        "initial": {cell.name: source for cell in cells(params) if (source := tuning.source_of(params, cell))},
        "costs": {cell.name: asdict(costs.of(params, cell)) for cell in cells(params)},
        "workers": {cell.name: _workers(params, cell.scale) for cell in cells(params)} | {"default": _workers(params, "default")},
        "grows": [growth.model_dump() | _chip(params, growth.accelerator) for growth in params.cluster.grows],
        "code": {"how": params.cluster.code, "python": params.cluster.python, "image": params.cluster.image},
    }


def task_files(params: Params) -> dict[str, list[str]]:
    """The files of each unit of the items stage, and of each haystack's text."""
    behind = {"items": "", "examples": EXAMPLES, "generate.text": TEXT}
    return {name + behind[place]: source.files for name, task in params.tasks.items() for place, source in task.sources().items()}


def _workers(params: Params, scale: str) -> list[dict[str, Any]]:
    """The workers of a scale in order of preference, each with what its accelerator is."""
    return [
        worker.model_dump() | {"count": worker.chips, "chip": _chip(params, worker.accelerator) if worker.accelerator else None}
        for worker in params.workers(scale)
    ]


def _chip(params: Params, name: str | None) -> dict[str, Any]:
    """An accelerator as params.yaml has it, with Ray's type of it; of none, that it is none."""
    if name is None:
        return {"kind": "cpu", "type": None}
    chip = params.accelerators[name]
    typed = None if chip.kind == "cpu" or chip.type == "any" else chip.type or slices.ray_type(name, chip.kind)
    return chip.model_dump() | {"name": name, "type": typed}
