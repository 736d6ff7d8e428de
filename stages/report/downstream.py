"""Tables of downstream tasks: a row a task, means by group, and which tasks a longer window helps (MesaNet, appendix L.2.1)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from stages.evaluation.parameters import TRAINED
from stages.report.paper import MEANS, Names, plain
from stages.report.study import Run, Study

Row = dict[str, Any]

# The papers' groups in their order; a study's own come behind.
ORDER = ("global", "local", "recall", "scrambling", "translation", "closed_book")
RULES = ("tokens", "bytes", "none")


def _by(rows: list[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def place(group: str | None) -> tuple[int, str]:
    """Sorts groups: the papers' first, tasks of none last."""
    if group is None:
        return len(ORDER) + 1, ""
    return (ORDER.index(group), "") if group in ORDER else (len(ORDER), group)


def tasks(study: Study) -> Iterator[Row]:
    """A row per cell, task, setting and number of shots.

    score: the mean over draws; std: over them. error: the standard error of one draw's score, for the items being a sample; at most so much where
    an item's score is a share. at_chance: within two of these of chance, where options are chosen among; else exactly nothing right.
    normalisation: that of a multiple choice, by which its score is one of the three accuracies.
    """
    rules = _normalisations(study)
    for run in study.runs:
        found = _by(run.scores, "group", "task", "setting", "shots")
        for (group, task, setting, shots), draws in sorted(found.items(), key=lambda item: (place(item[0][0]), *item[0][1:])):
            score, first = float(np.mean([row["score"] for row in draws])), draws[0]
            share = min(max(score / 100, 0.0), 1.0)
            error = 100 * math.sqrt(share * (1 - share) / first["items"]) if first["metric"] != "bleu" else None
            chance = first["chance"]
            yield run.names | {
                "group": group, "task": task, "setting": setting, "shots": shots, "kind": first["kind"], "metric": first["metric"],
                "normalisation": rules.get(task), "version": first["version"], "items": first["items"], "draws": len(draws), "score": score,
                "std": float(np.std([row["score"] for row in draws])) if len(draws) > 1 else None, "error": error, "chance": chance,
                "at_chance": score == 0 if chance is None else score - 2 * (error or 0.0) <= chance, "perplexity": first["perplexity"],
                **{name: sum(row[name] for row in draws) for name in ("truncated", "answers_cut", "shots_dropped")},
            }  # fmt: skip


def _normalisations(study: Study) -> dict[str, str]:
    """task -> the normalisation under which all of its scores stand. Where several would give the same scores, the first of tokens, bytes, none."""
    choices = _by([row for run in study.runs for row in run.scores if row["kind"] == "multiple_choice"], "task")
    found = {}
    for (task,), rows in choices.items():
        found[task] = next(rule for rule in RULES if all(row[f"accuracy_{rule}"] == row["score"] for row in rows))  # one of them always is
    return found


def groups(made: list[Row]) -> Iterator[Row]:
    """Means over a group's tasks, of the rows of `tasks`: per cell, group, setting and number of shots.

    members: the tasks that a mean is over; std: over them. Only means over the same members compare. at_chance: how many of them are.
    """
    grouped = [row for row in made if row["group"] is not None]
    for rows in _by(grouped, "cell", "group", "setting", "shots").values():
        first, scores = rows[0], [row["score"] for row in rows]
        named = sorted({row["normalisation"] for row in rows if row["normalisation"]})
        chances = [row["chance"] for row in rows]
        yield {name: first[name] for name in ("cell", "model", "scale", "budget", "group", "setting", "shots")} | {
            "tasks": len(rows), "members": ", ".join(sorted(row["task"] for row in rows)), "metric": ", ".join(sorted({row["metric"] for row in rows})),
            "normalisation": ", ".join(named) or None, "score": float(np.mean(scores)), "std": float(np.std(scores)) if len(rows) > 1 else None,
            "chance": float(np.mean(chances)) if None not in chances else None, "at_chance": sum(row["at_chance"] for row in rows),
        }  # fmt: skip


def split(study: Study, made: list[Row]) -> Iterator[Row]:
    """Which tasks need more than a short window: a row per task without examples at every scale and budget that has the windows and full attention.

    A task is global where (1) its score rises with every window of `split_windows` and (2) none of these beats full attention; local otherwise. study:
    global where that holds at every scale and budget here. windows, scores: in the windows' order; full: full attention's. paper: the paper's group.
    """
    windows = sorted(study.parameters.split_windows)
    theirs = _papers_groups(study)
    found = []
    for where in study.places:
        runs = {window: run for window in windows if (run := _attention(study, where, window))}
        full = _attention(study, where, None)
        if full is None or len(runs) < len(windows):
            continue
        asked = [row for row in made if row["setting"] == TRAINED and row["shots"] == 0]
        score = {(row["cell"], row["task"]): row["score"] for row in asked}
        for row in (row for row in asked if row["cell"] == full.cell.cell):
            scores = [score.get((run.cell.cell, row["task"])) for run in runs.values()]
            paper = theirs.get(row["task"])
            if None in scores or (paper is None and row["group"] not in ("global", "local")):
                continue
            rises = all(first < second for first, second in pairwise(scores))
            beaten = any(value > row["score"] for value in scores)
            found.append({
                "scale": where[0], "budget": where[1], "task": row["task"], "windows": windows, "scores": scores, "full": row["score"],
                "rises": rises, "beaten": beaten, "group": "global" if rises and not beaten else "local", "paper": paper,
            })  # fmt: skip
    everywhere = {task: all(row["group"] == "global" for row in rows) for (task,), rows in _by(found, "task").items()}
    yield from (row | {"study": "global" if everywhere[row["task"]] else "local"} for row in found)


NEEDLES = "niah"  # what the names of needles' groups begin with
BANDS = 10  # of depth
ONE_NEEDLE = re.compile(r"-depth-(\d+)$")  # the end of an item's id (stages/tasks/needles.py)


def needles(study: Study) -> Iterator[Row]:
    """A row per cell, haystack, length and band of depth, over the items of one needle of all tasks of a group, without examples and as trained.

    haystack, length: the group's name behind NEEDLES, and the number that it ends with (niah-noise-2048; null where there is none). depth: the band's middle
    in per cent, 0 being the start. types: tasks, of types of key and value. score: per cent found.
    """
    for run in study.compared:
        groups: dict[tuple[str, int | None], list[str]] = {}
        for row in run.scores:
            if (row["group"] or "").startswith(NEEDLES) and row["setting"] == TRAINED and not row["shots"] and not row["draw"]:
                groups.setdefault(haystack(row["group"]), []).append(row["task"])
        for (hay, length), tasks in groups.items():
            found: dict[int, list[float]] = {}
            asked = [item for task in tasks for item in run.items(task)]
            for item in asked:
                if depth := ONE_NEEDLE.search(item["item"]):
                    found.setdefault(min(int(depth[1]) * BANDS // 100, BANDS - 1), []).append(item["score"])
            for band, scores in sorted(found.items()):
                own = {"haystack": hay, "length": length, "depth": round((band + 0.5) * 100 / BANDS), "types": len(tasks)}
                yield run.names | own | {"items": len(scores), "score": 100 * float(np.mean(scores))}


def haystack(group: str) -> tuple[str, int | None]:
    """("noise", 2048) of niah-noise-2048."""
    name = group.removeprefix(NEEDLES).strip("-_")
    end = re.search(r"[-_]?(\d+)$", name)
    return (name[: end.start()], int(end[1])) if end else (name, None)


def _attention(study: Study, where: tuple[str, str], window: int | None) -> Run | None:
    """The cell of plain attention with a window at a scale and budget."""
    found = [run for run in study.compared if run.place == where and run.cell.layer == "attention" and run.cell.window == window]
    return found[0] if found else None


def _papers_groups(study: Study) -> dict[str, str]:
    """our task -> "global" | "local", as the paper has it."""
    paper = study.parameters.paper
    if paper is None:
        return {}
    names = Names(paper, study.parameters.paper_names)
    groups = {plain(metric): group for group in ("global", "local") for metric in MEANS[paper].get(group, ())}
    ours = {row["task"] for run in study.runs for row in run.scores}
    return {task: groups[names(task)] for task in ours if names(task) in groups}
