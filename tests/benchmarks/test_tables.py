"""A benchmark's rows: kept as they come, then one table; and the benchmarks themselves at sizes for a trial."""

import json

import pyarrow.parquet as pq
import pytest

from benchmarks import kernels
from benchmarks.table import record, report


def rows():
    yield {"name": "a", "ms": 1.5, "never": None}
    yield {"name": "b", "note": "failed"}


def test_a_table_of_rows_that_lack_columns(tmp_path, capsys):
    path = report("some", rows(), folder=tmp_path)
    assert path == tmp_path / "some.parquet" and [file.name for file in tmp_path.iterdir()] == ["some.parquet"]
    found = pq.read_table(path).to_pylist()
    assert [(row["name"], row["ms"], row["note"]) for row in found] == [("a", 1.5, None), ("b", None, "failed")]
    assert "never" not in found[0] and json.loads(found[0]["libraries"])["numpy"]
    assert capsys.readouterr().out.splitlines()[0].split() == ["name", "ms", "never", "note"]


def test_what_a_run_that_ended_early_left_becomes_the_table(tmp_path):
    def broken():
        yield from rows()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        report("some", broken(), folder=tmp_path)
    assert record(tmp_path / "some.jsonl") == tmp_path / "some.parquet"
    kept = pq.read_table(tmp_path / "some.parquet")
    assert kept.equals(pq.read_table(report("again", rows(), folder=tmp_path)))


def test_operations_are_measured_beside_float64(tmp_path):
    kernels.main(["--small", "--only", "linear", "mixed, eps 1e-4,", "head_loss", "--milliseconds", "1", "--out", str(tmp_path)])
    table = pq.read_table(tmp_path / "kernels.parquet").to_pylist()
    ours = {row["operation"]: row for row in table if row["who"] == "ours"}
    assert ours.keys() == {"linear_attention", "mesa mixed, eps 1e-4", "mesa mixed, eps 1e-4, split", "head_loss"}
    assert all(
        row["called ms"] > 0 and row["error o"] < 3e-3 and row["error gradients"] < 1e-2 and row["note"] == "" for row in ours.values()
    )
