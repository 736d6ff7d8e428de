"""From a model's answers to the rows of tasks.parquet, and from those to a task's score."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from stages.tasks.engine import Answer
from stages.tasks.entry import Scoring
from stages.tasks.prompts import Ask, Row

METRICS = {"multiple_choice": "accuracy", "greedy": "accuracy", "recall": "contained", "generation": "bleu"}
RULES = ("tokens", "none", "bytes")


def normalised(scores: Iterable[float], tokens: Iterable[int], sizes: Iterable[int], rule: str) -> list[float]:
    """Options' negative log likelihoods under a normalisation: by tokens, by bytes, or as they are."""
    by = {"tokens": tokens, "bytes": sizes, "none": [1] * len(list(tokens))}[rule]
    return [score / max(1, size) for score, size in zip(scores, by, strict=True)]


def choice(row: dict[str, Any], rule: str) -> int:
    """The option with the least loss under a rule, the first of equals. Options that fail alike are no choice: -1."""
    values = normalised(row["scores"], row["tokens"], row["bytes"], rule)
    return int(np.argmin(values)) if math.isfinite(min(values)) else -1


def result(scoring: Scoring, item: Row, ask: Ask, answer: Answer, decode: Callable[[Iterable[int]], str]) -> dict[str, Any]:
    """An item's row of tasks.parquet, without the task's own columns."""
    row = {
        "item": item["id"],
        "scores": answer.nll,
        "tokens": [len(option) for option in ask.options],
        "bytes": ask.bytes,
        "truncated": ask.truncated,
        "answer_cut": ask.answer_cut,
    }
    if scoring.kind == "multiple_choice":
        chosen = choice(row, scoring.get("normalisation"))
        said, wanted = item["choices"][chosen] if chosen >= 0 else "", item["choices"][item["answer_index"]]
        hit = chosen == item["answer_index"]
        return row | {"prediction": said, "target": wanted, "hit": hit, "score": float(hit)}
    said = decode(answer.likeliest)
    if scoring.kind == "greedy":
        return row | {"prediction": said.strip(), "target": item["target"], "hit": answer.matched, "score": float(answer.matched)}
    said = said.split("\n")[0].strip()
    if scoring.kind == "recall":
        found = [reference.lower() in said.lower() for reference in item["answers"]]
        share = float(np.mean(found)) if scoring.get("answers") == "all" else float(any(found))
        return row | {"prediction": said, "target": "\n".join(item["answers"]), "hit": share == 1, "score": share}
    wanted = item["target"].strip()
    return row | {"prediction": said, "target": wanted, "hit": said == wanted, "score": _bleu().sentence_bleu(said, [wanted]).score / 100}


def summary(scoring: Scoring, rows: list[dict[str, Any]], items: dict[str, Row], shots: int) -> dict[str, Any]:
    """The score of one draw's rows, in per cent (BLEU in its points), and what else is counted over them."""
    found: dict[str, Any] = dict.fromkeys(("chance", "nll", "perplexity", *(f"accuracy_{rule}" for rule in RULES)))
    found |= {"kind": scoring.kind, "version": scoring.version, "items": len(rows), "metric": METRICS[scoring.kind]}
    if scoring.kind == "generation":
        found["score"] = _bleu().corpus_bleu([row["prediction"] for row in rows], [[row["target"] for row in rows]]).score
    else:
        found["score"] = 100 * float(np.mean([row["score"] for row in rows]))
    if scoring.kind == "multiple_choice":
        answers = [items[row["item"]]["answer_index"] for row in rows]
        found["chance"] = 100 * float(np.mean([1 / len(row["scores"]) for row in rows]))
        for rule in RULES:
            right = [choice(row, rule) == answer for row, answer in zip(rows, answers, strict=True)]
            found[f"accuracy_{rule}"] = 100 * float(np.mean(right))
        found["nll"] = float(np.mean([row["scores"][answer] for row, answer in zip(rows, answers, strict=True)]))
    if scoring.kind == "greedy":
        found["nll"] = float(np.mean([row["scores"][0] for row in rows]))
        with np.errstate(over="ignore"):
            found["perplexity"] = float(np.exp(found["nll"]))
    return found | {
        "truncated": sum(row["truncated"] for row in rows),
        "answers_cut": sum(row["answer_cut"] for row in rows),
        "shots_dropped": sum(shots - row["shots_used"] for row in rows),
    }


def _bleu() -> Any:
    try:
        import sacrebleu
    except ImportError as error:
        raise ValueError(f"generation tasks are scored by sacrebleu, which is not installed ({error}): pip install sacrebleu.") from error
    return sacrebleu
