"""Recall that was learned: a small study whose models are trained on documents to be foretold by looking back, and asked about others.

Two tasks from seeds, those of training and of evaluation apart. facts: lines "noun adjective", paired at random, and then one of the nouns. needle: two words in
a haystack of noise (stages/tasks/needles.py). The stages run as in any study, from params.yaml to scores.

Of the models, `looking` is a gated linear attention, whose short convolution tells a token what precedes it, and an attention that sees everything. `near` is
attention of the same shape that sees 2 tokens: trained on the same rows, it answers without the passage, but for its last word.

    python -m benchmarks recall [--steps STEPS]
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.table import Row, report, said

NANO = Path(__file__).parent.parent / "pipelines" / "nano"
MODELS = {
    "looking": {"pattern": [{"layer": "gla"}, {"layer": "attention"}]},
    "near": {"pattern": [{"layer": "attention", "window": 2}]},
}
SCALE = {"layers": 2, "width": 64, "heads": 2, "key_size": 32, "mlp": 128}
WORDS, SIZE, QUESTIONS = 24, 12, 12  # nouns and adjectives there are; lines of a passage; questions behind each in training
LENGTH, BATCH, RATE, STEPS = 128, 16, 8e-3, 900
VOCABULARY, ITEMS = 1024, 100
NOISE, ANSWER, DEPTHS = 5, 12, 5  # sentences of a training document's haystack at most; tokens kept for an answer; places of needles
NEEDLE = {"make": "niah", "length": LENGTH, "value_type": "words", "depths": DEPTHS, "answer_tokens": ANSWER}
TRAINING, VALIDATION, EVALUATION = 1, 2, 3  # seeds


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks recall", description="Recall that was learned, by depth.")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of training, {BATCH} x {LENGTH} tokens each")
    parser.add_argument("--items", type=int, default=ITEMS, help="of each task")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", default=None, help="folder of the table; benchmarks/results if not given")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        made = study(Path(folder), steps=options.steps, items=options.items, threads=options.threads)
        print(report("recall", (said(row) for row in made), folder=options.out))


def study(folder: Path, *, steps: int = STEPS, items: int = ITEMS, threads: int = 1) -> Iterator[Row]:
    """Run the study in `folder`, where its artifacts then stand. A row per cell and task: items at 1 and at 0, and per cent at 1, of all and by
    where in the context the answer is (depth 0: its start, 100: its end)."""
    from pipelines import cells, reading, tuning, workspace
    from stages import schemas
    from stages.spec import Context

    params = reading.parse(_params(folder, steps, items))
    files = {name: list(source.files) for name, source in params.data.sources.items()}
    training: dict[str, Row] = {}
    for (stage, cell), spec in cells.specs(params, cells.version_table()).items():
        if stage == "analyze":
            continue
        out = folder / workspace.output(stage, cell, params.data.sources[cell].role if stage == "tokenize" else None)
        out.mkdir(parents=True, exist_ok=True)
        read: Any = {"vocabulary": files, "tokenize": files.get(cell), "items": {"facts": params.tasks["facts"].items.files}}.get(stage)
        inputs = {name: folder / path for name, path in workspace.inputs(spec, cell).items()}
        began = time.perf_counter()
        context = Context(threads=threads, device="cpu", settings={"sources": read}, progress_file=out / "progress.jsonl")
        importlib.import_module(f"stages.{stage}").run(spec, out, inputs, context)
        if stage == "train":
            training[cell] = {
                "parameters": tuning.model_at(params, *cell.split("-")[:2]).parameters,
                "tokens": spec.parameters["steps"] * BATCH * LENGTH,
                "seconds": time.perf_counter() - began,
            }
        if stage == "evaluate":
            for task in params.tasks:
                rows = schemas.read(out / f"{task}@0" / "tasks.parquet", "tasks").to_pylist()
                yield {"cell": cell, **training[cell], "task": task, **_counted(rows)}


def _counted(rows: list[Row]) -> Row:
    depths: dict[int, list[float]] = {}
    for row in rows:
        depths.setdefault(int(row["item"].rsplit("-", 1)[1]), []).append(row["score"])
    hits = sum(row["hit"] for row in rows)
    found = {"items": len(rows), "at 1": hits, "at 0": sum(row["score"] == 0 for row in rows), "score": 100 * hits / len(rows)}
    return found | {f"at depth {depth}": 100 * float(np.mean(scores)) for depth, scores in sorted(depths.items())}


def _params(folder: Path, steps: int, items: int) -> dict[str, Any]:
    """params.yaml of the study, its documents and facts written into `folder`: the nano study's but for what is named here."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from pipelines.reading import read
    from stages import schemas
    from stages.sources import pin

    made = read(NANO) | {"root": ".", "study": "recall", "models": MODELS, "scales": {"tiny": SCALE}}
    counts = {
        "training": (TRAINING, max(8000, steps * BATCH * LENGTH // 60)),
        "validation": (VALIDATION, 200),
    }  # a document has 60 tokens and more; the vocabulary wants some, too
    files = {role: [str(folder / f"{role}.parquet")] for role in (*counts, "facts")}
    for role, (seed, count) in counts.items():
        pq.write_table(pa.table({"text": [document(seed, number) for number in range(count)]}), files[role][0])
    facts = [fact_item(EVALUATION, number) for number in range(items)]
    pq.write_table(pa.Table.from_pylist(facts, schema=schemas.schema("recall")), files["facts"][0])

    made["grid"] = {"models": list(MODELS), "scales": ["tiny"], "budgets": ["all"]}
    made["sweep"] = {"models": [], "scales": [], "budgets": []}
    made["budgets"] = {"all": {"tokens": steps * BATCH * LENGTH}}
    made["learning_rates"] = {model: {"tiny": dict.fromkeys(made["budgets"], RATE)} for model in MODELS}
    made["vocabulary"] = {"kind": "bpe", "size": VOCABULARY, "megabytes": 1.0}
    made["data"] = {"sources": {role: {"role": role, "files": files[role], "pin": pin(files[role])} for role in counts}}
    made["packing"] = {"sequence_length": LENGTH, "validation_rows": 32, "shard_rows": 8192}
    made["training"] |= {"batch": BATCH, "warmup_steps": min(50, steps // 2), "checkpoint_every": 1000}
    made["training"]["optimizer"] = made["training"]["optimizer"] | {"weight_decay": 0.0}
    made["evaluation"] = {"lengths": [LENGTH]}
    made["tasks"] = {
        "facts": {"kind": "recall", "items": {"files": files["facts"], "pin": pin(files["facts"])}, "new_tokens": 4},
        "needle": {"kind": "recall", "group": f"niah-noise-{LENGTH}", "generate": NEEDLE | {"samples": items, "seed": EVALUATION}},
    }
    made["analysis"] = {"title": "Recall", "baseline": "near"}
    return made


# What models read and are asked: functions of (seed, number) alone


def _facts(random: np.random.Generator, size: int) -> list[tuple[str, str]]:
    from stages.tasks import words

    nouns, adjectives = (words.lists()[kind] for kind in ("nouns", "adjectives"))
    return [(nouns[a], adjectives[b]) for a, b in zip(random.permutation(WORDS)[:size], random.permutation(WORDS)[:size], strict=True)]


def _lines(facts: list[tuple[str, str]]) -> str:
    return "\n".join(f"{noun} {adjective}" for noun, adjective in facts)


def fact_item(seed: int, number: int) -> Row:
    """An item of `facts`, in the recall schema; its id ends with the depth of the answer, as a needle's does."""
    random = np.random.default_rng([seed, number])
    facts = _facts(random, SIZE)
    place = int(random.integers(SIZE))
    noun, adjective = facts[place]
    return {"id": f"{number}-depth-{100 * place // (SIZE - 1)}", "context": _lines(facts), "question": noun, "answers": [adjective]}


def document(seed: int, number: int) -> str:
    """A training document: facts, from 1 to SIZE of them, and questions with answers; or, every other time, a needle in noise, asked for."""
    from stages.tasks import needles
    from stages.tasks.entry import PROMPTS, Generated

    random = np.random.default_rng([seed, number])
    if number % 2:
        make = needles.maker(Generated(**NEEDLE), None)
        _, context, question, (answer,) = make(random, int(random.integers(NOISE + 1)))
        return f"{PROMPTS['recall'].format(context=context, question=question)} {answer}\n"
    facts = _facts(random, int(random.integers(1, SIZE + 1)))
    return f"{_lines(facts)}\n{_lines([facts[place] for place in random.integers(0, len(facts), QUESTIONS)])}\n"
