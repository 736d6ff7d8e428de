"""Fits over scale: how a model's loss falls with parameters and with tokens, as a power law through a study's few points.

L = c N^-a at one budget, L = c D^-b at one scale, and L = c N^-a D^-b over all cells, by least squares of log L. There is no irreducible loss in these
forms: the points of a study of a few scales cannot tell one. So an exponent holds between the study's own sizes and says nothing beyond.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from stages.evaluation.parameters import TRAINED
from stages.report.study import Run, Study

FEWEST = {"parameters": 3, "tokens": 3, "both": 5}  # points of different sizes that a fit wants: always more than it has coefficients

Row = dict[str, Any]


def points(study: Study) -> list[tuple[Run, float]]:
    """(run, loss in nats) of the compared cells on the headline set as trained."""
    where = study.headline
    if where is None:
        return []
    found = [
        (run, row["nll"])
        for run in study.compared
        for row in run.perplexity
        if (row["set"], row["length"], row["setting"]) == (*where, TRAINED)
    ]
    return [(run, nll) for run, nll in found if np.isfinite(nll) and nll > 0]


def fits(study: Study) -> Iterator[Row]:
    """A row per model and line: over parameters at a budget, over tokens at a scale, over both; only where there are two different sizes at least.

    points: how many. fitted: whether they are `fewest` or more; else there are no numbers. exponent_*: the fall of log L with log N and log D, with 95 %
    intervals over resampled sequences of the set, the same for all cells: what the set's size leaves open. They hold nothing of another seed of the
    training, nor of the form of the law. residual: root mean square of log L about the fit.
    """
    measured = points(study)
    for model in dict.fromkeys(run.cell.model for run, _ in measured):
        own = [(run, nll) for run, nll in measured if run.cell.model == model]
        lines = [("parameters", None, budget, [one for one in own if one[0].cell.budget == budget]) for budget in _each(own, "budget")]
        lines += [("tokens", scale, None, [one for one in own if one[0].cell.scale == scale]) for scale in _each(own, "scale")]
        lines.append(("both", None, None, own))
        for over, scale, budget, those in lines:
            sizes = [len({getattr(run.cell, name) for run, _ in those}) for name in ("parameters", "tokens")]
            wanted = {"parameters": sizes[0] > 1, "tokens": sizes[1] > 1, "both": min(sizes) > 1}
            if wanted[over]:
                yield {"model": model, "over": over, "scale": scale, "budget": budget} | _fit(study, over, those)


def _each(own: list[tuple[Run, float]], name: str) -> list[str]:
    return list(dict.fromkeys(getattr(run.cell, name) for run, _ in own))


def _fit(study: Study, over: str, those: list[tuple[Run, float]]) -> Row:
    names = ("parameters", "tokens") if over == "both" else (over,)
    design = np.array([[1.0, *(np.log(getattr(run.cell, name)) for name in names)] for run, _ in those])
    different = len({tuple(row) for row in design.tolist()})
    row: Row = {
        "points": different,
        "fewest": FEWEST[over],
        "fitted": different >= FEWEST[over] and np.linalg.matrix_rank(design) == design.shape[1],
    }
    empty = {f"{part}_{name}": None for name in ("parameters", "tokens") for part in ("exponent", "low", "high")}
    row |= empty | {"coefficient": None, "residual": None}
    if not row["fitted"]:
        return row
    logs = np.log([nll for _, nll in those])
    found, *_ = np.linalg.lstsq(design, logs, rcond=None)
    row |= {"coefficient": float(np.exp(found[0])), "residual": float(np.sqrt(np.mean((design @ found - logs) ** 2)))}
    drawn = _resampled(study, [run for run, _ in those])
    slopes = None if drawn is None else np.linalg.lstsq(design, np.log(drawn).T, rcond=None)[0]
    for place, name in enumerate(names, start=1):
        row[f"exponent_{name}"] = float(-found[place])
        if slopes is not None:
            row[f"low_{name}"], row[f"high_{name}"] = (float(value) for value in np.quantile(-slopes[place], [0.025, 0.975]))
    return row


def _resampled(study: Study, runs: list[Run]) -> np.ndarray | None:
    """[samples, runs] losses over sequences drawn again, the same ones for every run; None where the runs' sequences are not the same."""
    assert study.headline is not None
    sums, counts = [], []
    for run in runs:
        nlls = run.nlls(*study.headline)
        scored = [~np.isnan(nll) for nll in nlls]
        sums.append([float(np.sum(nll[keep], dtype=np.float64)) for nll, keep in zip(nlls, scored, strict=True)])
        counts.append([int(keep.sum()) for keep in scored])
    if any(other != counts[0] for other in counts) or not counts[0]:
        return None
    numbers = study.parameters
    draws = np.random.default_rng(numbers.seed).multinomial(
        len(counts[0]), np.full(len(counts[0]), 1 / len(counts[0])), size=numbers.bootstrap
    )
    return (draws @ np.array(sums).T) / (draws @ np.array(counts).T)


def learning_rates(study: Study) -> Iterator[Row]:
    """Cells that differ in their learning rate alone, with the loss on the headline set: the least is selected (MesaNet, appendix G.4).

    edge: the selected rate is the lowest or highest of three or more, so that a better one may lie outside.
    """
    loss = {run.cell.cell: nll for run, nll in points(study)}
    swept: dict[tuple[Any, ...], list[Run]] = {}
    for run in study.compared:
        if run.cell.entry is not None and run.cell.learning_rate is not None and run.cell.cell in loss:
            swept.setdefault((run.cell.entry, *run.place), []).append(run)
    for runs in swept.values():
        rates = sorted({run.cell.learning_rate for run in runs})
        if len(rates) < 2:
            continue
        best = min(runs, key=lambda run: loss[run.cell.cell])
        for run in sorted(runs, key=lambda run: run.cell.learning_rate):
            selected = run is best
            edge = selected and len(rates) > 2 and run.cell.learning_rate in (rates[0], rates[-1])
            text, length = study.headline
            yield run.names | {
                "learning_rate": run.cell.learning_rate, "set": text, "length": length, "nll": loss[run.cell.cell],
                "perplexity": float(np.exp(loss[run.cell.cell])), "selected": selected, "edge": edge, "alternatives": len(rates),
            }  # fmt: skip
