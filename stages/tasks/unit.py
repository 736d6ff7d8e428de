"""One unit of evaluation: a task at one number of shots, over all draws of them: tasks.parquet, an item and draw a row, and scores.parquet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stages import schemas
from stages.tasks import results
from stages.tasks.engine import Engine
from stages.tasks.entry import Scoring
from stages.tasks.prompts import Row

ITEMS = "items.parquet"


def load(folder: Path, schema: str) -> list[Row]:
    """The items that the items stage wrote."""
    return schemas.read(folder / ITEMS, schema).to_pylist()


def chosen(scoring: Scoring, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(places of the items that are evaluated, in order; places that are left over): `limit` of them, by seed."""
    if scoring.limit is None or scoring.limit >= count:
        return np.arange(count), np.arange(0)
    order = np.random.default_rng([scoring.seed, 0]).permutation(count)
    return np.sort(order[: scoring.limit]), np.sort(order[scoring.limit :])


def draw(scoring: Scoring, pool: Sequence[Row], shots: int, number: int, name: str) -> list[Row]:
    """The examples of one draw: different ones, the first of a larger number being a smaller's."""
    if shots > len(pool):
        raise ValueError(
            f"tasks.{name}: {shots} shots are wanted and {len(pool)} examples are there; lower shots or limit, or give examples of their own."
        )
    order = np.random.default_rng([scoring.seed, 1, number]).permutation(len(pool))
    return [pool[place] for place in order[:shots]]


def make(
    folder: Path, *, name: str, key: str, scoring: Scoring, shots: int, items: list[Row], examples: list[Row] | None, engine: Engine
) -> None:
    """Evaluate, and write the unit's two files into `folder`. examples: None: what `limit` leaves over."""
    import pyarrow as pa

    places, rest = chosen(scoring, len(items))
    rows = [items[place] for place in places]
    pool = [items[place] for place in rest] if examples is None else examples
    by_id = {row["id"]: row for row in rows}
    lines: list[dict[str, Any]] = []
    scores: list[dict[str, Any]] = []
    own = {"task": name, "version": scoring.version, "shots": shots}
    for number in range(scoring.draws if shots else 1):
        found: list[dict[str, Any]] = [{}] * len(rows)
        for place, used, ask, answer in engine.evaluate(scoring, rows, draw(scoring, pool, shots, number, name)):
            made = results.result(scoring, rows[place], ask, answer, engine.decode)
            found[place] = own | {"draw": number, "shots_used": used} | made
        scores.append(own | {"draw": number, "group": None, "setting": ""} | results.summary(scoring, found, by_id, shots))
        lines += found
    for file, schema, data in (("tasks", "tasks", lines), ("scores", "scores", scores)):
        table = pa.Table.from_pylist(data, schema=schemas.schema(schema))
        schemas.write(folder / f"{file}.parquet", table, name=schema, key=key)
