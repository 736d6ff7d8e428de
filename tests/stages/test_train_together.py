"""Training by several processes, started by torchrun: the rows of a step split over them, and the same run as by one."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from stages import artifact, train
from stages.spec import Spec, Stopped, canonical
from tests.stages.small_study import MESA, assert_same_run, context, course, history, looking_spec, make_packed, train_spec

ROOT = Path(__file__).parents[2]
SPEC = train_spec(model=MESA, steps=12)
same_run = partial(assert_same_run, key=SPEC.key, same=("tokens", "event"), near={"loss": 1e-4, "grad_norm": 2e-3, "cg_steps": 0.02})


@pytest.fixture(scope="module")
def budget(tmp_path_factory) -> Path:
    return make_packed(tmp_path_factory.mktemp("study") / "packed")


@pytest.fixture(scope="module")
def alone(tmp_path_factory, budget) -> Path:
    out = tmp_path_factory.mktemp("alone")
    train.run(SPEC, out, {"budget": budget}, context()[0])
    return out


def together(spec: Spec, folder: Path, out: Path, budget: Path, *more: str, count: int = 2) -> subprocess.Popen[str]:
    """Processes that train together, as a user starts them."""
    (folder / "spec.json").write_text(canonical(spec.model_dump()))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "-m", "stages.train"]
    given = [str(folder / "spec.json"), str(out), "--input", f"budget={budget}", "--device", "cpu", "--threads", "1", *more]
    return subprocess.Popen(
        [*torchrun, *given],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_train_as_one_does(tmp_path, budget, alone):
    process = together(SPEC, tmp_path, tmp_path / "out", budget, "--profile")
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    same_run(alone, tmp_path / "out")
    assert (tmp_path / "out" / "profile" / "kernels.txt").exists()


@pytest.mark.slow
def test_the_first_of_two_looks_inside_and_the_other_waits(tmp_path, budget, alone):
    spec = looking_spec(model=MESA, steps=12)
    validation = budget.parents[1] / "validation"
    process = together(spec, tmp_path, tmp_path / "out", budget, "--input", f"validation={validation}")
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    (tmp_path / "alone").mkdir()
    train.run(spec, tmp_path / "alone", {"budget": budget, "validation": validation}, context()[0])
    assert_same_run(alone, tmp_path / "out", key=spec.key, same=("tokens", "event"), near={"loss": 1e-4})
    looks = [course(tmp_path / folder, "internals") for folder in ("alone", "out")]
    assert [(row["step"], row["head"]) for row in looks[1]] == [(step, head) for step in (0, 4, 8, 12) for head in (0, 1)]
    assert [row["gamma"] for row in looks[1]] == pytest.approx([row["gamma"] for row in looks[0]], rel=1e-3)


@pytest.mark.slow
def test_a_run_goes_on_by_another_number_of_processes(tmp_path, budget, alone):
    first, second = tmp_path / "1 then 2", tmp_path / "2 then 1"
    first.mkdir()
    polls = iter(range(99))
    with pytest.raises(Stopped, match="at step 7"):
        train.run(SPEC, first, {"budget": budget}, context(stop_requested=lambda: next(polls) >= 7)[0])
    said, _ = together(SPEC, tmp_path, first, budget).communicate(timeout=120)
    assert "Going on from step 7" in said
    same_run(alone, first)

    longer = train_spec(model=MESA, steps=12, checkpoint_every=1)
    process = together(longer, tmp_path, second, budget)
    while process.poll() is None and not list(second.glob("checkpoints/0*")):
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert not (second / artifact.NAME).exists(), "the run was over before it was stopped"
    given, lines = context()
    train.run(longer, second, {"budget": budget}, given)
    assert any("Going on from step" in line.get("note", "") for line in lines)
    assert history(second)[-1]["loss"] == pytest.approx(history(alone)[-1]["loss"], rel=1e-4)


def finish(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return said


def interrupt(process: subprocess.Popen[str], out: Path, number: signal.Signals, *, step: int) -> None:
    """Send a signal once a checkpoint of at least this step stands: SIGTERM to the launcher, kill -9 to all of them."""
    while process.poll() is None and not any(int(path.stem) >= step for path in out.glob("checkpoints/0*.safetensors")):
        time.sleep(0.005)
    assert process.poll() is None, process.communicate()[0]
    launcher = psutil.Process(process.pid)
    for one in [launcher, *launcher.children(recursive=True)] if number == signal.SIGKILL else [launcher]:
        one.send_signal(number)
    process.communicate(timeout=120)
    assert not (out / artifact.NAME).exists(), "the run was over before it was stopped"


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in history(out)]


LONGER = train_spec(model=MESA, steps=32, checkpoint_every=1)


@pytest.fixture(scope="module")
def longer(tmp_path_factory, budget) -> dict[int, Path]:
    """The undisturbed run by one, two and four processes."""
    made = {}
    for count in (1, 2, 4):
        folder = tmp_path_factory.mktemp(f"by-{count}")
        finish(together(LONGER, folder, folder / "out", budget, count=count))
        made[count] = folder / "out"
    return made


@pytest.mark.slow
def test_one_two_and_four_processes_see_the_same_tokens(longer):
    """Each step's loss is that of its rows, and no other step's: two steps' rows differ by far more than the order of sums."""
    alone = losses(longer[1])
    assert min(abs(a - b) for i, a in enumerate(alone) for b in alone[:i]) > 0
    apart = sorted(abs(a - b) for a, b in zip(alone, alone[1:], strict=False))
    for count in (2, 4):
        other = losses(longer[count])
        assert other == pytest.approx(alone, rel=1e-4)
        assert max(abs(a - b) for a, b in zip(alone, other, strict=True)) < apart[len(apart) // 4]
        assert [row["tokens"] for row in history(longer[count])] == [row["tokens"] for row in history(longer[1])]
        assert {row["devices"] for row in history(longer[count])} == {count}


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_as_many_processes_end_bit_for_bit_though_killed_on_the_way(tmp_path, budget, longer, count):
    out = tmp_path / "out"
    interrupt(together(LONGER, tmp_path, out, budget, count=count), out, signal.SIGKILL, step=7)
    assert "Going on from step" in finish(together(LONGER, tmp_path, out, budget, count=count))
    assert (out / train.WEIGHTS).read_bytes() == (longer[count] / train.WEIGHTS).read_bytes()
    assert losses(out) == losses(longer[count])


@pytest.mark.slow
def test_four_then_two_then_one_process_end_as_one_does(tmp_path, budget, longer):
    out = tmp_path / "out"
    interrupt(together(LONGER, tmp_path, out, budget, count=4), out, signal.SIGTERM, step=4)
    interrupt(together(LONGER, tmp_path, out, budget, count=2), out, signal.SIGKILL, step=16)
    given, lines = context()
    train.run(LONGER, out, {"budget": budget}, given)
    assert any("Going on from step" in line.get("note", "") for line in lines)
    by = [row["devices"] for row in history(out)]
    assert by == sorted(by, reverse=True) and set(by) == {4, 2, 1}
    assert losses(out) == pytest.approx(losses(longer[1]), rel=1e-4)
