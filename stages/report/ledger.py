"""The ledger: a paper's printed perplexities beside ours, for the cells that are the paper's own."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages.evaluate import TRAINED
from stages.report.study import Study

DATA = Path(__file__).parents[1] / "data"

# What a study may call a scale, model or set -> the paper's own name, where the two differ by more than case and separators.
NAMES = {
    "mesanet": {
        "140m": "145M", "440m": "400M", "940m": "1B", "mlstm": "xLSTM", "attention": "Transformer", "mha": "Transformer",
        "slimpajama": "SLIM", "lambada": "LMB", "lambada_openai": "LMB", "wikitext": "WIKI", "wikitext2": "WIKI", "wikitext_2": "WIKI",
        "govreport": "GOV", "qasper": "QASP",
    }
}  # fmt: skip
MEAN = "AVG"


def printed(paper: str) -> list[dict[str, Any]]:
    """The paper's figures: rows scale, budget, model, set, length, perplexity, under its own names."""
    with (DATA / f"{paper}_perplexity.csv").open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return [row | {"length": int(row["length"]), "perplexity": float(row["perplexity"])} for row in rows]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def rows(study: Study) -> Iterator[dict[str, Any]]:
    """Rows cell, model, scale, budget, set (ours, or the paper's where we have none), length, paper, ours, difference, status.

    ours: as trained, at the same length; AVG: the mean over the paper's own sets, where all are ours. status: "run" | "not run".
    """
    paper = study.parameters.paper
    if paper is None:
        return
    theirs = printed(paper)
    names = NAMES[paper] | study.parameters.paper_names
    own = {_plain(ours): _plain(paper_name) for ours, paper_name in names.items()}

    def key(name: str) -> str:
        return own.get(_plain(name), _plain(name))

    for run in study.compared:
        cell = run.cell
        where = tuple(key(name) for name in (cell.scale, cell.budget, cell.model))
        those = [row for row in theirs if tuple(_plain(row[name]) for name in ("scale", "budget", "model")) == where]
        ours = {(key(row["set"]), row["length"]): row for row in run.perplexity if row["setting"] == TRAINED}
        for row in those:
            found = ours.get((_plain(row["set"]), row["length"]))
            value = _mean(row, those, ours) if row["set"] == MEAN else found["perplexity"] if found else None
            yield run.names | {
                "set": found["set"] if found else row["set"],
                "length": row["length"],
                "paper": row["perplexity"],
                "ours": value,
                "difference": None if value is None else value - row["perplexity"],
                "status": "not run" if value is None else "run",
            }


def _mean(mean: dict[str, Any], those: list[dict[str, Any]], ours: dict[tuple[str, int], dict[str, Any]]) -> float | None:
    """Our mean over the sets that the paper's mean at this length is over; None where one of them is missing."""
    sets = [_plain(row["set"]) for row in those if row["length"] == mean["length"] and row["set"] != MEAN]
    found = [ours[name, mean["length"]]["perplexity"] for name in sets if (name, mean["length"]) in ours]
    return math.fsum(found) / len(found) if found and len(found) == len(sets) else None
