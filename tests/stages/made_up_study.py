"""A study's histories and evaluations, made up but plausible, in a study's folders and through the stages' own writers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from stages import artifact, measures, schemas, units
from stages.report.parameters import Analysis
from stages.spec import Spec

LENGTH, BATCH = 256, 16
SETTINGS = {"": 14.2, "cg5": 5.0, "cg10": 9.6, "eps1e-2": 4.4, "eps1e-4": 11.8, "no_solve": 0.0}

# model -> (offset of the loss in nats, advantage at early positions, nats per doubling past the training length)
SHAPES = {
    "transformer": (0.0, 0.0, 0.22),
    "mesa": (-0.012, 0.06, 0.0),
    "hawk_mesa": (-0.018, 0.09, 0.004),
    "gated_deltanet": (-0.006, 0.05, 0.003),
    "gla": (0.010, 0.05, 0.012),
    "mamba2": (0.055, 0.03, 0.11),
}


def key(*parts: str) -> str:
    return hashlib.sha256("/".join(parts).encode()).hexdigest()


def seeded(*parts: object) -> np.random.Generator:
    return np.random.default_rng(int(key(*map(str, parts))[:12], 16))


def cell(model: str, scale: str = "nano", budget: str = "1m", **more: Any) -> dict[str, Any]:
    """A cell as an analysis' spec lists it."""
    mesa = "mesa" in model
    facts = {
        "layer": "mesa" if mesa else model,
        "parameters": 2_913_280 + 512 * len(model),
        "tokens": 1_048_576,
        "flops": 1.9e13 * (1.3 if mesa else 1),
    }
    return (
        {
            "cell": f"{model}-{scale}-{budget}",
            "model": model,
            "scale": scale,
            "budget": budget,
            "group": "grid",
            "steps": 30 if mesa else None,
        }
        | facts
        | more
    )


def write_history(path: Path, cell: dict[str, Any], *, losses: np.ndarray | None = None, devices: int | None = None) -> None:
    """A loss curve that falls as a power of the step; the noise of a batch is the same for every model."""
    steps = cell["tokens"] // (BATCH * LENGTH) if losses is None else len(losses)
    step = np.arange(1, steps + 1)
    if losses is None:
        offset = SHAPES.get(cell["model"], (0.02,))[0]
        noise = seeded("batches", cell["scale"]).normal(0, 0.035, steps) + seeded(cell["cell"]).normal(0, 0.004, steps)
        losses = 2.05 + offset + 5.2 * (1 + step / 1.5) ** -0.62 + offset * 3 * np.exp(-step / 60) + noise
    mesa = 0.72 if "mesa" in cell["model"] else 1.0
    rate = mesa * 21_000 * (1 + seeded(cell["cell"], "rate").normal(0, 0.02, steps))
    columns = {
        "step": step, "tokens": step * cell["tokens"] // steps, "loss": losses, "learning_rate": np.full(steps, 1e-3), "grad_norm": np.full(steps, 0.5),
        "seconds": BATCH * LENGTH / rate, "tokens_per_second": rate, "mfu": np.full(steps, 0.21), "mfu_without_cg": np.full(steps, 0.21 * mesa), "event": [None] * steps,
    }  # fmt: skip
    extra = {"devices": np.full(steps, float(devices))} if devices else {}
    if "palimpsa" in cell["model"]:
        extra |= {"log_window": 3 + np.log1p(step / 40)}
        extra |= {} if "plain" in cell["model"] else {"importance_ratio": 0.5 + step**0.7}
    if "mesa" in cell["model"]:
        extra |= {
            "cg_steps": 8 + 3 * (1 - np.exp(-step / 90)),
            "gamma": 0.5 + 0.3 * (1 - np.exp(-step / 60)),
            "cg_residual": 1e-4 * np.ones(steps),
        }
    schema = schemas.schema("history", extra=extra)
    columns |= dict(sorted(extra.items()))
    table = pa.table({name: pa.array(values) for name, values in columns.items()}).cast(schema)
    schemas.write(path, table, name="history", key=key("train", cell["cell"]))


def made_up_nlls(cell: dict[str, Any], text: str, length: int, setting: str, sequences: int = 24) -> list[np.ndarray]:
    """Losses that fall with the position, the same sequences for every model; a few sequences are short."""
    offset, early, beyond = SHAPES.get(cell["model"], (0.02, 0.0, 0.1))
    sizes = np.where(seeded(text, length).random(sequences) < 0.25, length // 3, length)
    found = []
    for i, size in enumerate(sizes):
        k = np.arange(1, size + 1)
        hard = seeded(text, i).normal(0, 0.3) + seeded(text, length, i).gamma(2.0, 0.35, size) - 0.7
        mean = 2.0 + {"validation": 0.0, "books": 0.2}.get(text, 0.35) + 2.6 * k**-0.45
        ours = (
            offset
            - early * np.exp(-k / 24)
            + 0.018 * (early > 0) * np.clip(np.log2(k / 40), 0, 6) / 3
            + beyond * np.clip(np.log2(k / LENGTH), 0, 8)
        )
        steps = cell["steps"] if cell["steps"] not in (None, 30) else None
        if setting or steps:
            lack = {"cg5": 0.012, "cg10": 0.0004, "eps1e-2": 0.006, "eps1e-4": 0.0, "no_solve": 0.16}.get(
                setting, {5: 0.012, 10: 0.002}.get(steps, 0.0)
            )
            ours = ours + lack * np.log2(1 + k) / 8
        nll = (mean + hard + ours + seeded(cell["cell"], text, i, setting).normal(0, 0.01, size)).astype(np.float32)
        if i % 5 == 0:
            nll[size // 2] = np.nan
        found.append(nll)
    return found


def score(task: str, value: float, group: str | None = None, **more: Any) -> dict[str, Any]:
    """A row of scores.parquet, of a multiple choice out of four with 1,000 items where `more` does not say otherwise."""
    kind = more.get("kind", "multiple_choice")
    row: dict[str, Any] = dict.fromkeys(schemas.COLUMNS["scores"]) | {
        "task": task, "group": group, "kind": kind, "version": 1, "setting": "", "shots": 0, "draw": 0, "items": 1000, "score": value,
        "metric": {"recall": "contained", "generation": "bleu"}.get(kind, "accuracy"), "truncated": 0, "answers_cut": 0, "shots_dropped": 0,
    }  # fmt: skip
    if kind == "multiple_choice":
        row |= {"chance": 25.0, "accuracy_tokens": value, "accuracy_none": value - 1, "accuracy_bytes": value + 1}
    return row | more


def write_evaluation(
    out: Path, cell: dict[str, Any], nlls: dict[tuple[str, int, str], list[np.ndarray]], *, scores: list[dict[str, Any]] | None = None,
    domains: list[dict[str, Any]] | None = None, internals: list[dict[str, Any]] | None = None, memory: list[dict[str, Any]] | None = None,
    internals_course: list[dict[str, Any]] | None = None, memory_course: list[dict[str, Any]] | None = None,
) -> None:  # fmt: skip
    """An evaluation's folder: a unit a (set, length, setting), and the collected tables."""
    made_by = key("evaluate", cell["cell"])
    rows = []
    for (text, length, setting), losses in nlls.items():
        nll_sum, count = measures.by_position(losses)
        with units.making(
            out / (f"{text}-{length}" + (f"-{setting}" if setting else "")), key=made_by, stage="evaluate", inputs={}
        ) as folder:
            many = len(losses)
            columns = {
                "set": [text] * many,
                "source": ["books"] * many,
                "length": [length] * many,
                "sequence": range(many),
                "start": [0] * many,
                "nll": losses,
            }
            schema = schemas.schema("nll")
            schemas.write(folder / "nll.parquet", schemas.batches([columns], schema), name="nll", key=made_by, schema=schema)
            positions = {
                "set": [text] * len(count),
                "length": [length] * len(count),
                "position": range(1, len(count) + 1),
                "nll_sum": nll_sum,
                "count": count,
            }
            schema = schemas.schema("positions")
            schemas.write(folder / "positions.parquet", schemas.batches([positions], schema), name="positions", key=made_by, schema=schema)
        tokens, cg = int(count.sum()), "mesa" in cell["model"]
        rows.append(
            {
                "set": text,
                "length": length,
                "setting": setting,
                "sequences": many,
                "tokens": tokens,
                "nll": float(nll_sum.sum()) / tokens,
                "perplexity": measures.perplexity(losses),
                "steps_taken": SETTINGS.get(setting) if cg else None,
                "residual": 1e-4 if cg else None,
            }  # fmt: skip
        )
    schema = schemas.schema("perplexity")
    schemas.write(out / "perplexity.parquet", pa.Table.from_pylist(rows, schema), name="perplexity", key=made_by)
    for row in scores or []:
        if (row["group"] or "").startswith("niah") and not row["setting"] and not row["draw"]:
            schema = schemas.schema("tasks")
            items = pa.Table.from_pylist([dict.fromkeys(schema.names) | one for one in made_up_needles(row)], schema)
            schemas.write(out / f"{row['task']}@{row['shots']}" / "tasks.parquet", items, name="tasks", key=made_by)
    inside = {"internals": internals, "memory": memory, "internals_course": internals_course, "memory_course": memory_course}
    for name, more in ({"scores": scores, "domains": domains} | inside).items():
        if more:
            file = out / ("internals" if name in ("internals", "memory") else "") / f"{name}.parquet"
            schemas.write(file, pa.Table.from_pylist(more, schemas.schema(name)), name=name, key=made_by)
    files = [str(path.relative_to(out)) for path in out.rglob("*.parquet")]
    artifact.write(out, key=made_by, stage="evaluate", files=files, inputs={})


def made_up_needles(row: dict[str, Any], items: int = 400) -> list[dict[str, Any]]:
    """Items of one needle at 40 depths, found as often as the row's score says on the whole, and more often near the end."""
    random, depth = seeded(row["task"], row["score"]), np.arange(items) % 40 / 39
    wanted = np.clip(row["score"] / 100 * (0.5 + depth), 0, 1)
    found = random.random(items) < wanted
    return [{"item": f"{i}-depth-{100 * depth[i]:.0f}", "score": float(found[i]), "hit": bool(found[i])} for i in range(items)]


def made_up_memory(cell: dict[str, Any], *, blocks: int = 4, heads: int = 6, length: int = LENGTH) -> list[dict[str, Any]]:
    """Windows of 4 to 1000 tokens; importance grows within them. Without metaplasticity there are windows alone."""
    random, rows = seeded(cell["cell"], "memory"), []
    for block, head in np.ndindex(blocks, heads):
        window = np.exp(random.uniform(1.4, 6.9))
        for first, last in ((1, 1), (2, 16), (17, length)):
            high = 1 + 0.4 * min(last, window)
            row = {"block": block, "head": head, "first": first, "position": last, "sequences": 8, "log_window": float(np.log(window))}
            beta = {
                "beta": 0.3,
                "ratio": high / 1.1 - 1,
                "importance_low": 1.1,
                "importance_mean": (1.1 + high) / 2,
                "importance_high": high,
            }
            rows.append(dict.fromkeys(schemas.COLUMNS["memory"]) | row | ({} if "plain" in cell["model"] else beta))
    return rows


def made_up_internals(cell: dict[str, Any], *, blocks: int = 4, heads: int = 6, length: int = LENGTH) -> list[dict[str, Any]]:
    """In every block one head forgets little, and its system's condition grows along the sequence."""
    random, lasts, rows = seeded(cell["cell"], "internals"), [1, 16, length], []
    for block, head in np.ndindex(blocks, heads):
        gamma, lam = (0.997, 0.6) if head == block % heads else (random.uniform(0.5, 0.95), random.uniform(0.7, 1.5))
        for first, last in zip([1, 2, 17], lasts, strict=True):
            grown = min(last, 1 / (1 - gamma)) / lam
            rows.append({
                "block": block, "head": head, "first": first, "position": last, "sequences": 8, "gamma": gamma, "beta": random.uniform(0.2, 0.9),
                "steps": 2 + np.log1p(grown), "cosine": 1 - 0.4 / (1 + grown), "condition": 1 + grown, "lambda_low": 0.9 * lam, "lambda_mean": lam,
                "lambda_high": 1.1 * lam,
            })  # fmt: skip
    return rows


def made_up_course(cell: dict[str, Any], rows: list[dict[str, Any]], *, looks: int = 9) -> list[dict[str, Any]]:
    """How heads came to be what `rows` say of them at the last position: they begin alike, and go there each at a pace of its own."""
    ends = [row for row in rows if row["position"] == LENGTH]
    steps = np.linspace(0, cell["tokens"] // (BATCH * LENGTH), looks).astype(int)
    random, found = seeded(cell["cell"], "course"), []
    begun = {"ratio": 0.8, "log_window": 3.0, "beta": 0.5, "gamma": 0.5, "condition": 3.0, "steps": 4.0, "cosine": 0.9, "lambda_mean": 1.25}
    for end in ends:
        pace = random.uniform(0.02, 0.08)
        for step in steps:
            now = end | {name: value + (end[name] - value) * (1 - np.exp(-pace * step)) for name, value in begun.items() if end.get(name)}
            found.append({"step": int(step), "tokens": int(step) * BATCH * LENGTH} | now | {"first": 1})
    return sorted(found, key=lambda row: (row["step"], row["block"], row["head"]))


def write_study(
    root: Path, cells: list[dict[str, Any]], *, sets: dict[str, list[int]], sweep_on: str | None = None,
    scores: dict[str, list[dict[str, Any]]] | None = None, domains: Sequence[str] = (),
) -> None:  # fmt: skip
    """Histories and evaluations of cells under a study's folder. sets: text set -> lengths. sweep_on: the model evaluated at other CG settings.
    It has internals too. scores: of tasks, by model. domains: those of the first set's documents."""
    for one in cells:
        write_history(root / f"history/{one['cell']}.parquet", one)
        settings = SETTINGS if one["model"] == sweep_on else [""]
        nlls = {
            (text, length, s): made_up_nlls(one, text, length, s) for text, lengths in sets.items() for length in lengths for s in settings
        }
        inside = made_up_internals(one) if one["model"] == sweep_on else None
        memory = made_up_memory(one) if "palimpsa" in one["model"] else None
        first = next((text, lengths[0]) for text, lengths in sets.items())
        of = [
            {"set": first[0], "source": source, "length": first[1], "setting": "", "sequences": 12, "tokens": 3000, "nll": 3.0 + i / 8, "perplexity": float(np.exp(3.0 + i / 8))}
            for i, source in enumerate(domains)
        ]  # fmt: skip
        write_evaluation(
            root / f"evaluations/{one['cell']}",
            one,
            nlls,
            scores=(scores or {}).get(one["model"]),
            domains=of,
            internals=inside,
            memory=memory,
            internals_course=inside and made_up_course(one, inside),
            memory_course=memory and made_up_course(one, memory),
        )


def spec_of(cells: list[dict[str, Any]], **analysis: Any) -> Spec:
    """The analysis' spec of these cells."""
    inputs = {f"history/{one['cell']}": key("train", one["cell"]) for one in cells} | {
        f"evaluations/{one['cell']}": key("evaluate", one["cell"]) for one in cells
    }
    return Spec(stage="analyze", versions={"analyze": 1}, inputs=inputs, parameters=Analysis(**analysis).model_dump() | {"cells": cells})


def inputs_of(root: Path, spec: Spec) -> dict[str, Path]:
    """Where the inputs stand in a study's folder."""
    return {name: root / (f"{name}.parquet" if name.startswith("history/") else name) for name in spec.inputs}
