"""Rows: by number, the same however they are asked for, and never wrong ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages import pack, rows, schemas
from stages.rows import Rows
from tests.stages.small_corpus import make_tokens, packed

BIG = 1 << 20
COUNT = 45  # in shards of 20, row groups of 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    random = np.random.default_rng(0)

    def make(name: str, count: int) -> Path:
        documents = [random.integers(1, BIG, random.integers(1, 60)).tolist() for _ in range(count)]
        return make_tokens(folder / name, documents, vocab_size=BIG)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "GROUP_TOKENS", 6 * 17)
        packed(
            folder / "p",
            [make("training", 60)],
            [make("held", 20)],
            vocab_size=BIG,
            shard_rows=20,
            budgets={"s": 12, "m": COUNT},
            validation_rows=9,
        )
    return folder / "p"


@pytest.fixture(scope="module")
def whole(folder) -> tuple[np.ndarray, list[list[int]]]:
    tables = [schemas.read(path, "packed") for path in sorted((folder / "shards").glob("*/rows.parquet"))]
    return np.concatenate([np.array(table["tokens"].to_pylist()) for table in tables]), [
        row for table in tables for row in table["segments"].to_pylist()
    ]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_rows_in_any_order(folder, whole, data):
    opened = Rows(folder / "budgets" / "m.json")
    for _ in range(data.draw(st.integers(1, 6))):
        start = data.draw(st.integers(0, COUNT))
        stop = data.draw(st.integers(start, COUNT))
        tokens, segments = opened.read(start, stop)
        assert tokens.shape == (stop - start, 17) and tokens.dtype == (np.uint32 if stop > start else tokens.dtype)
        assert np.array_equal(tokens, whole[0][start:stop])
        assert [row.tolist() for row in segments] == whole[1][start:stop]
        assert all(row.dtype == np.int32 and row.sum() == 17 for row in segments)


def test_a_budget_is_a_prefix(folder, whole):
    small, large = Rows(folder / "budgets" / "s.json"), Rows(folder / "budgets" / "m.json", verify=True)
    assert len(small) == small.rows == 12 and len(large) == COUNT and small.sequence_length == 16
    assert np.array_equal(small.read(0, 12)[0], large.read(0, COUNT)[0][:12])
    for start, stop in ((0, 13), (-1, 3), (5, 4)):
        with pytest.raises(ValueError, match="this budget has 12"):
            small.read(start, stop)


def test_few_files_and_row_groups_are_held(folder):
    opened = Rows(folder / "budgets" / "m.json")
    for row in np.random.default_rng(0).permutation(COUNT):
        opened.read(row, row + 1)
        assert len(opened._groups) <= rows.HELD and len(opened._files) <= rows.HELD


def test_a_row_group_is_decoded_once_for_rows_read_in_order(folder, monkeypatch):
    decoded = []
    read = pq.ParquetFile.read_row_group
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", lambda self, group, **how: decoded.append(group) or read(self, group, **how))
    opened = Rows(folder / "budgets" / "m.json")
    for row in range(0, COUNT, 5):
        opened.read(row, row + 5)
    assert len(decoded) == 4 + 4 + 1


def test_validation_rows(folder):
    opened = rows.validation(folder / "validation", verify=True)
    wanted = schemas.read(folder / "validation" / "rows.parquet", "packed")
    assert len(opened) == 9 and opened.sequence_length == 16
    assert (
        opened.read(0, 9)[0].tolist() == wanted["tokens"].to_pylist()
        and [row.tolist() for row in opened.read(0, 9)[1]] == wanted["segments"].to_pylist()
    )


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def other_rows(path: Path) -> None:
    shutil.copy(path.parent.parent / "00000" / "rows.parquet", path)


def not_rows(path: Path) -> None:
    table = schemas.read(path, "packed")
    schemas.write(path, table, name=schemas.FREE, key="k")


@pytest.mark.parametrize("name, damage, message", [
    ("shards/00001/rows.parquet", cut, "00001/rows.parquet is not a whole"),
    ("shards/00001/rows.parquet", other_rows, "00001/rows.parquet does not hold the rows"),
    ("shards/00001/rows.parquet", Path.unlink, "00001/rows.parquet"),
    ("shards/00001/rows.parquet", not_rows, "wanted packed"),
    ("budgets/m.json", cut, "m.json is not a readable budget"),
    ("budgets/m.json", Path.unlink, "m.json is not a readable budget"),
    ("budgets/m.json", lambda path: path.write_text(path.read_text().replace(f'"rows": {COUNT}', '"rows": 46')), "does not agree with itself"),
    ("budgets/m.json", lambda path: path.write_text(path.read_text().replace('"sequence_length": 16', '"sequence_length": 15')), "rows of 17 tokens, wanted"),
    ("budgets/m.json", lambda path: path.write_text("[]"), "m.json is not a readable budget"),
])  # fmt: skip
def test_what_is_not_right_is_refused_at_opening(tmp_path, folder, name, damage, message):
    copy = shutil.copytree(folder, tmp_path / "p")
    damage(copy / name)
    with pytest.raises(ValueError, match=message):
        Rows(copy / "budgets" / "m.json")


def test_a_shard_with_too_few_rows_is_refused(tmp_path, folder):
    copy = shutil.copytree(folder, tmp_path / "p")
    budget = json.loads((copy / "budgets" / "m.json").read_text())
    budget["shards"][0][2], budget["rows"] = 21, COUNT + 1
    (copy / "budgets" / "m.json").write_text(json.dumps(budget))
    with pytest.raises(ValueError, match="has 20 rows of 17 tokens, wanted 21"):
        Rows(copy / "budgets" / "m.json")


def test_damage_inside_a_page_is_seen_when_read_or_verified(tmp_path, folder):
    copy = shutil.copytree(folder, tmp_path / "p")
    path = copy / "shards" / "00001" / "rows.parquet"
    column = pq.read_metadata(path).row_group(0).column(0)
    data = bytearray(path.read_bytes())
    data[column.data_page_offset + column.total_compressed_size - 5] ^= 1
    path.write_bytes(data)
    opened = Rows(copy / "budgets" / "m.json")
    opened.read(0, 20)
    with pytest.raises(ValueError, match="00001/rows.parquet is not a whole Parquet file"):
        opened.read(20, 21)
    with pytest.raises(ValueError, match="00001/rows.parquet"):
        Rows(copy / "budgets" / "m.json", verify=True)
