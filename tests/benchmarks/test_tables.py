"""A benchmark's rows: kept as they come, then one table; and the benchmarks themselves at sizes for a trial."""

import json

import pyarrow.parquet as pq
import pytest

from benchmarks import decode, kernels, training
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


def test_training_is_measured_in_all_its_tables(tmp_path):
    def run(*arguments):
        training.main(["--small", "--steps", "1", "--out", str(tmp_path), *arguments])

    run("--only", "transformer-140m", "mesa-140m-full", "hawk_mesa-1b-trained")
    run("--table", "lengths", "--only", "mesa-4096")
    run("--table", "layer", "--only", "attention-256", "mesa CG 5-256")
    found = pq.read_table(tmp_path / "training.parquet").to_pylist()
    assert [(row["model"], row["note"]) for row in found] == [("transformer", ""), ("mesa", ""), ("hawk_mesa", "")]
    assert all(row["tokens/s"] > 0 and row["finite"] == 1 for row in found)
    assert found[1]["CG most"] >= found[1]["CG mean"] > found[2]["CG mean"] and found[0]["CG mean"] is None
    (longer,) = pq.read_table(tmp_path / "training-lengths.parquet").to_pylist()
    assert longer["model"] == "mesa" and longer["gates"] == "trained" and longer["note"] == ""
    attention, mesa = pq.read_table(tmp_path / "training-layer.parquet").to_pylist()
    assert attention["note"] == mesa["note"] == "" and mesa["CG mean"] == 5 and mesa["forward and backward ms"] > 0


def test_an_entry_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(SystemExit, match="mesa-1b-trained"):
        training.main(["--small", "--only", "nothing", "--out", str(tmp_path)])


def test_decoding_is_measured_beside_its_roof(tmp_path):
    decode.main(["--small", "--tokens", "2", "--only", "transformer-256-[12]", "mesa-256-2", "--out", str(tmp_path)])
    found = pq.read_table(tmp_path / "decode.parquet").to_pylist()
    assert [(row["model"], row["batch"], row["note"]) for row in found] == [("mesa", 2, ""), ("transformer", 1, ""), ("transformer", 2, "")]
    assert all(row["tokens/s"] > 0 and row["GB"] > row["of weights"] for row in found) and found[2]["GB"] > found[1]["GB"]
