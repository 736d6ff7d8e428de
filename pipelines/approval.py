"""`strata approve`: a study that takes many accelerator-hours starts only once somebody has seen how many."""

from __future__ import annotations

import getpass
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipelines.ahead import Cells, unmade
from pipelines.costs import Cost
from pipelines.plan import hours
from pipelines.store import Store


def cost(context: dict[str, Any], cells: Cells) -> Cost:
    """Of the trainings among these."""
    return sum((Cost(**context["costs"][cell]) for stage, cell in cells if stage == "train"), Cost())


def describe(context: dict[str, Any], cells: Iterable[tuple[str, str]]) -> str:
    """One phrase: how many cells train, for how long, at what price."""
    trained = [(stage, cell) for stage, cell in cells if stage == "train"]
    total = cost(context, trained)
    price = f", {hours(total.hours)} accelerator-hours, cost {total.cost:,.0f}" if total.hours else ""
    return f"{len(trained)} cell{'s' if len(trained) != 1 else ''} to train{price}"


def require(context: dict[str, Any], store: Store, cells: Cells) -> None:
    """ValueError where these cells take more hours than the study may without having been approved."""
    total = cost(context, cells).hours
    if total <= max(context["confirm_hours"], _approved(store, context["study"])):
        return
    raise ValueError(
        f"The study {context['study']} has {describe(context, cells)}: more than cluster.confirm_hours ({context['confirm_hours']:g}). "
        "Look at `strata plan`, then `strata approve` lets it run."
    )


def approve(context: dict[str, Any], store: Store, folder: Path) -> str:
    """Let what is not made yet run. Returns what was approved."""
    cells = unmade(context, store, folder)
    record = {"hours": cost(context, cells).hours, "by": getpass.getuser(), "time": round(time.time(), 3)}
    store.objects.write(_name(context["study"]), (json.dumps(record, indent=1) + "\n").encode())
    return f"Approved: {describe(context, cells)}. `dvc repro` begins."


def _approved(store: Store, study: str) -> float:
    try:
        return float(json.loads(store.objects.read(_name(study)) or b"{}")["hours"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def _name(study: str) -> str:
    return f"studies/{study}/approved.json"
