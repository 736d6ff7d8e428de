"""`strata plan`: what a study is, what it takes, what will run and why; before anything runs, and without torch or jax."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipelines import costs
from pipelines.cells import Specs, model_of, specs, version_table
from pipelines.params import Cell, Params, cells
from pipelines.resolve import roles
from pipelines.states import State, states
from pipelines.store import Store

GIB = 1 << 30
TOKEN_BYTES = 2  # uint16; a vocabulary beyond 65,536 takes 4
# Bytes a parameter: float32 weight, gradient and AdamW's two moments.
TRAINING_BYTES = 16
# Bytes of activations kept for the backward pass, a token and block, in units of the width (bfloat16, block inputs and branches).
ACTIVATION_BYTES = 34


@dataclass(frozen=True)
class CellPlan:
    """One cell: counts, FLOPs of training, GiB of memory (a micro-batch of one sequence) and disk, hours and cost by accelerator."""

    cell: str
    model: str
    scale: str
    budget: str
    group: str
    parameters: int
    tokens: int
    steps: int
    flops: float
    cg_share: float
    memory_gib: float
    disk_gib: float
    hours: dict[str, float]
    cost: dict[str, float]
    state: str
    why: str
    commit: str | None


@dataclass(frozen=True)
class Plan:
    study: str
    cells: list[CellPlan]
    stages: dict[str, State]
    data_gib: float

    def to_json(self) -> dict[str, Any]:
        return {
            "study": self.study,
            "cells": [asdict(cell) for cell in self.cells],
            "stages": {name: asdict(state) for name, state in self.stages.items()},
            "data_gib": self.data_gib,
        }


def plan(params: Params, store: Store, folder: Path) -> Plan:
    """The whole study from local state."""
    study = specs(params, version_table())
    found = states(study, roles(params), store, folder)
    made = [_cell(params, cell, study, found) for cell in cells(params)]
    others = {
        f"{stage}@{name}" if stage == "tokenize" else stage: state
        for (stage, name), state in found.items()
        if stage not in ("train", "evaluate")
    }
    longest = max(params.steps(cell.budget) for cell in cells(params)) * params.training.batch * params.packing.sequence_length
    return Plan(params.study, made, others, round(2 * TOKEN_BYTES * longest / GIB, 3))


def _cell(params: Params, cell: Cell, study: Specs, found: dict[tuple[str, str], State]) -> CellPlan:
    model = model_of(params, cell)
    length = params.packing.sequence_length
    steps = params.steps(cell.budget)
    tokens = steps * params.training.batch * length
    per_token = model.flops(length, training=True)
    flops = costs.flops(params, cell)
    state = _merged(found["train", cell.name], found["evaluate", cell.name], model.trainable)
    by_chip = {name: costs.on(chip, flops) for name, chip in params.accelerators.items()}
    return CellPlan(
        cell=cell.name,
        model=cell.model,
        scale=cell.scale,
        budget=cell.budget,
        group=cell.group,
        parameters=model.parameters,
        tokens=tokens,
        steps=steps,
        flops=flops,
        cg_share=1 - model.flops(length, steps=0, training=True) / per_token,
        memory_gib=round(_memory(params, cell, model.parameters) / GIB, 3),
        disk_gib=round(_disk(params, cell, model.parameters) / GIB, 3),
        hours={name: round(takes.hours, 3) for name, takes in by_chip.items()},
        cost={name: round(takes.cost, 2) for name, takes in by_chip.items()},
        state=state.state,
        why=state.why,
        commit=state.commit,
    )


def _memory(params: Params, cell: Cell, parameters: int) -> float:
    """Bytes at training's peak with a micro-batch of one sequence: weights, gradients, moments, activations, float32 logits and their gradient."""
    scale, length = params.scales[cell.scale], params.packing.sequence_length
    activations = ACTIVATION_BYTES * length * scale.width * scale.layers
    return TRAINING_BYTES * parameters + activations + 2 * 4 * length * params.vocabulary.size


def _disk(params: Params, cell: Cell, parameters: int) -> float:
    """Bytes that a cell keeps: weights, and while it trains two checkpoints of weights and moments."""
    return 4 * parameters + 2 * 12 * parameters


def _merged(trained: State, evaluated: State, unavailable: str | None) -> State:
    """A cell's state from its two stages'."""
    if trained.state != "done":
        return State("unavailable", unavailable) if unavailable else trained
    if evaluated.state == "done":
        return State("done", commit=trained.commit)
    return State(evaluated.state, f"evaluate: {evaluated.why}", trained.commit)


def show(plan: Plan, params: Params) -> None:
    """The plan as tables on the terminal."""
    from rich.console import Console
    from rich.table import Table

    chips = list(params.accelerators)
    kinds = list({chip.flops * chip.utilization: name for name, chip in reversed(params.accelerators.items())}.values())[::-1][:2]
    console = Console()
    console = console if console.is_terminal else Console(width=max(console.width, 132))
    table = Table(title=f"{plan.study}: {len(plan.cells)} cells", title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column("cell", no_wrap=True)
    for name in ("params", "tokens", "steps", "FLOPs", "CG", "mem GiB", "disk GiB", *(f"{chip} h" for chip in kinds), "cost"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("why", overflow="fold", ratio=1)
    colour = {"done": "green", "running": "cyan", "to run": "yellow", "stale": "magenta", "unavailable": "red"}
    for cell in plan.cells:
        table.add_row(
            cell.cell, count(cell.parameters), count(cell.tokens), f"{cell.steps:,}", f"{cell.flops:.1e}", f"{cell.cg_share:.0%}" if cell.cg_share else "",
            f"{cell.memory_gib:.3g}", f"{cell.disk_gib:.3g}", *(hours(cell.hours[chip]) for chip in kinds),
            f"{min(cell.cost.values()):,.0f}" if cell.cost else "", f"[{colour[cell.state]}]{cell.state}[/]", cell.why,
        )  # fmt: skip
    console.print(table)
    todo = [cell for cell in plan.cells if cell.state != "done"]
    console.print()
    for chip in chips:
        total, cost = sum(cell.hours[chip] for cell in todo), sum(cell.cost[chip] for cell in todo)
        console.print(
            f"{chip}: {hours(total)} h for the {len(todo)} cells not done, cost {cost:,.0f} at {params.accelerators[chip].utilization:.0%} of {params.accelerators[chip].flops:.3g} FLOP/s"
        )
    console.print(
        f"data: {plan.data_gib:,.3g} GiB of tokens and packed rows; cells: {sum(cell.disk_gib for cell in plan.cells):,.0f} GiB if all train at once, {sum(4 * cell.parameters for cell in plan.cells) / GIB:,.0f} of weights after"
    )
    waiting = {name: state for name, state in plan.stages.items() if state.state != "done"}
    console.print("other stages: " + ("; ".join(f"{name} {state.state} ({state.why})" for name, state in waiting.items()) or "all done"))


def count(value: float) -> str:
    """A count as a person reads it: 145.97M, 15.0B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.2f}{unit}"
    return f"{value:.0f}"


def hours(value: float) -> str:
    """Hours with as many digits as they deserve."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"
