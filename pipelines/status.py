"""`strata status`, `strata logs` and `strata stop`: what runs now, how far it is, and what failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipelines import secrets
from pipelines.cells import Specs, specs, version_table
from pipelines.mistakes import nearest
from pipelines.plan import hours
from pipelines.reading import load
from pipelines.resolve import context, roles
from pipelines.run import store_of
from pipelines.states import last_progress, states
from pipelines.store import Store
from pipelines.work import LOG


def _open(folder: Path) -> tuple[Specs, Store, dict[str, str]]:
    params = load(folder)
    return specs(params, version_table()), store_of(context(params), folder), roles(params)


def last_outcome(store: Store, key: str) -> dict[str, Any]:
    """How the newest attempt at a key ended; {} while it runs or where there was none."""
    for attempt in store.attempts(key)[:1]:
        try:
            return dict(json.loads((attempt / "outcome.json").read_text()))
        except (OSError, ValueError):
            return {}
    return {}


def show(folder: Path) -> None:
    """A line a stage and cell on the terminal."""
    from rich.console import Console
    from rich.table import Table

    study, store, source_roles = _open(folder)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in (
        ("stage", "left"),
        ("cell", "left"),
        ("state", "left"),
        ("progress", "right"),
        ("tokens/s", "right"),
        ("loss", "right"),
        ("left", "right"),
        ("", "left"),
    ):
        table.add_column(name, justify=justify, no_wrap=bool(name))  # type: ignore[arg-type]
    for (stage, cell), state in states(study, source_roles, store, folder).items():
        attempts = store.attempts(study[stage, cell].key)
        line = last_progress(attempts[0]) if attempts and state.state != "done" else {}
        outcome = last_outcome(store, study[stage, cell].key)
        failed = state.state == "to run" and outcome.get("status") == "failed"
        left = line.get("seconds_left")
        table.add_row(
            stage, cell, "[red]failed[/]" if failed else state.state, f"{line['step']}/{line['of']}" if "step" in line and "of" in line else "",
            f"{line['tokens_per_second']:,.0f}" if line.get("tokens_per_second") else "", f"{line['loss']:.3f}" if line.get("loss") else "",
            f"{hours(left / 3600)} h" if left and state.state == "running" else "", (outcome.get("error") or "").strip().splitlines()[-1] if failed else "",
        )  # fmt: skip
    Console().print(table)


def _stages(folder: Path, cell: str) -> tuple[list[tuple[str, str]], Store]:
    """(stage, key) of all that is made of a cell or source, and the store. ValueError for a name that the study does not have."""
    study, store, _ = _open(folder)
    if cell not in {name for _, name in study}:
        raise ValueError(f"{cell!r} is no cell of this study; {nearest(cell, [name for _, name in study])}")
    return [(stage, spec.key) for (stage, name), spec in study.items() if name == cell], store


def logs(folder: Path, cell: str) -> str:
    """What the newest attempt at each stage of a cell printed, how it ended, and where its files are."""
    found = []
    stages, store = _stages(folder, cell)
    for stage, key in stages:
        for attempt in store.attempts(key)[:1]:
            outcome = last_outcome(store, key)
            ended = "runs" if store.alive(key) else outcome.get("status", "ended without a word")
            log = attempt / LOG
            text = secrets.covered(log.read_text(errors="replace")).rstrip() if log.is_file() else (outcome.get("error") or "").rstrip()
            found.append(f"{stage} {cell}, attempt {attempt.name}: {ended} ({attempt})" + (f"\n{text}" if text else ""))
    return "\n\n".join(found) or f"Nothing of {cell} has been begun."


def stop(folder: Path, cell: str) -> str:
    """Ask the running stage of a cell to save its work and stop."""
    stages, store = _stages(folder, cell)
    for stage, key in stages:
        if store.ask_to_stop(key):
            return f"{stage} of {cell} is asked to stop; it saves a checkpoint first."
    return f"{cell} is not running."
