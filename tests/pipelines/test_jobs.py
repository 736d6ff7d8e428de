"""Asking on a real head: one head, one driver, many small requests, and nothing left when their owner is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipelines import head, jobs
from pipelines.board import Board
from pipelines.progress import Progress
from pipelines.store import Store
from pipelines.work import Request

PROBE = Path(__file__).with_name("probe")


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """(address of a real head, root). Its owner is a process that is killed at the end: nothing may be left then."""
    root = tmp_path_factory.mktemp("study")
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(PROBE))
        patch.delenv("RAY_ADDRESS", raising=False)
        address = head.ensure(root, psutil.Process(owner.pid))
    yield address, root
    owner.kill()
    owner.wait()
    folder = address.token.parent
    until(lambda: not head.members(folder) and not folder.exists())
    assert head.current(root) is None


@pytest.fixture
def request_for(place, request):
    def make(do, **options):
        spec = {"stage": "probe", "versions": {}, "parameters": {"do": do, "test": request.node.name}}
        return Request(
            **{
                "stage": "probe",
                "cell": "cell",
                "spec": spec,
                "inputs": {},
                "store": str(place[1] / ".strata"),
                "study": "nano",
                "resources": {"cpus": 1},
                **options,
            }
        )

    return make


@pytest.fixture
def ask(place, capsys):
    """Ask on the real head; returns the outcome and what was said."""

    def ask(wanted):
        outcome = jobs.ask(wanted, place[0])
        return outcome, capsys.readouterr().err

    return ask


def attempts(wanted):
    return Store(Path(wanted.store)).attempts(wanted.key)


def asking(wanted, place, *above):
    """A process that asks for `wanted`, prints the outcome's status, and whether it imported ray. above: a command that runs it."""
    code = f"""
import sys
from pathlib import Path
from pipelines import head, jobs
from pipelines.work import Request
outcome = jobs.ask(Request.from_json({wanted.to_json()!r}), head.ensure(Path({str(place[1])!r})))
print(outcome.status, "ray" in sys.modules, flush=True)
"""
    return subprocess.Popen([*above, sys.executable, "-c", code], cwd=head.CODE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_request_is_made_published_and_answered(ask, request_for):
    wanted = request_for("succeed", threads=1)
    outcome, _ = ask(wanted)
    assert outcome.status == "succeeded" and Path(outcome.folder) == attempts(wanted)[0]
    assert (Path(outcome.folder) / "made.txt").read_text() == "1\n"  # the worker's threads are the request's
    assert Store(Path(wanted.store)).find(wanted.key) == Path(outcome.folder)
    again, _ = ask(wanted)
    assert again.status == "present" and len(attempts(wanted)) == 1


def test_a_later_stage_needs_no_ray_of_its_own(ask, request_for, place):
    ask(request_for("succeed"))
    process = asking(request_for("succeed", cell="other"), place)
    assert process.communicate(timeout=60)[0].split() == ["present", "False"]
    process = asking(request_for("crash once"), place)
    assert process.communicate(timeout=60)[0].split() == ["succeeded", "False"]


def test_a_mistake_is_a_sentence_and_not_tried_again(ask, request_for):
    wanted = request_for("mistake")
    outcome, said = ask(wanted)
    assert (outcome.status, outcome.kind, outcome.error) == ("failed", "mistake", "training.batch: found 0, wanted at least 1.")
    assert len(attempts(wanted)) == 1 and said == ""


def test_a_fault_of_ours_keeps_its_traceback_and_is_not_tried_again(ask, request_for):
    wanted = request_for("error")
    outcome, _ = ask(wanted)
    assert (
        (outcome.status, outcome.kind) == ("failed", "error")
        and outcome.error.endswith("RuntimeError: a fault of ours\n")
        and "probe.py" in outcome.error
    )
    assert len(attempts(wanted)) == 1


def test_a_lost_worker_is_replaced(ask, request_for):
    wanted = request_for("crash once")
    outcome, said = ask(wanted)
    assert outcome.status == "succeeded" and Path(outcome.folder).name == "2"
    assert "attempt 2 takes up what it had saved" in said


def test_retries_come_to_an_end(ask, request_for):
    wanted = request_for("crash", retries=1)
    outcome, _ = ask(wanted)
    assert outcome.status == "lost" and "was lost 2 times" in outcome.error and "cluster.retries" in outcome.error
    assert len(attempts(wanted)) == 2


def test_more_processors_than_the_machine_has_are_slow_and_chips_are_a_mistake(ask, request_for):
    assert ask(request_for("succeed", resources={"cpus": 1000}))[0].status == "succeeded"
    outcome, _ = ask(request_for("succeed 2", resources={"cpus": 1, "gpus": 64}))
    assert outcome.kind == "mistake" and "wants 64 GPU" in outcome.error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_saves_and_stops_the_work(request_for, place, number):
    wanted = request_for("wait")
    process = asking(wanted, place)
    attempt = until(lambda: Store(Path(wanted.store)).alive(wanted.key))
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert out.split()[0] == "stopped" and "it saves its work first" in err
    assert (attempt / "saved").read_text() == "work" and Store(Path(wanted.store)).alive(wanted.key) is None
    assert not Board(wanted.store, wanted.study).has(place[0].session(), wanted.key)


def test_a_killed_dvc_has_the_work_saved(request_for, place, tmp_path):
    wanted = request_for("wait")
    dvc = tmp_path / "dvc"
    dvc.write_text("import subprocess, sys; subprocess.run(sys.argv[1:])")
    process = asking(wanted, place, sys.executable, str(dvc))
    attempt = until(lambda: Store(Path(wanted.store)).alive(wanted.key))
    process.kill()
    out, err = process.communicate(timeout=60)  # to its child's end
    assert out.split()[0] == "stopped" and (attempt / "saved").read_text() == "work"


def test_a_killed_driver_is_replaced(request_for, place):
    wanted = request_for("wait")
    board, session = Board(wanted.store, wanted.study), place[0].session()
    process = asking(wanted, place)
    until(lambda: Store(Path(wanted.store)).alive(wanted.key))
    before = board.driver(session)
    os.kill(before["pid"], signal.SIGKILL)
    after = until(lambda: (now := board.driver(session)) and now["pid"] != before["pid"] and now)
    assert after["job"] == before["job"].rpartition(".")[0] + f".{int(before['job'].rpartition('.')[2]) + 1}"
    until(lambda: len(attempts(wanted)) == 2 and Store(Path(wanted.store)).alive(wanted.key))
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[0].split()[0] == "stopped"


def test_what_is_released_runs_though_nobody_waits(request_for, place):
    wanted = request_for("succeed")
    assert jobs.release([wanted], place[0], at_once=1) == 1
    until(lambda: Store(Path(wanted.store)).find(wanted.key))
    assert until(lambda: Board(wanted.store, wanted.study).outcome(place[0].session(), wanted.key)).status == "succeeded"


def test_what_is_released_waits_for_its_inputs_and_then_reads_them_in_the_store(request_for, place):
    maker = request_for("succeed", cell="maker")
    taker = request_for("read", cell="taker", inputs={"made": "/nowhere"}, makers={"made": (maker.key, "made.txt")})
    jobs.release([taker], place[0], at_once=4)
    time.sleep(1.5)
    assert Store(Path(taker.store)).attempts(taker.key) == []
    jobs.release([maker], place[0], at_once=4)
    found = until(lambda: Store(Path(taker.store)).find(taker.key))
    assert (found / "made.txt").read_text() == "read 1\n"


def test_no_more_run_ahead_than_may(request_for, place):
    wanted = [request_for("wait", cell=f"cell {number}", resources={"cpus": 0.1}, spec={"stage": "probe", "versions": {}, "parameters": {"do": "wait", "n": number}}) for number in range(3)]  # fmt: skip
    store = Store(Path(wanted[0].store))
    alive = lambda: [item for item in wanted if store.alive(item.key)]  # noqa: E731
    jobs.release(wanted, place[0], at_once=2)
    until(lambda: len(alive()) == 2)
    time.sleep(1)
    assert len(alive()) == 2
    Board(wanted[0].store, "nano").withdraw_all(place[0].session())
    until(lambda: not alive())


def test_what_failed_ahead_is_told_and_not_tried_again(ask, request_for, place):
    wanted = request_for("mistake")
    jobs.release([wanted], place[0], at_once=1)
    until(lambda: Board(wanted.store, "nano").outcome(place[0].session(), wanted.key))
    assert ask(wanted)[0].error == "training.batch: found 0, wanted at least 1." and len(attempts(wanted)) == 1


# Without Ray


def test_two_sessions_may_want_the_same_and_leave_each_other_alone(tmp_path):
    wanted = Request(
        stage="probe", cell="cell", spec={"stage": "probe", "versions": {}, "parameters": {}}, inputs={}, store=str(tmp_path), study="nano"
    )
    board = Board(tmp_path, "nano")
    first = board.put(wanted, "session_1")
    assert [item.id for item in board.wanted("session_1")] == [first] and board.wanted("session_2") == []
    second = board.put(wanted, "session_2", ahead=3)
    assert [item.id for item in board.wanted("session_1")] == [first]
    assert [(item.id, item.ahead) for item in board.wanted("session_2")] == [(second, 3)]
    board.answer("session_1", wanted.key, jobs.Outcome("succeeded"), {first})
    assert not board.has("session_1", wanted.key) and board.outcome("session_1", wanted.key, first).done
    assert board.has("session_2", wanted.key) and board.outcome("session_2", wanted.key, second) is None
    later = board.put(wanted, "session_2")
    board.answer("session_2", wanted.key, jobs.Outcome("succeeded"), {second})
    assert board.has("session_2", wanted.key), "another request came meanwhile"
    board.answer("session_2", wanted.key, jobs.Outcome("succeeded"), {later})
    assert not board.has("session_2", wanted.key)


def test_a_damaged_request_is_passed_over(tmp_path):
    board = Board(tmp_path, "nano")
    requests = tmp_path / board.place / "requests" / "s"
    requests.mkdir(parents=True)
    (requests / "torn.json").write_text('{"id": "1", "sess')
    (requests / "other.json").write_text(
        json.dumps({"id": "1", "session": "s", "ahead": 0, "asked": 0, "request": {"stage": "probe", "new": 1}})
    )
    assert board.wanted("s") == []


def test_a_cluster_that_does_not_answer(tmp_path):
    wanted = Request(
        stage="probe", cell="cell", spec={"stage": "probe", "versions": {}, "parameters": {}}, inputs={}, store=str(tmp_path), study="nano"
    )
    with pytest.raises(ValueError, match="No Ray cluster answers at http://127.0.0.1:1.*--no-ray"):
        jobs.ask(wanted, head.Address("http://127.0.0.1:1"))


def test_an_interrupt_leaves_a_cluster_at_work(tmp_path, monkeypatch):
    """On a cluster that is not ours the request stays on the board, and the asker says where it goes on."""
    wanted = Request(
        stage="train",
        cell="mesa-1b-50b",
        spec={"stage": "train", "versions": {}, "parameters": {}},
        inputs={},
        store=str(tmp_path),
        study="nano",
    )
    address = head.Address("http://cluster.example:8265")
    monkeypatch.setattr(jobs._Post, "see_to_driver", lambda self: os.kill(os.getpid(), signal.SIGINT))
    monkeypatch.setattr(head.Address, "session", lambda self, timeout=2: "session_1")
    outcome = jobs.ask(wanted, address, progress=Progress("train", terminal=False))
    assert outcome.status == "detached" and "http://cluster.example:8265" in outcome.error and "strata stop mesa-1b-50b" in outcome.error
    assert Board(tmp_path, "nano").has("session_1", wanted.key) and signal.getsignal(signal.SIGINT) == signal.default_int_handler
