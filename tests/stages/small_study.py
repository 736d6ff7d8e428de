"""What the tests of train and evaluate stand on: packed rows, text sets and specs of a study of a few thousand random tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from models import checkpoint
from stages import artifact, schemas, train, units
from stages.spec import Context, Spec, fingerprint

VOCABULARY, BOS, LENGTH = 32, 0, 12
SCALE = {"layers": 1, "width": 16, "heads": 2, "key_size": 8, "mlp": 24}
MESA = {"layer": "mesa", "steps": 4}
GLA = {"layer": "gla"}


def rows_table(rows: int, seed: int) -> pa.Table:
    """Random rows, each of two pieces that BOS opens."""
    random = np.random.default_rng(seed)
    tokens = random.integers(1, VOCABULARY, (rows, LENGTH + 1))
    cuts = random.integers(2, LENGTH - 1, rows)
    tokens[:, 0] = tokens[np.arange(rows), cuts] = BOS
    segments = [[int(cut), LENGTH + 1 - int(cut)] for cut in cuts]
    return pa.table(
        {"tokens": tokens.tolist(), "segments": segments}, schema=schemas.schema("packed", vocab_size=VOCABULARY, length=LENGTH + 1)
    )


def make_packed(folder: Path, *, rows: int = 128, shard_rows: int = 48) -> Path:
    """packed/ with its shards, validation and one budget, whose file is returned."""
    shards = []
    for number, first in enumerate(range(0, rows, shard_rows)):
        name, key, count = f"{number:05d}", fingerprint(["shard", number]), min(shard_rows, rows - first)
        with units.making(folder / "shards" / name, key=key, stage="pack", inputs={}) as unit:
            digest = schemas.write(unit / "rows.parquet", rows_table(count, number), name="packed", key=key)
        shards.append([name, digest, count])
    with units.making(folder / "validation", key=key_of("validation"), stage="pack", inputs={}) as unit:
        schemas.write(unit / "rows.parquet", rows_table(9, 99), name="packed", key=key_of("validation"))
    digest = fingerprint([[digest, count] for _, digest, count in shards])
    facts = {"rows": rows, "sequence_length": LENGTH, "tokens": rows * LENGTH, "shards": shards, "digest": digest, "key": key_of("budget")}
    artifact.write_atomically(folder / "budgets" / "small.json", json.dumps(facts))
    return folder / "budgets" / "small.json"


def key_of(name: str) -> str:
    return fingerprint({"of": name})


def train_spec(*, steps: int = 12, model: dict[str, Any] = GLA, **changes: Any) -> Spec:
    parameters = {
        "batch": 4, "optimizer": {}, "warmup_steps": 3, "learning_rate": 0.02, "steps": steps, "checkpoint_every": 5,
        "model": model, "scale": SCALE, "vocab_size": VOCABULARY, "bos": BOS, "sequence_length": LENGTH,
    } | changes  # fmt: skip
    return Spec(stage="train", versions={"train": 1}, inputs={"budget": key_of("budget")}, parameters=parameters)


def looking_spec(**changes: Any) -> Spec:
    """A training that looks inside after every fourth step, at two validation rows."""
    spec = train_spec(**{"internals": {"every": 4, "rows": 2}} | changes)
    return spec.model_copy(update={"inputs": spec.inputs | {"validation": key_of("validation")}})


def context(**changes: Any) -> tuple[Context, list[dict[str, Any]]]:
    """A context on one thread of the CPU, and the list that its progress goes to."""
    lines: list[dict[str, Any]] = []
    return Context(**{"threads": 1, "device": "cpu", "on_progress": lines.append} | changes), lines


def notes(lines: list[dict[str, Any]]) -> str:
    return "\n".join(line["note"] for line in lines if "note" in line)


def make_tokens(folder: Path, *, lengths: list[int], seed: int = 0, files: int = 2) -> Path:
    """A tokens folder of random documents of these lengths, from two sources, in some files."""
    random = np.random.default_rng(seed)
    documents = [(f"document-{i}", "odd" if i % 2 else "even", random.integers(1, VOCABULARY, n).tolist()) for i, n in enumerate(lengths)]
    key, schema = key_of(folder.name), schemas.schema("tokens", vocab_size=VOCABULARY)
    names = []
    for number in range(files):
        part = documents[len(documents) * number // files : len(documents) * (number + 1) // files]
        columns = dict(zip(("id", "source", "tokens"), (list(column) for column in zip(*part, strict=True)), strict=True))
        schemas.write(folder / f"{number:05d}" / "tokens.parquet", pa.table(columns, schema=schema), name="tokens", key=key)
        names.append(f"{number:05d}/tokens.parquet")
    artifact.write(folder, key=key, stage="tokenize", files=names, inputs={})
    return folder


def evaluate_spec(*, weights: Spec, sets: list[str], lengths: list[int], settings: dict[str, Any] | None = None, **changes: Any) -> Spec:
    same = {name: weights.parameters[name] for name in ("model", "scale", "vocab_size", "bos", "sequence_length")}
    inputs = {"weights": weights.key, "validation": key_of("validation"), **{f"evaluation/{name}": key_of(name) for name in sets}}
    parameters = same | {"reset": False, "precision": "float32", "lengths": lengths, "settings": settings or {}} | changes
    return Spec(stage="evaluate", versions={"evaluate": 1}, inputs=inputs, parameters=parameters)


def history(out: Path) -> list[dict[str, Any]]:
    return schemas.read(out / train.HISTORY, "history").to_pylist()


def course(out: Path, table: str = "memory") -> list[dict[str, Any]]:
    """What was seen of a kind of layer while it was trained."""
    return schemas.read(out / f"{table}_course.parquet", f"{table}_course").to_pylist()


def assert_same_run(alone: Path, out: Path, *, key: str, same: tuple[str, ...], near: dict[str, float]) -> None:
    """The same but for the order of sums. same: columns of the history that are equal. near: column -> relative difference."""
    for a, b in zip(history(alone), history(out), strict=True):
        assert all(a[name] == b[name] for name in same)
        assert all(b[name] == pytest.approx(a[name], rel=rel) for name, rel in near.items())
    a, b = (checkpoint.load(folder / train.WEIGHTS)[0] for folder in (alone, out))
    assert all(b[name] == pytest.approx(a[name], rel=2e-2, abs=2e-3) for name in a)
    assert artifact.read(out, key=key, content=True)
