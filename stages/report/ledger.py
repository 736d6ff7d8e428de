"""The ledger: every figure that a paper prints, beside ours where the study has that cell and evaluated it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stages.evaluation.parameters import TRAINED
from stages.report.paper import MEAN, MEANS, NEEDLES, Figure, Names, plain, printed, rule
from stages.report.study import Run, Study, trained_length

RUN, NOT_RUN = "run", "not run"
ELSEWHERE = {  # figures that no stage measures, and what does
    "decoding": "no stage of this study measures it; `python -m benchmarks decode` does",
    "word_perplexity": "no stage of this study measures it; lm-eval's wikitext does (docs/tasks.md)",
}
OF_NO_CELL = {"kernel_throughput": "it is of a kernel, not of a cell; `python -m benchmarks kernels` times ours"}
CLOSED = "closed_book"  # the group of recall sets without passages: they are no figure of the paper's


@dataclass(frozen=True)
class Ours:
    """Our figure. names: what it is of, by our names. std: over draws or types. items: evaluated for it. note: what makes it another than the paper's."""

    value: float
    names: list[str]
    std: float | None = None
    items: int | None = None
    note: str | None = None


@dataclass(frozen=True)
class Lacking:
    """Why there is none of ours."""

    why: str


@dataclass
class Results:
    """What one cell offers to be set beside a paper's figures, by the paper's plain names. all: of every cell, by the paper's scale, budget and model."""

    run: Run
    paper: str
    names: Names
    all: dict[tuple[str, ...], Results]
    perplexity: dict[tuple[str, int], dict[str, Any]] = field(init=False)
    scores: dict[tuple[str, int, str], list[dict[str, Any]]] = field(init=False)

    def __post_init__(self) -> None:
        self.perplexity = {(self.names(row["set"]), row["length"]): row for row in self.run.perplexity if row["setting"] == TRAINED}
        self.scores = {}
        for row in self.run.scores:
            if row["group"] != CLOSED:
                self.scores.setdefault((self.names(row["task"]), row["shots"], plain(row["setting"])), []).append(row)

    def find(self, figure: Figure, those: list[Figure]) -> Ours | Lacking:
        """Ours of a figure; those: the paper's figures of this cell, over which its means are."""
        finders: dict[str, Callable[[Figure, list[Figure]], Ours | Lacking]] = {
            "perplexity": self._perplexity,
            "niah": self._needles,
            "learning_rate": self._learning_rate,
            "task_perplexity": self._task_perplexity,
            "throughput": self._throughput,
            "slowdown": self._slowdown,
        } | dict.fromkeys(("tasks", "recall", "scrambling", "translation", "groups", "solver"), self._score)
        if figure["table"] not in finders:
            return Lacking(ELSEWHERE.get(figure["table"], "no stage of this study measures it"))
        return finders[figure["table"]](figure, those)

    def _perplexity(self, figure: Figure, those: list[Figure]) -> Ours | Lacking:
        sets = [figure["metric"]]
        if figure["metric"] == MEAN:
            sets = [o["metric"] for o in those if (o["table"], o["length"]) == ("perplexity", figure["length"]) and o["metric"] != MEAN]
        found = {name: self.perplexity.get((plain(name), figure["length"])) for name in sets}
        return _mean_of(found, "perplexity", "set")

    def _score(self, figure: Figure, those: list[Figure]) -> Ours | Lacking:
        setting, shots = plain(figure["setting"]), figure["shots"] or 0
        members = MEANS[self.paper].get(figure["metric"], (figure["metric"],))
        found: dict[str, dict[str, Any] | None] = {}
        for name in members:
            draws = self.scores.get((plain(name), shots, setting), [])
            values = [self._value(row, name) for row in draws]
            std = float(np.std(values)) if len(draws) > 1 else None
            found[name] = (
                {"task": draws[0]["task"], "score": float(np.mean(values)), "std": std, "items": draws[0]["items"]} if draws else None
            )
        return _mean_of(found, "score", "task")

    def _value(self, row: dict[str, Any], name: str) -> float:
        """A score, of a multiple choice under the paper's own normalisation, whatever the task's is."""
        return row["score"] if row["kind"] != "multiple_choice" else row[f"accuracy_{rule(self.paper, name)}"]

    def _needles(self, figure: Figure, those: list[Figure]) -> Ours | Lacking:
        group = plain(f"niah{figure['metric']}{figure['length']}")
        rows = [r for r in self.run.scores if r["group"] and plain(r["group"]) == group and r["setting"] == TRAINED and not r["shots"]]
        if len(rows) != NEEDLES:
            return Lacking(f"{len(rows)} of {NEEDLES} types of key and value" if rows else "not evaluated")
        values = [row["score"] for row in rows]
        return Ours(
            float(np.mean(values)), sorted({row["group"] for row in rows}), float(np.std(values)), sum(row["items"] for row in rows)
        )

    def _learning_rate(self, figure: Figure, those: list[Figure]) -> Ours | Lacking:
        rate = self.run.cell.learning_rate
        return Lacking("not recorded") if rate is None else Ours(rate, ["learning rate"])

    def _throughput(self, figure: Figure, those: list[Figure]) -> Ours | Lacking:
        """Training tokens a second on one device, whichever that was: the median over steps, of a cell trained at the figure's length as it is named."""
        if figure["setting"]:
            return Lacking("trained with another cap of CG steps")
        if figure["length"] != trained_length(self.run.perplexity):
            return Lacking("trained at another length")
        rate = self.run.tokens_per_second
        return Lacking("not recorded") if rate is None else Ours(rate, ["tokens a second and device"])

    def _slowdown(self, figure: Figure, those: list[Figure]) -> Ours | Lacking:
        """How many times longer this cell trains on a token than the cell of the model that `setting` names, on devices of their own."""
        other = self.all.get(tuple(plain(name) for name in (figure["scale"], figure["budget"], figure["setting"])))
        if other is None:
            return Lacking(f"no cell of {figure['setting']} at this scale and budget")
        ours, theirs = self.run.tokens_per_second, other.run.tokens_per_second
        if ours is None or theirs is None:
            return Lacking("not recorded")
        note = "whole training steps on the devices of our cells, which their provenance names; the paper says neither its devices nor whether it means a step or the kernel, and compares with simple GLA, which we take to be this model without metaplasticity"
        return Ours(theirs / ours, [figure["metric"]], note=note)

    def _task_perplexity(self, figure: Figure, those: list[Figure]) -> Ours | Lacking:
        draws = self.scores.get((plain(figure["metric"]), figure["shots"] or 0, TRAINED), [])
        values = [row["perplexity"] for row in draws if row["perplexity"] is not None]
        return Ours(float(np.mean(values)), [draws[0]["task"]], items=draws[0]["items"]) if values else Lacking("not evaluated")


def _mean_of(found: dict[str, dict[str, Any] | None], value: str, name: str) -> Ours | Lacking:
    """The plain mean over rows by the paper's name, of one or of all that the paper's is over; never of a part of them."""
    if missing := [theirs for theirs, row in found.items() if row is None]:
        return Lacking(f"not evaluated: {', '.join(missing)}" if len(found) > 1 else "not evaluated")
    rows = [row for row in found.values() if row is not None]
    items = [row["items"] for row in rows if row.get("items") is not None]
    return Ours(
        math.fsum(row[value] for row in rows) / len(rows),
        [row[name] for row in rows],
        rows[0].get("std") if len(rows) == 1 else None,
        sum(items) if items else None,
    )


def rows(study: Study) -> Iterator[dict[str, Any]]:
    """Every figure of the paper, in its order, where the study has a cell of the paper's at all; none otherwise.

    model, scale, budget: ours, the paper's where we have no such cell. name: of the set, task or group, ours where it was run. tokens, accelerator_hours:
    that the cell's training took; of the cell, also where this figure was not run. paper: null where the paper only draws it. status: "run" | "not run", note: why not, or what makes ours another.
    """
    paper = study.parameters.paper
    if paper is None:
        return
    names, figures = Names(paper, study.parameters.paper_names), printed(paper)
    cells: dict[tuple[str, ...], list[Figure]] = {}
    for figure in figures:
        cells.setdefault(tuple(plain(figure[name]) for name in ("scale", "budget", "model")), []).append(figure)
    results: dict[tuple[str, ...], Results] = {}
    for run in study.compared:
        where = tuple(names(name) for name in (run.cell.scale, run.cell.budget, run.cell.model))
        if where in cells:
            results.setdefault(where, Results(run, paper, names, results))
    if not results:
        return
    for where, those in cells.items():
        found = results.get(where)
        for figure in those:
            ours = found.find(figure, those) if found else Lacking(OF_NO_CELL.get(figure["table"], "no such cell"))
            value = ours if isinstance(ours, Ours) else None
            own = found.run.names if found else {name: figure[name] for name in ("model", "scale", "budget")} | {"cell": None}
            yield own | {
                **{name: figure[name] for name in ("source", "table", "metric", "shots", "length", "setting")},
                "name": ", ".join(value.names) if value else figure["metric"],
                "paper": figure["value"],
                "paper_std": figure["std"],
                "ours": value.value if value else None,
                "ours_std": value.std if value else None,
                "difference": value.value - figure["value"] if value and figure["value"] is not None else None,
                "items": value.items if value else None,
                "tokens": found.run.cell.tokens if found else None,
                "accelerator_hours": found.run.accelerator_hours if found else None,
                "status": RUN if value else NOT_RUN,
                "note": ours.why if isinstance(ours, Lacking) else ours.note,
            }
