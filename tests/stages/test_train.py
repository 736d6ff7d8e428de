"""Training: exact whatever ends it, and nothing half done that looks done."""

from __future__ import annotations

import errno
import gzip
import json
import math
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models import checkpoint
from stages import artifact, checkpoints, engine, history, schemas, train
from stages.schedule import learning_rate
from stages.spec import LeaseLost, Spec, Stopped, canonical
from tests.stages.small_study import BOS, LENGTH, MESA, context, make_packed, notes, train_spec

ROOT = Path(__file__).parents[2]
NAN = float("nan")
Facts = Callable[[], dict[str, float]]
TIMINGS = ("seconds", "tokens_per_second", "mfu", "mfu_without_cg")


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("study")


@pytest.fixture(scope="module")
def budget(study) -> Path:
    return make_packed(study / "packed")


@pytest.fixture(scope="module")
def undisturbed(study, budget) -> Path:
    """A run that nothing happened to."""
    do(train_spec(), study / "undisturbed", budget)
    return study / "undisturbed"


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


def do(spec: Spec, out: Path, budget: Path, **changes: Any) -> list[dict[str, Any]]:
    """Train; the progress lines."""
    out.mkdir(exist_ok=True)
    given, lines = context(**changes)
    train.run(spec, out, {"budget": budget}, given)
    return lines


def command_line(spec: Spec, folder: Path, out: Path, budget: Path) -> list[str]:
    (folder / "spec.json").write_text(canonical(spec.model_dump()))
    options = ["--input", f"budget={budget}", "--device", "cpu", "--threads", "1"]
    return [sys.executable, "-m", "stages.train", str(folder / "spec.json"), str(out), *options]


def stop_at(step: int) -> Any:
    """A stop_requested that says so once `step` steps are done."""
    polls = iter(range(1_000_000))
    return lambda: next(polls) >= step


def rows(out: Path) -> list[dict[str, Any]]:
    return schemas.read(out / train.HISTORY, "history").to_pylist()


def assert_same(one: Path, other: Path) -> None:
    """The same weights bit for bit, and the same history but for its timings."""
    a, b = (checkpoint.load(out / train.WEIGHTS)[0] for out in (one, other))
    assert a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)
    assert artifact.read(one, content=True)["digest"] == artifact.read(other, content=True)["digest"]
    kept = [[{name: value for name, value in row.items() if name not in TIMINGS} for row in rows(out)] for out in (one, other)]
    assert kept[0] == kept[1]


class Wrapped:
    """A trainer, with what its steps are given kept, and some batches not finite."""

    def __init__(self, trainer: Any, bad: set[int], taken: list[dict[str, Any]], batches: list[bytes]) -> None:
        self.trainer, self.bad, self.taken, self.batches = trainer, bad, taken, batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self.trainer, name)

    def submit(self, tokens: np.ndarray, **options: Any) -> Facts:
        index = self.batches.index(np.ascontiguousarray(tokens).astype(np.int32).tobytes())
        self.taken.append({"index": index, "tokens": tokens, **options})
        if index in self.bad:
            return lambda: {"loss": NAN, "grad_norm": NAN, "finite": 0.0}
        return self.trainer.submit(tokens, **options)


@pytest.fixture
def wrapped(monkeypatch, budget):
    """wrapped(bad steps) -> the list of calls to step, of every run from now on."""
    from stages.rows import Rows

    def install(bad: set[int] | None = None, steps: int = 12) -> list[dict[str, Any]]:
        reader = Rows(budget)
        batches = [np.ascontiguousarray(reader.read(4 * step, 4 * step + 4)[0]).astype(np.int32).tobytes() for step in range(steps)]
        taken: list[dict[str, Any]] = []
        make = engine.trainer
        monkeypatch.setattr(engine, "trainer", lambda *given, **options: Wrapped(make(*given, **options), bad or set(), taken, batches))
        return taken

    return install


# A run


def test_a_run_leaves_weights_history_provenance_and_nothing_else(out, budget):
    lines = do(train_spec(), out, budget)
    assert sorted(path.name for path in out.iterdir()) == ["artifact.json", "history.parquet", "provenance.json", "weights.safetensors"]
    record = artifact.read(out, key=train_spec().key, content=True)
    assert list(record["files"]) == [train.WEIGHTS] and record["inputs"] == {"budget": json.loads(budget.read_text())["digest"]}
    assert json.loads((out / "provenance.json").read_text())["device"] == "cpu"
    assert lines[-1]["step"] == lines[-1]["of"] == 12 and lines[-1]["seconds_left"] == 0


def test_history_has_every_step_once(undisturbed):
    history = rows(undisturbed)
    assert [row["step"] for row in history] == list(range(1, 13))
    assert [row["tokens"] for row in history] == [4 * LENGTH * step for step in range(1, 13)]
    schedule = {"steps": 12, "peak": 0.02, "start": 1e-6, "warmup": 3, "floor": 0.1}
    assert [row["learning_rate"] for row in history] == [learning_rate(step, **schedule) for step in range(12)]
    assert all(1 < row["loss"] < 6 and row["grad_norm"] > 0 and row["event"] is None for row in history)
    assert all(row["tokens_per_second"] == pytest.approx(4 * LENGTH / row["seconds"]) and row["mfu"] is None for row in history)


def test_step_s_reads_its_rows_and_never_learns_bos(out, budget, wrapped):
    taken = wrapped()
    do(train_spec(), out, budget)
    assert [call["index"] for call in taken] == list(range(12))
    for call in taken:
        assert np.array_equal(call["targets_mask"], call["tokens"][:, 1:] != BOS) and not call["targets_mask"].all()
        assert call["segments"] is None


def test_segments_are_passed_only_to_reset(out, budget, wrapped):
    taken = wrapped()
    do(train_spec(reset=True, steps=2), out, budget)
    for call in taken:
        inputs = call["tokens"][:, :-1]
        assert np.array_equal(call["segments"], np.cumsum(inputs == BOS, axis=1) - 1)


def test_mfu_counts_the_steps_taken(out, budget):
    import models

    do(train_spec(model=MESA, steps=2), out, budget, settings={"peak_flops": 1e12})
    model = models.build(MESA, train_spec().parameters["scale"], vocab_size=32)
    for row in rows(out):
        for name, steps in (("mfu", row["cg_steps"]), ("mfu_without_cg", 0)):
            assert row[name] == pytest.approx(row["tokens_per_second"] * model.flops(LENGTH, steps=steps, training=True) / 1e12)
        assert row["mfu_without_cg"] < row["mfu"]


def test_alone_on_the_command_line(out, budget, undisturbed, tmp_path):
    done = subprocess.run(command_line(train_spec(), tmp_path, out, budget), cwd=ROOT, capture_output=True, text=True, check=True)
    assert "step 12  of 12" in done.stdout
    assert_same(out, undisturbed)


# What ends a run, and how it goes on


def test_a_kill_at_any_moment_changes_nothing(out, budget, tmp_path):
    spec = train_spec(steps=32, checkpoint_every=2, model=MESA, batch=2)
    do(spec, tmp_path / "undisturbed", budget)
    command = command_line(spec, tmp_path, out, budget)
    seed = time.time_ns()
    chance, kills = random.Random(seed), 0
    for _ in range(2):
        before = set(out.glob("checkpoints/0*"))
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and set(out.glob("checkpoints/0*")) <= before:
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.15))
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
    do(spec, out, budget)
    assert kills, f"no run was killed (seed {seed})"
    assert_same(out, tmp_path / "undisturbed")


def test_stop_saves_and_the_next_run_goes_on(out, budget, undisturbed):
    with pytest.raises(Stopped, match="step 7 of 12"):
        do(train_spec(), out, budget, stop_requested=stop_at(7))
    assert not (out / artifact.NAME).exists()
    assert "from step 7" in notes(do(train_spec(), out, budget))
    assert_same(out, undisturbed)


def test_another_attempt_goes_on_from_the_newest_of_all(tmp_path, budget, undisturbed):
    first, second, third = (tmp_path / name for name in ("1", "2", "3"))
    with pytest.raises(Stopped):
        do(train_spec(), first, budget, stop_requested=stop_at(6))
    with pytest.raises(Stopped):
        do(train_spec(), second, budget, stop_requested=stop_at(2))
    lines = do(train_spec(), third, budget, resume_from=[second, first])
    assert "from step 6" in notes(lines)
    assert_same(third, undisturbed)


@pytest.mark.parametrize("damage", ["truncated", "changed", "history"])
def test_a_damaged_newest_checkpoint_is_passed_over(out, budget, undisturbed, damage):
    with pytest.raises(Stopped):
        do(train_spec(), out, budget, stop_requested=stop_at(8))
    newest = out / "checkpoints" / "00000008.safetensors"
    if damage == "history":
        log = out / history.LOG
        log.write_bytes(log.read_bytes()[:-20])
    else:
        data = bytearray(newest.read_bytes())
        data[-5] ^= 1
        newest.write_bytes(data if damage == "changed" else data[: len(data) // 2])
    said = notes(do(train_spec(), out, budget))
    assert "step 8 is passed over" in said and "from step 5" in said
    assert_same(out, undisturbed)


def test_a_checkpoint_of_another_key_is_refused(out, budget, undisturbed):
    with pytest.raises(Stopped):
        do(train_spec(seed=1), out, budget, stop_requested=stop_at(8))
    said = notes(do(train_spec(), out, budget))
    assert "other parameters" in said and "Going on" not in said
    assert_same(out, undisturbed)


def test_the_last_two_checkpoints_are_kept(out, budget):
    with pytest.raises(Stopped):
        do(train_spec(checkpoint_every=2), out, budget, stop_requested=stop_at(9))
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["00000008.safetensors", "00000009.safetensors"]


def test_a_complete_run_is_not_made_again(out, budget):
    do(train_spec(steps=2), out, budget)
    before = (out / train.WEIGHTS).stat()
    assert do(train_spec(steps=2), out, budget) == []
    assert (out / train.WEIGHTS).stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("place", ["checkpoint", "log", "weights", "history", "artifact"])
def test_a_full_disk_leaves_nothing_half_visible(out, budget, undisturbed, monkeypatch, place):
    def full(*_: Any, **__: Any) -> None:
        if place == "weights":
            raise OSError("could not be written: I/O error: No space left on device (os error 28)")  # as safetensors says it
        raise OSError(errno.ENOSPC, "No space left on device")

    def sometimes(function: Any, *, when: Any) -> Any:
        return lambda *given, **options: full() if when(*given) else function(*given, **options)

    with monkeypatch.context() as patch:
        if place in ("checkpoint", "weights"):
            wanted = "00000010.safetensors" if place == "checkpoint" else train.WEIGHTS
            patch.setattr(checkpoint, "save", sometimes(checkpoint.save, when=lambda path, *_: path.name == wanted))
        elif place == "log":
            patch.setattr(history.os, "fsync", sometimes(history.os.fsync, when=lambda *_: (out / "checkpoints").exists()))
        else:
            module, name = {"history": (schemas, "write"), "artifact": (artifact, "write")}[place]
            patch.setattr(module, name, full)
        with pytest.raises(ValueError, match="disk of .* is full.*Free some space"):
            do(train_spec(), out, budget)
    assert not (out / artifact.NAME).exists()
    assert not [path for path in out.rglob("*") if path.name.startswith(".")]
    do(train_spec(), out, budget)
    assert_same(out, undisturbed)


def test_a_lost_lease_ends_the_attempt_before_its_next_write(out, budget):
    stolen = iter([False] * 3 + [True] * 100)

    def fence() -> None:
        if next(stolen):
            raise LeaseLost("taken over")

    with pytest.raises(LeaseLost):
        do(train_spec(checkpoint_every=2), out, budget, fence=fence)
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["00000002.safetensors"]
    assert len((out / history.LOG).read_text().splitlines()) == 2


# Steps that are not finite


def test_policy_stop_says_what_and_keeps_everything(out, budget, wrapped):
    taken = wrapped({7})
    with pytest.raises(ValueError, match=r"Step 8 is not finite: loss nan.*learning rate.*up to step 7 is kept; try a lower learning rate"):
        do(train_spec(), out, budget)
    assert (out / "checkpoints" / "00000007.safetensors").exists()
    taken.clear()
    with pytest.raises(ValueError, match="Step 8"):
        do(train_spec(), out, budget)
    assert [call["index"] for call in taken] == [7]


def test_a_rate_that_is_far_too_high_is_told(out, budget):
    with pytest.raises(ValueError, match="Step 2 is not finite: loss nan, gradient norm nan at learning rate 9.85e"):
        do(train_spec(learning_rate=1e38, warmup_steps=0), out, budget)


def test_policy_skip_records_and_goes_on(out, budget, wrapped):
    wrapped({7})
    do(train_spec(on_nonfinite="skip"), out, budget)
    found = rows(out)
    assert [row["step"] for row in found] == list(range(1, 13))
    assert found[7]["event"].startswith("skipped: loss nan") and math.isnan(found[7]["loss"])
    assert all(row["event"] is None for row in found if row["step"] != 8)


def test_policy_skip_gives_up_when_every_step_fails(out, budget, wrapped, monkeypatch):
    wrapped(set(range(3, 12)))
    monkeypatch.setattr(train, "SKIPS", 4)
    with pytest.raises(ValueError, match="Step 8 .*4 steps in a row"):
        do(train_spec(on_nonfinite="skip"), out, budget)


def test_policy_rollback_leaves_the_batch_out(out, budget, wrapped):
    taken = wrapped({7})
    lines = do(train_spec(on_nonfinite="rollback"), out, budget)
    assert [call["index"] for call in taken] == [*range(8), 5, 6, 8, 9, 10, 11]
    assert "Going back" in notes(lines)
    found = rows(out)
    assert [row["step"] for row in found] == list(range(1, 13))
    assert found[7]["event"].startswith("rolled back: loss nan") and found[7]["loss"] is None


def test_rollback_before_the_first_checkpoint_starts_over(out, budget, wrapped):
    taken = wrapped({2})
    do(train_spec(on_nonfinite="rollback", steps=5), out, budget)
    assert [call["index"] for call in taken] == [0, 1, 2, 0, 1, 3, 4]


def test_rollback_is_the_same_after_a_stop(tmp_path, budget, wrapped):
    wrapped({3, 7})
    spec = train_spec(on_nonfinite="rollback")
    do(spec, tmp_path / "whole", budget)
    for step in (2, 3, 3):
        with pytest.raises(Stopped):
            do(spec, tmp_path / "stopped", budget, stop_requested=stop_at(step))
    do(spec, tmp_path / "stopped", budget)
    assert_same(tmp_path / "whole", tmp_path / "stopped")


def test_rollbacks_are_bounded(out, budget, wrapped, monkeypatch):
    wrapped({6, 7, 8})
    monkeypatch.setattr(train, "ROLLBACKS", 2)
    with pytest.raises(ValueError, match="Step 9 .*rolled back 2 times"):
        do(train_spec(on_nonfinite="rollback"), out, budget)


# A device that is a step behind the host


@pytest.fixture
def behind(monkeypatch):
    """behind(bad steps) -> which batches were given to a trainer that has what a GPU's has: a step may be under way while the next is given.

    A batch that is not finite is so on the device: an embedding is not finite while it is taken.
    """

    def install(bad: set[int], budget: Path) -> list[int]:
        from stages.rows import Rows

        reader, given = Rows(budget), []
        batches = [np.ascontiguousarray(reader.read(4 * step, 4 * step + 4)[0]).astype(np.int32).tobytes() for step in range(12)]
        make = engine.trainer

        class Behind(Wrapped):
            ahead = 1

            def submit(self, tokens: np.ndarray, **options: Any) -> Facts:
                given.append(batches.index(np.ascontiguousarray(tokens).astype(np.int32).tobytes()))
                weight = self.trainer.params["final_norm"].data
                kept = weight.clone()
                weight.mul_(NAN if given[-1] in bad else 1.0)
                facts = self.trainer.submit(tokens, **options)
                if given[-1] in bad:
                    weight.copy_(kept)
                return facts

        monkeypatch.setattr(engine, "trainer", lambda *a, **o: Behind(make(*a, **o), bad, [], batches))
        return given

    return install


def test_a_step_behind_is_the_same_run(out, budget, undisturbed, behind):
    given = behind(set(), budget)
    do(train_spec(), out, budget)
    assert given == list(range(12))
    assert_same(out, undisturbed)


@pytest.mark.parametrize("step", [3, 4, 5, 9])
def test_a_step_behind_stops_where_it_was_not_finite(out, tmp_path, budget, behind, step):
    """The checkpoint holds the steps before it and nothing of the one that was already under way."""
    given = behind({step}, budget)
    with pytest.raises(ValueError, match=f"Step {step + 1} is not finite.*up to step {step} is kept"):
        do(train_spec(), out, budget)
    assert given == list(range(min(step + 2, step // 5 * 5 + 5, 12)))
    stopped, _ = checkpoint.load(out / "checkpoints" / f"{step:08d}.safetensors")
    with pytest.raises(Stopped):
        do(train_spec(), tmp_path / "other", budget, stop_requested=stop_at(step))
    expected, _ = checkpoint.load(tmp_path / "other" / "checkpoints" / f"{step:08d}.safetensors")
    assert all(stopped[name].tobytes() == expected[name].tobytes() for name in expected)


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_step_behind_deals_with_bad_ones_as_one_that_is_not(tmp_path, budget, behind, wrapped, policy):
    spec, make = train_spec(on_nonfinite=policy), engine.trainer
    behind({2, 6, 7}, budget)
    do(spec, tmp_path / "behind", budget)
    engine.trainer = make  # the fixtures put it back in the end
    wrapped({2, 6, 7})
    do(spec, tmp_path / "beside", budget)
    a, b = (checkpoint.load(tmp_path / name / train.WEIGHTS)[0] for name in ("behind", "beside"))
    assert all(a[name].tobytes() == b[name].tobytes() for name in a)
    events = [[(row["step"], (row["event"] or "").split(":")[0]) for row in rows(tmp_path / name)] for name in ("behind", "beside")]
    assert events[0] == events[1] and [step for step, event in events[0] if event] == [3, 7, 8]


def test_a_step_behind_gives_up_skipping_where_it_should(out, budget, behind, monkeypatch):
    given = behind(set(range(3, 9)), budget)
    monkeypatch.setattr(train, "SKIPS", 4)
    with pytest.raises(ValueError, match="Step 8 .*4 steps in a row"):
        do(train_spec(on_nonfinite="skip"), out, budget)
    assert given == list(range(8))


# A profile


def test_a_profile_is_written_where_it_is_asked_for(out, budget):
    do(train_spec(), out, budget, settings={"profile": True})
    assert "aten::" in (out / "profile" / "kernels.txt").read_text()
    with gzip.open(out / "profile" / "trace.json.gz") as file:
        assert json.load(file)["traceEvents"]


# Memory


def test_sequences_at_once_are_halved_until_they_fit(out, budget, undisturbed, monkeypatch):
    asked, make = [], engine.trainer

    class Small(Wrapped):
        def submit(self, tokens: np.ndarray, **options: Any) -> Facts:
            asked.append((options["micro_batch"], options["rematerialise"]))
            if asked[-1] not in self.bad:
                raise MemoryError("CUDA out of memory. Tried to allocate 3 GiB")
            return self.trainer.submit(tokens, **options)

    monkeypatch.setattr(engine, "trainer", lambda *given, **options: Small(make(*given, **options), fits, [], []))
    fits = {(2, False)}
    lines = do(train_spec(), out, budget)
    assert asked == [(4, False), *[(2, False)] * 12] and "4 sequences at once do not fit" in notes(lines)
    assert json.loads((out / "provenance.json").read_text())["micro_batch"] == 2
    assert [row["loss"] for row in rows(out)] == pytest.approx([row["loss"] for row in rows(undisturbed)], rel=1e-4)
    asked.clear()
    fits = {(1, True)}
    lines = do(train_spec(steps=2, seed=2), out, budget)
    assert asked == [(4, False), (2, False), (1, False), *[(1, True)] * 2] and "One sequence does not fit" in notes(lines)
    fits = set()
    with pytest.raises(ValueError, match="One sequence of 12 tokens does not fit"):
        do(train_spec(seed=1), out, budget)


def test_sequences_at_once_divide_the_batch():
    assert train.at_once(256, 2048) == 32 and train.at_once(4, 12) == 4 and train.at_once(6, 1 << 15) == 2
    assert train.at_once(3, 1 << 20) == 1 and train.at_once(256, 2048, below=32) == 16 and train.at_once(7, 1, below=7) == 1


# Inputs and parameters


def test_another_budget_is_refused(out, tmp_path, budget):
    other = make_packed(tmp_path / "packed")
    facts = json.loads(other.read_text())
    for change, said in (
        ({"key": "0" * 64}, "was made under key 0000"),
        ({"rows": 7}, "has 7 rows"),
        ({"sequence_length": 5}, "of 5 tokens"),
    ):
        other.write_text(json.dumps(facts | change))
        with pytest.raises(ValueError, match=said):
            do(train_spec(), out, other)
    other.write_text("{")
    with pytest.raises(ValueError, match="not a readable budget"):
        do(train_spec(), out, other)


def test_rows_that_are_not_the_recorded_ones_are_refused(out, tmp_path):
    from tests.stages.small_study import rows_table

    mine = make_packed(tmp_path / "packed")
    schemas.write(tmp_path / "packed" / "shards" / "00000" / "rows.parquet", rows_table(48, seed=5), name="packed", key="0" * 64)
    with pytest.raises(ValueError, match="00000"):
        do(train_spec(), out, mine)
    assert not (out / artifact.NAME).exists()


@pytest.mark.parametrize("change", [{"batch": 0}, {"lr": 1}, {"optimizer": {"beta1": 1.0}}, {"precision": "float16"}])
def test_parameters_that_make_no_sense_are_refused(out, budget, change):
    with pytest.raises(ValueError, match="parameters are not valid"):
        do(train_spec(**change), out, budget)


# History and spikes


def test_a_history_is_cut_to_its_checkpoint(tmp_path):
    log = history.History(tmp_path)
    log.start()
    lengths = []
    for step in range(1, 5):
        log.append({"step": step, "event": None})
        lengths.append(log.flush())
    length = lengths[2]
    again = history.History(tmp_path)
    again.resume(tmp_path, length=length, step=3)
    again.append({"step": 4, "event": "again"})
    assert [(row["step"], row["event"]) for row in again.rows()] == [(1, None), (2, None), (3, None), (4, "again")]
    with pytest.raises(ValueError, match="does not hold the 2 steps"):
        again.resume(tmp_path, length=length, step=2)


def test_spikes_by_hand():
    spikes = history.Spikes()
    for loss in [2.0, 2.02] * 15 + [2.0]:
        assert spikes.height(9.0) is None
        spikes.append(loss)
    spikes.append(2.02)  # 32 losses: median 2.01, deviation 1.4826 * 0.01
    assert spikes.height(2.01 + 8 * 0.014826 - 1e-6) is None
    assert spikes.height(2.01 + 8 * 0.014826 + 1e-6) == pytest.approx(8 * 0.014826, abs=1e-5)
    assert spikes.height(1.0) is None


def test_a_spike_is_recorded(out, budget, monkeypatch):
    monkeypatch.setattr(history.Spikes, "ENOUGH", 4)
    losses = iter([3.0, 3.1, 3.0, 3.1, 3.0, 9.0, 3.0])
    make = engine.trainer

    class Spiky(Wrapped):
        def submit(self, tokens: np.ndarray, **options: Any) -> Facts:
            facts = self.trainer.submit(tokens, **options)
            return lambda: facts() | {"loss": next(losses)}

    monkeypatch.setattr(engine, "trainer", lambda *given, **options: Spiky(make(*given, **options), set(), [], []))
    lines = do(train_spec(steps=7), out, budget)
    events = [row["event"] for row in rows(out)]
    assert events[5].startswith("spike: 6") and [event for event in events if event] == [events[5]]
    assert any(line.get("event") == events[5] for line in lines)


def test_a_step_that_is_not_a_number_names_no_checkpoint(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest.safetensors").write_text("?")
    assert list(checkpoints.Checkpoints(tmp_path, "key").usable([tmp_path], lambda text: pytest.fail(text))) == []
