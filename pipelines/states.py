"""What is made, what is not, and why: each stage and cell of a study held against its folder and the store."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines import workspace
from pipelines.cells import Specs
from pipelines.store import Store
from stages import provenance
from stages.spec import Spec


@dataclass(frozen=True)
class State:
    """state: done, running, stale (made under other parameters) or to run. why: one phrase, for all but done."""

    state: str
    why: str = ""
    commit: str | None = None


def states(study: Specs, roles: dict[str, str], store: Store, folder: Path) -> dict[tuple[str, str], State]:
    """The state of every stage and cell. Reads small local files only."""
    with store.looking():
        return {(stage, cell): _state(stage, cell, spec, study, roles.get(cell), store, folder) for (stage, cell), spec in study.items()}


def _state(stage: str, cell: str, spec: Spec, study: Specs, role: str | None, store: Store, folder: Path) -> State:
    here = folder / workspace.output(stage, cell, role)
    try:
        placed = workspace.record(here)
    except ValueError:
        placed = None
    if placed and placed["key"] == spec.key:
        return State("done", commit=_commit(folder / workspace.provenance_file(stage, cell)))
    try:
        published = store.find(spec.key, {provenance.NAME}.__contains__)
    except ValueError as damaged:
        return State("to run", str(damaged))
    if published:
        return State("done", commit=_commit(published / provenance.NAME))
    if attempt := store.alive(spec.key):
        return State("running", _progress(attempt))
    if placed:
        return State("stale", _difference(store, placed["key"], spec))
    if attempts := store.attempts(spec.key):
        return State("to run", f"begun: {_progress(attempts[0])}")
    missing = [name for name, key in spec.inputs.items() if any(other.key == key and _unmade(store, key) for other in study.values())]
    return State("to run", f"never made; waits for {missing[0]}" if missing and stage != "train" else "never made")


def _unmade(store: Store, key: str) -> bool:
    return not store.published(key)


def _commit(path: Path) -> str | None:
    try:
        return json.loads(path.read_text()).get("commit")
    except (OSError, ValueError):
        return None


def last_progress(attempt: Path) -> dict[str, Any]:
    """The last whole line of an attempt's progress file; {} where there is none."""
    try:
        with (attempt / "progress.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 8192))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            return dict(json.loads(line))
        except ValueError:
            continue
    return {}


def _progress(attempt: Path) -> str:
    line = last_progress(attempt)
    return f"{line['step']} of {line['of']}" if "step" in line and "of" in line else "at its start"


def _difference(store: Store, old_key: str, new: Spec) -> str:
    """What differs between the spec something was made under and the one it should be made under."""
    try:
        old = Spec.model_validate_json(store.spec(old_key) or "")
    except ValueError:
        return "made under other parameters"
    before, after = old.model_dump(), new.model_dump()
    changes = [
        f"{name} {_short(was)} -> {_short(now)}"
        for part in ("parameters", "versions")
        for name, was, now in leaves(before[part], after[part])
    ]
    changes += [f"its input {name} changes" for name, _, _ in leaves(before["inputs"], after["inputs"])]
    return "; ".join(changes[:3]) + (f"; {len(changes) - 3} more" if len(changes) > 3 else "")


def leaves(before: Any, after: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted name, before, after) of every leaf that differs between two plain values."""
    if isinstance(before, dict) and isinstance(after, dict):
        found = []
        for key in sorted({*before, *after}):
            found += leaves(before.get(key), after.get(key), f"{name}.{key}" if name else str(key))
        return found
    return [] if before == after else [(name, before, after)]


def _short(value: Any) -> str:
    text = "the default" if value is None else json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
