"""Progress lines, shown and followed."""

import io
import json

import pytest

from pipelines import progress
from pipelines.progress import Follower, Progress, clock, describe, short


def test_a_line_in_words():
    line = {"time": 0.0, "step": 1200, "of": 244000, "loss": 4.21345, "tokens_per_second": 85213.7, "mfu": 0.4104}
    assert describe(line, 130.4) == "1,200/244,000  loss 4.213  85.2k tokens/s  MFU 41.0%  2:10 left"
    assert describe({"step": 1, "of": 3, "loss": None, "mfu": None}) == "1/3"


@pytest.mark.parametrize("seconds, text", [(0.4, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3600, "1:00:00"), (90000, "1 d 1 h")])
def test_clock(seconds, text):
    assert clock(seconds) == text


@pytest.mark.parametrize("value, text", [(7.25, "7.25"), (999, "999"), (85213.7, "85.2k"), (1.234e6, "1.23M"), (5e9, "5G")])
def test_short(value, text):
    assert short(value) == text


def test_a_log_gets_a_line_now_and_then_and_every_note(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    with Progress("train mesa", stream=stream) as shown:
        for step in range(101):  # 25 seconds
            now[0] = step / 4
            shown.show({"time": 1000 + now[0], "step": step, "of": 200})
        shown.show({"time": 1026.0, "note": "Going on from step 7."})
        shown.show({"time": 1026.0, "step": 101, "of": 200, "event": "skipped: loss nan"})
    lines = stream.getvalue().splitlines()
    assert lines == [
        "train mesa: 40/200  0:40 left",
        "train mesa: 80/200  0:30 left",
        "train mesa: Going on from step 7.",
        "train mesa: step 101: skipped: loss nan",
    ]


def test_the_stages_own_estimate_comes_first_and_resuming_is_not_speed():
    shown = Progress("x", stream=io.StringIO())
    assert shown._left({"time": 0.0, "step": 900, "of": 1000}) is None
    assert shown._left({"time": 10.0, "step": 910, "of": 1000}) == pytest.approx(90.0)
    assert shown._left({"time": 20.0, "step": 920, "of": 1000, "seconds_left": 12.5}) == 12.5
    assert shown._left({"time": 30.0, "step": 100, "of": 1000}) is None  # taken up from an earlier checkpoint


def test_a_terminal_gets_a_bar_and_sentences_above_it():
    stream = io.StringIO()
    with Progress("train [mesa]", stream=stream, terminal=True) as shown:
        shown.show({"time": 0.0, "step": 1, "of": 4, "loss": 3.0})
        shown.say("a [sentence]")
        shown.show({"time": 1.0, "step": 4, "of": 4, "loss": 2.5})
    text = stream.getvalue()
    assert "train [mesa]" in text and "a [sentence]" in text and "4/4  loss 2.500" in text
    assert text.endswith("\x1b[2K")  # nothing of the bar is left


def test_lines_without_steps_draw_nothing():
    stream = io.StringIO()
    with Progress("x", stream=stream, terminal=True) as shown:
        shown.show({"time": 0.0, "table": "ledger"})
        shown.show({"time": 0.0, "step": 0, "of": 0})
    assert stream.getvalue() == ""


def test_following_an_attempt_and_the_next(tmp_path):
    folders, shown, said = [], [], []

    def begin(name, *lines):
        (tmp_path / name).mkdir()
        (tmp_path / name / "progress.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in lines))
        folders.insert(0, tmp_path / name)

    begin("1", 1, 2)  # of an earlier asking
    follower = Follower(lambda: list(folders), lambda line: shown.append(line["step"]), said.append)
    follower.look()
    assert shown == []
    begin("2", 3)
    with (tmp_path / "2" / "progress.jsonl").open("a") as file:
        file.write('{"step": 4')
        file.flush()
        follower.look()
        assert shown == [3]
        file.write("}\n[1]\nnot json\n")
    follower.look()
    assert shown == [3, 4] and said == []
    begin("3", 5)
    follower.look()
    assert shown == [3, 4, 5] and said == ["Attempt 2 ended early; attempt 3 takes up what it had saved."]


def test_an_attempt_that_is_being_made_already_is_followed(tmp_path):
    shown = []
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "progress.jsonl").write_text('{"step": 1}\n')
    Follower(lambda: [tmp_path / "1"], shown.append, print, alive=tmp_path / "1").look()
    assert shown == [{"step": 1}]
