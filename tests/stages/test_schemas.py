"""Parquet of ours: digests of data and not of bytes, the same bytes for the same data, damage told."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages import schemas

SCHEMA = pa.schema([
    ("id", pa.string()), ("count", pa.int64()), ("value", pa.float64()), ("yes", pa.bool_()),
    ("tokens", pa.list_(pa.uint16())), ("pair", pa.list_(pa.uint16(), 2)),
])  # fmt: skip
maybe = lambda some: st.none() | some  # noqa: E731
tokens = st.integers(0, 65535)
row = st.fixed_dictionaries({
    "id": maybe(st.text(st.characters(exclude_categories=["Cs"]), max_size=6)), "count": maybe(st.integers(-(2**63), 2**63 - 1)), "value": maybe(st.floats()),
    "yes": maybe(st.booleans()), "tokens": maybe(st.lists(tokens, max_size=5)), "pair": st.lists(tokens, min_size=2, max_size=2),
})  # fmt: skip


def cut(table: pa.Table, places: list[int]) -> list[pa.RecordBatch]:
    ends = [0, *sorted(place % (len(table) + 1) for place in places), len(table)]
    return [batch for a, b in zip(ends[:-1], ends[1:], strict=True) for batch in table.slice(a, b - a).combine_chunks().to_batches()]


def write(path, table, places=()):
    return schemas.write(path, cut(table, list(places)), name=schemas.FREE, key="k", schema=SCHEMA)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(row, min_size=1, max_size=12),
    first=st.lists(st.integers(0, 99), max_size=3),
    second=st.lists(st.integers(0, 99), max_size=3),
)
def test_the_digest_is_of_the_data_whatever_the_batches(tmp_path_factory, rows, first, second):
    folder = tmp_path_factory.mktemp("cuts")
    table = pa.Table.from_pylist(rows, SCHEMA)
    one, other = write(folder / "one.parquet", table, first), write(folder / "other.parquet", table, second)
    assert one == other == schemas.data_digest(folder / "one.parquet") == schemas.data_digest(folder / "other.parquet")
    assert schemas.recorded_digest(folder / "one.parquet") == one
    assert repr(pq.read_table(folder / "one.parquet").to_pylist()) == repr(table.to_pylist())


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(row, min_size=1, max_size=6), data=st.data())
def test_other_data_have_another_digest(tmp_path_factory, rows, data):
    folder = tmp_path_factory.mktemp("changes")
    place, column = data.draw(st.integers(0, len(rows) - 1)), data.draw(st.sampled_from(SCHEMA.names))
    changed = [dict(one) for one in rows]
    changed[place][column] = data.draw(row)[column]
    one, other = pa.Table.from_pylist(rows, SCHEMA), pa.Table.from_pylist(changed, SCHEMA)
    same = repr(one.to_pylist()) == repr(other.to_pylist())
    if same or column != "value":  # floats differ in bits, not in what they print
        assert (write(folder / "one.parquet", one) == write(folder / "other.parquet", other)) == same


def test_a_null_is_not_an_empty_value_and_a_boundary_between_lists_counts(tmp_path):
    def digest(*lists):
        table = pa.table({"tokens": pa.array(lists, pa.list_(pa.uint16()))})
        return schemas.write(tmp_path / "x.parquet", table, name=schemas.FREE, key="k")

    assert len({digest([1, 2], [3]), digest([1], [2, 3]), digest([1, 2, 3], []), digest([1, 2, 3], None), digest([1, 2, 3])}) == 5


def test_rewriting_gives_the_same_bytes(tmp_path):
    table = pa.Table.from_pylist([{"id": "a", "count": 1, "value": 0.5, "yes": True, "tokens": [1, 2], "pair": [3, 4]}] * 50, SCHEMA)
    for name in ("one", "other"):
        write(tmp_path / f"{name}.parquet", table, [20])
    assert (tmp_path / "one.parquet").read_bytes() == (tmp_path / "other.parquet").read_bytes()


def test_token_columns_are_split_by_bytes_and_come_back(tmp_path):
    schema = schemas.schema("packed", vocab_size=70_000, length=4)
    assert schema.field("tokens").type.value_type == pa.uint32()
    table = pa.table({"tokens": [[1, 2, 3, 69_999]] * 3, "segments": [[4], [1, 3], [2, 2]]}, schema=schema)
    schemas.write(tmp_path / "x.parquet", table, name="packed", key="k")
    facts = pq.read_metadata(tmp_path / "x.parquet").row_group(0)
    encodings = {facts.column(i).path_in_schema: facts.column(i).encodings for i in range(facts.num_columns)}
    assert "BYTE_STREAM_SPLIT" in encodings["tokens.list.element"] and "BYTE_STREAM_SPLIT" not in encodings["segments.list.element"]
    assert schemas.read(tmp_path / "x.parquet", "packed").to_pylist() == table.to_pylist()


def test_what_is_damaged_or_something_else_is_refused(tmp_path):
    path = tmp_path / "x.parquet"
    table = pa.table({"tokens": [list(range(64))] * 9, "segments": [[64]] * 9}, schema=schemas.schema("packed", length=64))
    schemas.write(path, table, name="packed", key="k")
    assert schemas.metadata(path, "packed")["strata.key"] == "k"
    with pytest.raises(ValueError, match="holds packed version 1, wanted tokens"):
        schemas.metadata(path, "tokens")
    whole = path.read_bytes()
    for damaged in (whole[:-20], whole[: len(whole) // 2], b"", b"PAR1"):
        path.write_bytes(damaged)
        for look in (
            schemas.data_digest,
            schemas.recorded_digest,
            lambda path: schemas.read(path, "packed"),
            lambda path: schemas.metadata(path, "packed"),
        ):
            with pytest.raises(ValueError, match="not a whole Parquet file"):
                look(path)
    start = pq.ParquetFile(pa.BufferReader(whole)).metadata.row_group(0).column(0).data_page_offset
    path.write_bytes(whole[: start + 60] + bytes([whole[start + 60] ^ 1]) + whole[start + 61 :])
    with pytest.raises(ValueError, match="not a whole Parquet file"):
        schemas.data_digest(path)
    pq.write_table(pa.table({"x": [1]}), path)
    with pytest.raises(ValueError, match="no schema of ours"):
        schemas.read(path, "packed")


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "x.parquet"
    table = pa.table({"x": [1, 2]})
    schemas.write(path, table, name=schemas.FREE, key="k")
    before = path.read_bytes()

    def torn():
        yield table.to_batches()[0]
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        schemas.write(path, torn(), name=schemas.FREE, key="k", schema=table.schema)
    assert path.read_bytes() == before and [one.name for one in tmp_path.iterdir()] == ["x.parquet"]
