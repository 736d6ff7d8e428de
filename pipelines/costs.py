"""What training a cell takes: hours on each kind of accelerator, and their cost."""

from __future__ import annotations

from dataclasses import dataclass

from pipelines.cells import model_of
from pipelines.params import Accelerator, Cell, Params


@dataclass(frozen=True)
class Cost:
    """Accelerator-hours, and what they cost in the accelerator's currency units."""

    hours: float = 0.0
    cost: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.hours + other.hours, self.cost + other.cost)


def flops(params: Params, cell: Cell) -> float:
    """Of the whole training, steps of a solver counted up to their cap."""
    length = params.packing.sequence_length
    return model_of(params, cell).flops(length, training=True) * params.steps(cell.budget) * params.training.batch * length


def on(chip: Accelerator, flops: float) -> Cost:
    """What so many FLOPs take on one kind of chip at its expected utilisation."""
    hours = flops / (chip.flops * chip.utilization) / 3600
    return Cost(hours, hours * chip.cost)


def of(params: Params, cell: Cell) -> Cost:
    """On the accelerator that the cell's worker names; nothing where it has none."""
    name = params.worker(cell.scale).accelerator
    return on(params.accelerators[name], flops(params, cell)) if name else Cost()
