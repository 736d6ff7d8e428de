"""One request in this process: however its stage ends, the outcome says so in the right words, and the next run can begin at once."""

from __future__ import annotations

import errno
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines import run as running
from pipelines import work
from pipelines.store import Store
from pipelines.work import Outcome, Request, execute
from stages import artifact
from stages.spec import Spec

SPEC = Spec(stage="made_up", versions={}, parameters={})


@pytest.fixture
def request_of(tmp_path, monkeypatch) -> Callable[[Callable], Request]:
    def made(stage: Callable) -> Request:
        module = types.ModuleType("stages.made_up")
        module.run = stage
        monkeypatch.setitem(sys.modules, "stages.made_up", module)
        return Request("made_up", "cell", SPEC.model_dump(), {}, str(tmp_path / "store"), "study")

    return made


def finish(spec, out, inputs, context) -> None:
    (out / "data.txt").write_text("made")
    artifact.write(out, key=spec.key, stage=spec.stage, files=["data.txt"], inputs={})


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_one_sentence_wherever_it_is_met(request_of, monkeypatch, tmp_path):
    for error in (OSError(errno.ENOSPC, "No space left on device"), Exception("No space left on device (os error 28)")):

        def stage(*_, error=error):
            raise error

        outcome = execute(request_of(stage))
        assert (outcome.status, outcome.kind) == ("failed", "mistake") and "Free some space" in outcome.error

    monkeypatch.setattr(artifact, "write_atomically", full)  # the lease cannot even be written
    outcome = execute(request_of(finish))
    assert (outcome.status, outcome.kind) == ("failed", "mistake") and "Free some space" in outcome.error
    monkeypatch.undo()
    assert execute(request_of(finish)).status == "succeeded", "what the full disk left behind is in the way"


def test_an_outcome_that_cannot_be_recorded_is_still_the_outcome(request_of, monkeypatch, capsys):
    def stage(*_):
        monkeypatch.setattr(artifact, "write_atomically", full)
        raise ValueError("A sentence.")

    outcome = execute(request_of(stage))
    assert (outcome.status, "A sentence." in outcome.error) == ("failed", True)
    assert "is not recorded" in capsys.readouterr().err
    monkeypatch.undo()
    store = Store(Path(request_of(finish).store))
    assert store.alive(SPEC.key) is not None, "the lease goes with the process, not before"


def test_whoever_lost_the_lease_says_that_and_no_more(request_of):
    """The one that took over has finished and cleared away: the files of the first are gone under its feet."""

    def stage(spec, out, inputs, context):
        later = out.with_name("2")
        later.mkdir()
        finish(spec, later, inputs, context)
        shutil.rmtree(out)
        (out / "data.txt").read_text()

    outcome = execute(request_of(stage))
    assert outcome.status == "lost" and "taken over" in outcome.error
    assert not Path(outcome.folder).exists(), "a cleared folder came back"


def test_without_ray_one_waits_for_another_that_makes_the_same(request_of, monkeypatch):
    answers = [Outcome("busy", "process 7 on elsewhere is making it"), Outcome("lost", "taken over"), Outcome("present", folder="there")]
    said: list[str] = []
    monkeypatch.setattr(running, "execute", lambda *_, **__: answers.pop(0))
    monkeypatch.setattr(running, "BUSY_SECONDS", 0.0)
    shown = types.SimpleNamespace(show=None, say=said.append)
    assert running._execute_here(request_of(finish), shown, []).status == "present"
    assert said == ["made_up cell waits: process 7 on elsewhere is making it"]
    answers[:] = [Outcome("busy", "process 7 on elsewhere is making it")]
    assert running._execute_here(request_of(finish), shown, [15]).status == "stopped"


def test_a_mistake_of_ours_keeps_its_traceback(request_of):
    def stage(*_):
        return {}["missing"]

    outcome = execute(request_of(stage))
    assert (outcome.status, outcome.kind) == ("failed", "error") and "Traceback" in outcome.error
    assert work.Store(Path(request_of(finish).store)).alive(SPEC.key) is None
