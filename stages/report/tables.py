"""The analysis' tables: plain rows over a study's results. NLL in nats per token; differences are ours less the other's, negative is better."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from stages import measures, schemas
from stages.evaluation.parameters import TRAINED
from stages.report import downstream, ledger, scaling
from stages.report.study import Run, Study

Row = dict[str, Any]

NAMES = {"cell": pa.string(), "model": pa.string(), "scale": pa.string(), "budget": pa.string()}
WHERE = {"set": pa.string(), "length": pa.int64()}


def _table(rows: list[Row] | Iterator[Row], columns: dict[str, pa.DataType]) -> pa.Table:
    rows = list(rows)
    return pa.table({name: pa.array([row[name] for row in rows], kind, from_pandas=True) for name, kind in columns.items()})


def _kinds(name: str) -> dict[str, pa.DataType]:
    """The columns of a schema of stages/schemas.py."""
    return {field.name: field.type for field in schemas.schema(name)}


def rounded(value: float | None, digits: int) -> float | None:
    """To significant digits; None for what JSON has no number for."""
    return float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else None


def smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of the last `window` finite values up to each entry, of fewer at the start; NaN where there is none."""
    finite = np.isfinite(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(finite)])
    last = np.arange(1, len(values) + 1)
    first = np.maximum(last - window, 0)
    with np.errstate(invalid="ignore"):
        return (total[last] - total[first]) / (count[last] - count[first])


def edges(length: int, per_octave: int) -> np.ndarray:
    """Rising edges of position bins from 1 to length + 1: about `per_octave` bins per doubling, each at least one position wide.

    What is left at the end joins the bin before it where it is at most half as wide.
    """
    found = np.unique(np.floor(2.0 ** (np.arange(math.ceil(math.log2(length + 1)) * per_octave + 1) / per_octave)).astype(np.int64))
    found = found[found <= length]
    if len(found) > 1 and 2 * (length + 1 - found[-1]) <= found[-1] - found[-2]:
        found = found[:-1]
    return np.append(found, length + 1)


def _window(study: Study, run: Run) -> int:
    return max(1, round(study.parameters.smoothing * len(run.history["loss"])))


# --- training -------------------------------------------------------------------------------------------------------


def models(study: Study) -> pa.Table:
    """A row a cell: what it is, what it cost, and its final loss (the mean over the end of the run). events: steps with one."""
    return _table(
        (
            run.names
            | {name: getattr(run.cell, name) for name in ("layer", "group", "parameters", "tokens", "flops", "steps")}
            | {"final_loss": smoothed(run.history["loss"], _window(study, run))[-1] if len(run.history["loss"]) else None}
            | {"events": sum(1 for event in run.history["event"] if event)}
            for run in study.runs
        ),
        NAMES
        | {
            "layer": pa.string(),
            "group": pa.string(),
            "parameters": pa.int64(),
            "tokens": pa.int64(),
            "flops": pa.float64(),
            "steps": pa.int64(),
        }
        | {"final_loss": pa.float64(), "events": pa.int64()},
    )


def curves(study: Study) -> pa.Table:
    """Loss curves, smoothed and thinned. difference: to the baseline's loss on the same tokens, smoothed alike; null where there is none."""

    def rows() -> Iterator[Row]:
        for run in study.runs:
            steps, tokens, loss = (run.history[name] for name in ("step", "tokens", "loss"))
            if not len(steps):
                continue
            kept = np.unique(np.linspace(0, len(steps) - 1, min(study.parameters.points, len(steps))).round().astype(int))
            baseline, difference = study.baseline(run), np.full(len(steps), np.nan)
            if baseline is not None and np.array_equal(baseline.history["tokens"], tokens):
                difference = smoothed(loss - baseline.history["loss"], _window(study, run))
            smooth = smoothed(loss, _window(study, run))
            for i in kept:
                yield run.names | {"step": steps[i], "tokens": tokens[i], "loss": smooth[i], "difference": difference[i]}

    return _table(rows(), NAMES | {"step": pa.int64(), "tokens": pa.int64(), "loss": pa.float64(), "difference": pa.float64()})


def throughput(study: Study) -> pa.Table:
    """Timings; the ledger's hours are the only ones elsewhere. seconds: of all steps; the rates are medians over steps, so that compiling does not count.

    accelerator_hours: the steps' seconds on every device.
    """

    def median(values: np.ndarray) -> float:
        finite = values[np.isfinite(values.astype(np.float64))]
        return float(np.median(finite)) if len(finite) else math.nan

    return _table(
        (
            run.names
            | {"training_steps": len(run.history["step"]), "seconds": float(np.nansum(run.history["seconds"]))}
            | {name: median(run.history[name]) for name in ("tokens_per_second", "mfu", "mfu_without_cg")}
            | {"accelerator_hours": run.accelerator_hours}
            for run in study.runs
        ),
        NAMES
        | {"training_steps": pa.int64(), "seconds": pa.float64(), "tokens_per_second": pa.float64(), "mfu": pa.float64()}
        | {"mfu_without_cg": pa.float64(), "accelerator_hours": pa.float64()},
    )


# --- evaluation -----------------------------------------------------------------------------------------------------


def perplexity(study: Study) -> pa.Table:
    """A row per cell, set, length and setting ("" is as trained)."""
    return _table(
        (
            run.names | {name: row[name] for name in ("set", "length", "setting", "perplexity", "nll", "tokens")}
            for run in study.runs
            for row in run.perplexity
        ),
        NAMES | WHERE | {"setting": pa.string(), "perplexity": pa.float64(), "nll": pa.float64(), "tokens": pa.int64()},
    )


def _difference(study: Study, ours: list[np.ndarray], theirs: list[np.ndarray], bins: np.ndarray) -> Iterator[Row]:
    """Rows first, last, position, difference, low, high of the bins in which something is scored."""
    with np.errstate(invalid="ignore"):  # infinite losses, of a model that failed there
        found = measures.position_difference(ours, theirs, samples=study.parameters.bootstrap, seed=study.parameters.seed, bins=bins)
    for i in np.flatnonzero(np.isfinite(found["difference"])):
        yield {"first": bins[i], "last": bins[i + 1] - 1} | {name: values[i] for name, values in found.items()}


DIFFERENCE = {"first": pa.int64(), "last": pa.int64()} | dict.fromkeys(("position", "difference", "low", "high"), pa.float64())


def positions(study: Study) -> pa.Table:
    """NLL by position less the baseline's (MesaNet Eq. 56), in log-spaced bins of positions first..last, with 95 % bootstrap intervals.

    Over the sequences that start at their document's start, as an evaluation's own positions are.
    """

    def rows() -> Iterator[Row]:
        for baseline in study.compared:
            others = [run for run in study.compared if study.baseline(run) is baseline]
            for text, length in study.evaluated([baseline]):
                those = [run for run in others if run.has(text, length, TRAINED)]
                theirs = baseline.nlls(text, length, from_start=True) if those else []
                if not theirs:
                    continue
                bins = edges(max(map(len, theirs)), study.parameters.bins_per_octave)
                for run in those:
                    for row in _difference(study, run.nlls(text, length, from_start=True), theirs, bins):
                        yield run.names | {"set": text, "length": length} | row

    return _table(rows(), NAMES | WHERE | DIFFERENCE)


def differences(study: Study) -> pa.Table:
    """NLL over all of a set's tokens less the baseline's, with 95 % bootstrap intervals over sequences, as trained."""

    def rows() -> Iterator[Row]:
        for run in study.compared:
            if (baseline := study.baseline(run)) is None:
                continue
            for text, length in study.evaluated([run]):
                if baseline.has(text, length, TRAINED):
                    ours, theirs = run.nlls(text, length), baseline.nlls(text, length)
                    longest = max(map(len, theirs), default=0)
                    for row in _difference(study, ours, theirs, np.array([1, longest + 1])) if longest else ():
                        named = {"baseline": baseline.cell.cell, "set": text, "length": length, "sequences": len(theirs)}
                        yield run.names | named | {name: row[name] for name in ("difference", "low", "high")}

    kinds = {"sequences": pa.int64()} | dict.fromkeys(("difference", "low", "high"), pa.float64())
    return _table(rows(), NAMES | {"baseline": pa.string()} | WHERE | kinds)


def domains(study: Study) -> pa.Table:
    """Losses by the domains of a set's documents, where an evaluation has them."""
    rows = (run.names | {name: row[name] for name in (*WHERE, *DOMAIN)} for run in study.runs for row in run.domains)
    return _table(rows, NAMES | WHERE | DOMAIN)


DOMAIN = {"source": pa.string(), "setting": pa.string(), "sequences": pa.int64(), "tokens": pa.int64()} | dict.fromkeys(
    ("nll", "perplexity"), pa.float64()
)


def mean_so_far(study: Study) -> pa.Table:
    """Mean NLL of every sequence's first k tokens (MesaNet Eq. 54), at log-spaced k. tokens: scored up to k."""

    def rows() -> Iterator[Row]:
        for run in study.runs:
            for row in run.perplexity:
                nll_sum, count = run.positions(row["set"], row["length"], row["setting"])
                mean, tokens = measures.mean_so_far(nll_sum, count), np.cumsum(count)
                for last in edges(len(mean), study.parameters.bins_per_octave)[1:] - 1 if len(mean) else ():
                    if count[last - 1]:
                        where = {name: row[name] for name in ("set", "length", "setting")}
                        yield run.names | where | {"position": last, "nll": mean[last - 1], "tokens": tokens[last - 1]}

    return _table(rows(), NAMES | WHERE | {"setting": pa.string(), "position": pa.int64(), "nll": pa.float64(), "tokens": pa.int64()})


# --- conjugate gradient ---------------------------------------------------------------------------------------------


def _cg_pairs(study: Study) -> Iterator[tuple[Row, Run, Run, Row]]:
    """(columns, run, run compared with as trained, the perplexity row) of every inference setting and every cell of the training sweep."""
    for run in study.runs:
        reference = study.trained_with_all_steps(run) if run.cell.group == "sweep" else None
        for row in run.perplexity:
            text, length, setting = row["set"], row["length"], row["setting"]
            if setting and run.has(text, length, TRAINED):
                kind, other = "inference", run
            elif not setting and reference is not None and reference.has(text, length, TRAINED):
                kind, other = "training", reference
            else:
                continue
            names = {"kind": kind, **run.names, "reference": other.cell.cell, "set": text, "length": length, "setting": setting}
            yield names | {"steps": run.cell.steps}, run, other, row


CG = {"kind": pa.string(), **NAMES, "reference": pa.string(), **WHERE, "setting": pa.string(), "steps": pa.int64()}


def cg_sweep(study: Study) -> pa.Table:
    """Total NLL less the reference's: of an inference setting less its own cell's as trained, of a cell of the training sweep less the full cell's.

    steps: the cap in training. steps_taken: the mean over tokens, heads and layers in this evaluation. residual: likewise, relative.
    """

    def rows() -> Iterator[Row]:
        for names, run, other, row in _cg_pairs(study):
            text, length, setting = names["set"], names["length"], names["setting"]
            for difference in _difference(study, run.nlls(text, length, setting), other.nlls(text, length), np.array([1, length + 1])):
                yield names | {name: row[name] for name in ("steps_taken", "residual", "nll")} | difference

    kinds = dict.fromkeys(("steps_taken", "residual", "nll", "difference", "low", "high"), pa.float64())
    return _table(rows(), CG | kinds)


def cg_positions(study: Study) -> pa.Table:
    """The same differences by position. mean_so_far: the difference of the mean NLL of the first `last` tokens (MesaNet Fig. 5)."""

    def rows() -> Iterator[Row]:
        for names, run, other, _ in _cg_pairs(study):
            text, length, setting = names["set"], names["length"], names["setting"]
            so_far = measures.mean_so_far(*run.positions(text, length, setting)) - measures.mean_so_far(*other.positions(text, length))
            if not len(so_far):
                continue
            ours, theirs = run.nlls(text, length, setting, from_start=True), other.nlls(text, length, from_start=True)
            for row in _difference(study, ours, theirs, edges(len(so_far), study.parameters.bins_per_octave)):
                yield names | row | {"mean_so_far": so_far[row["last"] - 1]}

    return _table(rows(), CG | DIFFERENCE | {"mean_so_far": pa.float64()})


def internals(study: Study) -> pa.Table:
    """What Mesa's heads do, by block, head and bin of positions first..position: see stages/heads.py."""
    return _table((run.names | row for run in study.runs for row in run.internals), NAMES | _kinds("internals"))


def memory(study: Study) -> pa.Table:
    """What Palimpsa's heads remember, by block, head and bin of positions first..position: see stages/heads.py."""
    return _table((run.names | row for run in study.runs for row in run.memory), NAMES | _kinds("memory"))


def internals_course(study: Study) -> pa.Table:
    """What Mesa's heads do while they are trained, by step, block and head: see stages/course.py."""
    return _table((run.names | row for run in study.runs for row in run.internals_course), NAMES | _kinds("internals_course"))


def memory_course(study: Study) -> pa.Table:
    """What Palimpsa's heads remember while they are trained, by step, block and head: see stages/course.py."""
    return _table((run.names | row for run in study.runs for row in run.memory_course), NAMES | _kinds("memory_course"))


def training_inside(study: Study) -> pa.Table:
    """What layers recorded of each training step (`name`), smoothed and thinned like the loss curves."""
    common = {*schemas.COLUMNS["history"], "devices"}

    def rows() -> Iterator[Row]:
        for run in study.runs:
            steps, tokens = run.history["step"], run.history["tokens"]
            if not len(steps):
                continue
            kept = np.unique(np.linspace(0, len(steps) - 1, min(study.parameters.points, len(steps))).round().astype(int))
            for name in sorted(run.history.keys() - common):
                values = smoothed(run.history[name].astype(np.float64), _window(study, run))
                yield from (
                    run.names | {"name": name, "step": steps[i], "tokens": tokens[i], "value": values[i]}
                    for i in kept
                    if np.isfinite(values[i])
                )

    return _table(rows(), NAMES | {"name": pa.string(), "step": pa.int64(), "tokens": pa.int64(), "value": pa.float64()})


# --- downstream -----------------------------------------------------------------------------------------------------

ASKED = {"group": pa.string(), "task": pa.string(), "setting": pa.string(), "shots": pa.int64()}


def tasks(study: Study) -> pa.Table:
    """A row per cell, task, setting and number of shots; scores in per cent, BLEU in its points. See downstream.tasks."""
    kinds = dict.fromkeys(("kind", "metric", "normalisation"), pa.string()) | dict.fromkeys(("version", "items", "draws"), pa.int64())
    kinds |= dict.fromkeys(("score", "std", "error", "chance"), pa.float64()) | {"at_chance": pa.bool_(), "perplexity": pa.float64()}
    kinds |= dict.fromkeys(("truncated", "answers_cut", "shots_dropped"), pa.int64())
    return _table(downstream.tasks(study), NAMES | ASKED | kinds)


def groups(study: Study) -> pa.Table:
    """Means over the tasks of a group. See downstream.groups."""
    kinds = {"tasks": pa.int64()} | dict.fromkeys(("members", "metric", "normalisation"), pa.string())
    kinds |= dict.fromkeys(("score", "std", "chance"), pa.float64()) | {"at_chance": pa.int64()}
    asked = {name: kind for name, kind in ASKED.items() if name != "task"}
    return _table(downstream.groups(list(downstream.tasks(study))), NAMES | asked | kinds)


def needles(study: Study) -> pa.Table:
    """Single needles found, by where they lie in their haystack. See downstream.needles."""
    kinds = {"haystack": pa.string()} | dict.fromkeys(("length", "depth", "types", "items"), pa.int64()) | {"score": pa.float64()}
    return _table(downstream.needles(study), NAMES | kinds)


def split(study: Study) -> pa.Table:
    """Which tasks need more than a short window, by the study's own windows. See downstream.split."""
    kinds = dict.fromkeys(("scale", "budget", "task"), pa.string()) | {"windows": pa.list_(pa.int64()), "scores": pa.list_(pa.float64())}
    kinds |= {"full": pa.float64(), "rises": pa.bool_(), "beaten": pa.bool_()} | dict.fromkeys(("group", "study", "paper"), pa.string())
    return _table(downstream.split(study, list(downstream.tasks(study))), kinds)


# --- over scale -----------------------------------------------------------------------------------------------------


def fits(study: Study) -> pa.Table:
    """Loss as a power of parameters and tokens. See scaling.fits."""
    kinds = dict.fromkeys(("model", "over", "scale", "budget"), pa.string()) | {
        "points": pa.int64(),
        "fewest": pa.int64(),
        "fitted": pa.bool_(),
    }
    kinds |= {f"{part}_{name}": pa.float64() for name in ("parameters", "tokens") for part in ("exponent", "low", "high")}
    return _table(scaling.fits(study), kinds | {"coefficient": pa.float64(), "residual": pa.float64()})


def learning_rates(study: Study) -> pa.Table:
    """Cells that differ in their learning rate alone, and which is selected. See scaling.learning_rates."""
    kinds = {"nll": pa.float64(), "perplexity": pa.float64(), "selected": pa.bool_(), "edge": pa.bool_(), "alternatives": pa.int64()}
    return _table(scaling.learning_rates(study), NAMES | {"learning_rate": pa.float64()} | WHERE | kinds)


# --- beside the paper -----------------------------------------------------------------------------------------------


def beside_the_paper(study: Study) -> pa.Table:
    """Every figure that the paper prints, ours where it was run, and ours less the paper's. accelerator_hours are timings. See ledger.rows."""
    kinds = dict.fromkeys(("source", "table", "metric", "setting", "name"), pa.string()) | {"shots": pa.int64(), "length": pa.int64()}
    kinds |= dict.fromkeys(("paper", "paper_std", "ours", "ours_std", "difference"), pa.float64()) | {
        "items": pa.int64(),
        "tokens": pa.int64(),
    }
    kinds |= {"accelerator_hours": pa.float64(), "status": pa.string(), "note": pa.string()}
    return _table(ledger.rows(study), NAMES | kinds)


TABLES: dict[str, Callable[[Study], pa.Table]] = {
    "models": models,
    "curves": curves,
    "perplexity": perplexity,
    "differences": differences,
    "domains": domains,
    "positions": positions,
    "mean_so_far": mean_so_far,
    "cg_sweep": cg_sweep,
    "cg_positions": cg_positions,
    "internals": internals,
    "memory": memory,
    "internals_course": internals_course,
    "memory_course": memory_course,
    "training_inside": training_inside,
    "tasks": tasks,
    "groups": groups,
    "needles": needles,
    "split": split,
    "fits": fits,
    "learning_rates": learning_rates,
    "throughput": throughput,
    "ledger": beside_the_paper,
}


def plots(made: dict[str, pa.Table]) -> dict[str, list[Row]]:
    """Tidy rows for `dvc plots`: one list a file, no timings, numbers to six digits."""
    wanted = {
        "loss": ("curves", ("cell", "tokens", "loss")),
        "positions": ("positions", ("cell", "set", "length", "position", "difference", "low", "high")),
        "perplexity": ("perplexity", ("cell", "model", "scale", "budget", "set", "length", "setting", "perplexity")),
    }

    def plain(value: Any) -> Any:
        return rounded(value, 6) if isinstance(value, float) else value

    return {
        name: [{column: plain(row[column]) for column in columns} for row in made[table].to_pylist()]
        for name, (table, columns) in wanted.items()
    }
