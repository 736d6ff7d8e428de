"""Scorers over models that learned a task, not its items: one whose layers can look back answers what it never saw, one of the same shape that cannot does not."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest

from benchmarks import recall
from stages import schemas

ITEMS = recall.ITEMS
GUESSED = 100 / recall.WORDS  # per cent of facts that fit by chance, if any adjective is said


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recall")
    rows = list(recall.study(folder))
    return folder, {(row["cell"].split("-")[0], row["task"]): row for row in rows}


@pytest.mark.slow
def test_a_layer_that_can_recall_is_scored_1_and_0_and_one_that_cannot_is_not(made):
    folder, rows = made
    for task, found in (("facts", 60), ("needle", 3)):
        able, unable = rows["looking", task], rows["near", task]
        assert able["tokens"] == unable["tokens"] and able["items"] == unable["items"] == ITEMS
        assert able["at 1"] + able["at 0"] == unable["at 1"] + unable["at 0"] == ITEMS
        assert able["score"] >= found  # per cent; by chance a needle's words are found once in 140,000
        depths = [name for name in able if name.startswith("at depth")]
        assert len(depths) == {"facts": recall.SIZE, "needle": recall.DEPTHS}[task]
        assert task == "needle" or all(able[name] > 0 for name in depths)  # from the start of the context, too
        items = [
            schemas.read(folder / "evaluations" / row["cell"] / f"{task}@0" / "tasks.parquet", "tasks").to_pylist()
            for row in (able, unable)
        ]
        assert [row["item"] for row in items[0]] == [row["item"] for row in items[1]]
        for row in items[0]:
            assert row["score"] == float(row["target"].lower() in row["prediction"].lower()) and not row["truncated"]
    assert rows["looking", "needle"]["at 0"] > 0 == rows["near", "needle"]["at 1"]
    assert rows["near", "facts"]["score"] < 4 * GUESSED < rows["looking", "facts"]["score"] / 2


@pytest.mark.slow
def test_what_is_asked_was_never_read(made):
    folder, _ = made
    read = "\n".join(pq.read_table(folder / "training.parquet")["text"].to_pylist())
    for task in ("facts", "needle"):
        asked = schemas.read(folder / "items" / task / "items.parquet", "recall").to_pylist()
        assert len(asked) == ITEMS
        for row in asked:
            lines = [line for line in row["context"].split("\n") if row["answers"][0] in line]
            assert len(lines) == 1 and (row["context"] if task == "facts" else lines[0]) not in read
