"""A study's results as analyze is given them: exactly the cells of its spec, each input checked against its key."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from stages import artifact, schemas
from stages.course import COURSES
from stages.evaluation.parameters import TRAINED, VALIDATION
from stages.report.parameters import Cell, Parameters
from stages.spec import Spec


@dataclass(frozen=True)
class Run:
    """One cell's results. history: column -> values, a step each. perplexity, domains, scores, internals, memory: the rows of its evaluation's tables;
    internals_course, memory_course: of what was seen while it was trained."""

    cell: Cell
    history: dict[str, np.ndarray]
    perplexity: list[dict[str, Any]]
    folder: Path
    domains: list[dict[str, Any]] = field(default_factory=list)
    scores: list[dict[str, Any]] = field(default_factory=list)
    internals: list[dict[str, Any]] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)
    internals_course: list[dict[str, Any]] = field(default_factory=list)
    memory_course: list[dict[str, Any]] = field(default_factory=list)

    @property
    def place(self) -> tuple[str, str]:
        """What two cells share that may be compared: scale and budget."""
        return self.cell.scale, self.cell.budget

    @property
    def names(self) -> dict[str, str]:
        """The columns that say which cell a table's row belongs to."""
        return {name: getattr(self.cell, name) for name in ("cell", "model", "scale", "budget")}

    @property
    def accelerator_hours(self) -> float | None:
        """Of training: the steps' seconds on every device. None where the history does not say how many these were."""
        seconds, devices = self.history["seconds"].astype(np.float64), self.history.get("devices")
        if devices is None or not len(seconds):
            return None
        spent = seconds * devices.astype(np.float64)
        return None if np.isnan(spent[np.isfinite(seconds)]).any() else float(np.nansum(spent)) / 3600

    @property
    def tokens_per_second(self) -> float | None:
        """Of training, on each device: the median over steps. None where the history does not say, or not of how many devices."""
        if (devices := self.history.get("devices")) is None:
            return None
        rates = self.history["tokens_per_second"].astype(np.float64) / devices.astype(np.float64)
        return float(np.median(rates[np.isfinite(rates)])) if np.isfinite(rates).any() else None

    def has(self, text: str, length: int, setting: str) -> bool:
        return any((row["set"], row["length"], row["setting"]) == (text, length, setting) for row in self.perplexity)

    def nlls(self, text: str, length: int, setting: str = TRAINED, *, from_start: bool = False) -> list[np.ndarray]:
        """The losses of a set's sequences in the set's order: float32, NaN where not scored. from_start: only those at their document's start."""
        return list(_nlls(self._unit(text, length, setting) / "nll.parquet", from_start))

    def positions(self, text: str, length: int, setting: str = TRAINED) -> tuple[np.ndarray, np.ndarray]:
        """(nll_sum [L], count [L]) of a set by position, over the sequences at their document's start."""
        table = schemas.read(self._unit(text, length, setting) / "positions.parquet", "positions").sort_by("position")
        return table["nll_sum"].to_numpy(), table["count"].to_numpy()

    def items(self, task: str, shots: int = 0) -> list[dict[str, Any]]:
        """The item and the score of every item of a task, as trained."""
        return schemas.read(self.folder / f"{task}@{shots}" / "tasks.parquet", "tasks").select(["item", "score"]).to_pylist()

    def _unit(self, text: str, length: int, setting: str) -> Path:
        return self.folder / (f"{text}-{length}-{setting}" if setting else f"{text}-{length}")


@lru_cache(maxsize=4)  # a baseline is read for each of those that are compared with it
def _nlls(path: Path, from_start: bool) -> tuple[np.ndarray, ...]:
    table = schemas.read(path, "nll").sort_by("sequence")
    if from_start:
        table = table.filter(pc.equal(table["start"], 0))
    values, offsets = (lambda lists: (lists.flatten().to_numpy(), lists.offsets.to_numpy()))(table["nll"].combine_chunks())
    return tuple(np.split(values, (offsets - offsets[0])[1:-1])) if table.num_rows else ()


def _rows_of(evaluation: Path, name: str) -> list[dict[str, Any]]:
    """A table that an evaluation has where there is something in it."""
    file = f"internals/{name}.parquet" if name in ("internals", "memory") else f"{name}.parquet"
    return schemas.read(evaluation / file, name).to_pylist() if file in artifact.read(evaluation)["files"] else []


def trained_length(perplexity: list[dict[str, Any]]) -> int | None:
    """The length of training: that of the packed validation rows; the shortest evaluated where these were not."""
    return min(
        (row["length"] for row in perplexity if row["set"] == VALIDATION), default=min((row["length"] for row in perplexity), default=None)
    )


@dataclass(frozen=True)
class Study:
    """All runs, in the spec's order."""

    parameters: Parameters
    spec: Spec
    runs: list[Run]
    digests: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, parameters: Parameters, spec: Spec, inputs: dict[str, Path]) -> Study:
        """Read histories and perplexities. ValueError where an input is missing, damaged, or of another key."""
        _nlls.cache_clear()  # another study's files may lie where these do
        runs, digests = [], {}
        for cell in parameters.cells:
            history, evaluation = f"history/{cell.cell}", f"evaluations/{cell.cell}"
            for name in (history, evaluation):
                if name not in spec.inputs or name not in inputs:
                    raise ValueError(
                        f"The spec lists cell {cell.cell!r} but not its input {name!r}; `strata run resolve` writes the spec anew."
                    )
            facts = schemas.metadata(inputs[history], "history")
            if facts["strata.digest"] != schemas.data_digest(inputs[history]):
                raise ValueError(
                    f"{inputs[history]} does not hold the data that was recorded. Delete it and train {cell.cell} again: its weights are kept."
                )
            if facts["strata.key"] != spec.inputs[history]:
                found, wanted = facts["strata.key"][:12], spec.inputs[history][:12]
                raise ValueError(
                    f"{inputs[history]} was made under key {found}, wanted {wanted}: it belongs to other parameters. Train {cell.cell} again."
                )
            digests[history] = facts["strata.digest"]
            digests[evaluation] = artifact.read(inputs[evaluation], key=spec.inputs[evaluation], content=True)["digest"]
            columns = schemas.read(inputs[history], "history")
            runs.append(
                Run(
                    parameters.compared_as(cell),
                    {name: columns[name].to_numpy(zero_copy_only=False) for name in columns.column_names},
                    schemas.read(inputs[evaluation] / "perplexity.parquet", "perplexity").to_pylist(),
                    inputs[evaluation],
                    *(_rows_of(inputs[evaluation], name) for name in ("domains", "scores", "internals", "memory", *COURSES.values())),
                )
            )
        return cls(parameters, spec, runs, digests)

    @property
    def compared(self) -> list[Run]:
        """The runs that are compared with each other: all but the sweep over CG steps in training."""
        return [run for run in self.runs if run.cell.group != "sweep"]

    @property
    def places(self) -> list[tuple[str, str]]:
        """(scale, budget) of the compared runs, in the spec's order."""
        return list(dict.fromkeys(run.place for run in self.compared))

    @property
    def length(self) -> int | None:
        """The length that the cells were trained at."""
        return trained_length([row for run in self.runs for row in run.perplexity])

    def evaluated(self, runs: list[Run]) -> list[tuple[str, int]]:
        """(set, length) that some run was evaluated on as trained, in the evaluations' order, short lengths first."""
        found = dict.fromkeys((row["set"], row["length"]) for run in runs for row in run.perplexity if row["setting"] == TRAINED)
        return sorted(found, key=lambda item: item[1])

    @property
    def headline(self) -> tuple[str, int] | None:
        """(set, length) that cells are ranked by: the headline set at the training length, else the first that was evaluated there."""
        found = [item for item in self.evaluated(self.compared) if item[1] == self.length]
        wanted = (self.parameters.headline, self.length)
        return wanted if wanted in found else found[0] if found else None

    def baseline(self, run: Run) -> Run | None:
        """The baseline at a run's scale and budget; None for the baseline itself and where there is none."""
        name = self.parameters.baseline
        found = [other for other in self.compared if other.place == run.place and other.cell.model == name]
        return found[0] if found and found[0] is not run and run.cell.group != "sweep" else None

    def trained_with_all_steps(self, run: Run) -> Run | None:
        """What a cell of the training sweep is compared with: the grid's cell of the same layer, scale and budget."""
        found = [o for o in self.compared if o.place == run.place and o.cell.layer == run.cell.layer]
        return found[0] if found else None
