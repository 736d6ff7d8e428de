"""What fails in one entry of a benchmark is that entry's row, and the others are measured."""

import os
import time

from benchmarks.isolated import each, prepare


def square(entry, *, offset=0):
    x = entry["x"]
    if x == 2:
        raise ValueError("two is not\nsquared")
    if x == 3:
        os._exit(7)
    if x == 4:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if x == 5:
        time.sleep(600)
    return {"square": x * x + offset}


def leave_mark(entry, *, folder):
    if entry["x"] == 2:
        raise ValueError("no")
    (folder / str(entry["x"])).write_text(str(os.getpid()))


def test_the_others_go_on():
    rows = list(each(square, [{"x": x} for x in (1, 2, 6, 3, 4, 7, 5, 8)], patience=15, offset=1))
    assert [row["x"] for row in rows] == [1, 2, 6, 3, 4, 7, 5, 8]
    assert {row["x"]: row["square"] for row in rows if not row["note"]} == {1: 2, 6: 37, 7: 50, 8: 65}
    notes = {row["x"]: row["note"] for row in rows if row["note"]}
    assert (
        notes[2] == "ValueError: two is not"
        and "ended with 7" in notes[3]
        and "illegal memory" in notes[4]
        and "more than 15 s" in notes[5]
    )


def test_none_begins_when_the_time_is_up():
    rows = list(each(square, [{"x": 1}], seconds=-1))
    assert rows == [{"x": 1, "note": "not measured: the time was up"}]


def test_entries_are_prepared_each_in_a_process(tmp_path):
    prepare(leave_mark, [{"x": x} for x in (1, 2, 3)], processes=2, folder=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"1", "3"}
    assert len({path.read_text() for path in tmp_path.iterdir()}) == 2
