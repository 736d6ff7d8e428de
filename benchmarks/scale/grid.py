"""Cells of the nano study on a local head: in DVC's order, in parallel, and in parallel but killed and begun again on the way."""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.campaign import study, warm
from benchmarks.campaign.with_ray import Run
from benchmarks.scale.stubs import ROOT
from pipelines.store import Store
from pipelines.workspace import spec_file
from stages.spec import Spec

KILLS = (0.3, 0.6)  # of the parallel run's time, since its beginning and since the first kill


def measure(folder: Path, *, cells: int, tokens: int) -> list[dict[str, Any]]:
    """One row for each way. cells: at least so many (six models on two budgets, or more). tokens: of the larger budget."""
    warm.load()
    template = _clone(folder / "clone", cells, tokens)
    data = Run(template, folder / "data", folder / "data.txt")
    _end(data, data.begin("pack", "items"))
    template.root = data.root
    processors = os.cpu_count() or 1
    rows, parallel = [], 0.0
    for how, cpus, ahead, kills in (
        ("in DVC's order, all processors each", processors, 0, ()),
        ("as many at once as there are processors", 1, 64, ()),
        ("the same, killed twice by kill -9 and begun again", 1, 64, KILLS),
    ):
        run = Run(template, folder / how.split(",")[0].replace(" ", "-") / "study", folder / "log.txt")
        params = copy.deepcopy(template.params)
        params["cluster"] |= {"workers": {"default": {"cpus": cpus}}, "ahead": ahead}
        run.clone.write(params)
        began, before = time.monotonic(), [{}]
        for share in kills:
            process = run.begin()
            deadline = time.monotonic() + share * parallel
            while time.monotonic() < deadline and process.poll() is None:
                time.sleep(0.1)
            while alive := run.processes():
                for one in alive:
                    one.kill()
            process.wait()
            before.append(run.ask(lambda: _standing()))
        _end(run, run.begin())
        wall = time.monotonic() - began
        parallel = parallel or (wall if ahead else 0.0)
        again = [why for facts in before for why in run.ask(lambda facts=facts: _again(facts))]
        attempts = run.ask(_attempts)
        print("\n".join(again), file=sys.stderr)
        rows.append(
            {"how": how, "cells": len(attempts), "tokens": tokens, "processors": processors, "wall s": wall, "kills": len(kills),
             "attempts": sum(attempts.values()), "complete, made again": len(again), "training s": run.ask(_training_seconds)}
        )  # fmt: skip
    return rows


def _clone(root: Path, cells: int, tokens: int) -> Any:
    from pipelines.reading import read
    from tests.pipelines.clone import Study

    root.mkdir(parents=True)
    made = Study(root, ray=True)
    made.environment |= {"OMP_NUM_THREADS": "1"}
    params = copy.deepcopy(read(ROOT / "pipelines" / "nano"))
    names = [name for name in ("gla", "mamba2", "mesa", "mesa-cg-2", "swa", "transformer") if name in params["models"]]
    budgets = [f"b{number}" for number in range(-(-cells // len(names)))]
    params |= {"root": ".", "study": "grid", "tasks": {}}
    params["grid"] = {"models": names, "scales": ["tiny"], "budgets": budgets}
    params["sweep"] = {"models": [], "scales": [], "budgets": []}
    params["budgets"] = {name: {"tokens": tokens // (number + 1)} for number, name in enumerate(reversed(budgets))}
    params["training"]["warmup_steps"] = min(params["training"]["warmup_steps"], 5)
    params["learning_rates"] = {name: {"tiny": dict.fromkeys(budgets, 1e-2)} for name in names}
    params["training"]["checkpoint_every"] = 10
    for source in params["data"]["sources"].values():
        source["files"] = [str(ROOT / "pipelines" / "nano" / name) for name in source["files"]]
    made.params = params
    made.write(params)
    made.commit("Ask for a grid")
    return made


def _end(run: Run, process: Any) -> None:
    if process.wait() != 0:
        raise RuntimeError(f"dvc repro failed:\n{run.said()}")
    run.wait_until_nothing_runs()


def _cells() -> list[str]:
    return sorted(path.stem for path in Path("specs/train").glob("*.json"))


def _standing() -> dict[str, Any]:
    return {f"{stage} {cell}": study.standing(stage, cell) for stage in ("train", "evaluate") for cell in _cells()}


def _again(before: dict[str, Any]) -> list[str]:
    return [f"{name}: {why}" for name, facts in before.items() for why in study.made_again(*name.split(), facts)]


def _attempts() -> dict[str, int]:
    """cell -> the number of its published training's attempt."""
    store = Store(Path(".strata").absolute())
    found = {cell: store.find(Spec.load(spec_file("train", cell)).key) for cell in _cells()}
    return {cell: int(folder.name) for cell, folder in found.items() if folder}


def _training_seconds() -> float:
    """Of all cells' last attempts together."""
    return sum(json.loads(path.read_text())["seconds"] for path in Path("provenance/train").glob("*.json"))
