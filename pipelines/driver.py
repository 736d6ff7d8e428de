"""A study's driver: one Ray job that runs what is asked of it, each request as one Ray task.

    python -m pipelines.driver STORE STUDY SESSION [--linger SECONDS] [--job ID]

It takes requests from the board, gives them to Ray with the resources they want, tries again after a lost worker or
node (never after an error), stops what was withdrawn, and writes the outcomes. On our own head it stays as long as the
head; on a cluster it ends when nothing has been left to do for `linger` seconds.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
import traceback
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import psutil
import ray
from ray import exceptions
from ray._private.state import available_resources_per_node

from pipelines import environment, head
from pipelines.board import Board
from pipelines.objects import normal
from pipelines.opening import open_store
from pipelines.placement import Offer, Place, first, fits, later, refusal, take
from pipelines.work import Outcome, Request

POLL_SECONDS = 0.1
BEAT_SECONDS = 2.0
BUSY_SECONDS = 1.0  # between looks at a key that somebody else is making
LOOK_SECONDS = 0.5  # between looks for inputs that are not made yet
SETTLE_SECONDS = 15.0  # for Ray to start what it has room for
LOST = (
    exceptions.WorkerCrashedError,
    exceptions.NodeDiedError,
    exceptions.LocalRayletDiedError,
    exceptions.OutOfMemoryError,
    exceptions.ObjectLostError,
)
QUEUED_AHEAD = 2  # tasks nobody waits for that may stand in Ray's queue beyond what there is room for: enough to make a cluster grow, too few to block it


@ray.remote(max_calls=1, max_retries=0)
def perform(request: dict[str, Any], threads: int) -> dict[str, Any]:
    """Run one request in this worker, which ends with it. Returns the outcome."""
    import os
    from dataclasses import asdict

    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)
    from pipelines import environment
    from pipelines.work import Outcome, Request, execute

    wanted = Request(**request)
    if strange := environment.difference(wanted.environment, wanted.settings.get("backend") or "torch"):
        return asdict(Outcome("failed", strange, "mistake"))
    if wanted.processes > 1:
        from pipelines.together import execute_together

        return asdict(execute_together(wanted, threads))
    return asdict(execute(wanted, log=True))


@ray.remote(num_cpus=0)
def nothing() -> None:
    """Long enough that two of these need two workers: Ray starts those ahead of the tasks that will take them."""
    time.sleep(0.1)


@dataclass
class Work:
    """One key in progress. ids: the requests that its outcome answers. attempt: the newest one before it was given to Ray, when that was, and where. ahead: see Wanted."""

    request: Request
    ids: set[str]
    ahead: int
    task: ray.ObjectRef | None = None
    attempt: int = 0
    losses: list[str] = field(default_factory=list)
    stopping: bool = False
    again: float = 0.0
    given: float = 0.0
    place: Place | None = None


class Driver:
    """The requests of one study on one Ray session."""

    def __init__(self, store: str, study: str, session: str, job: str) -> None:
        self.board, self.store, self.session = Board(store, study), open_store(store), session
        self.facts = head.identity(psutil.Process()) | {"host": socket.gethostname(), "job": job}
        self.local, self.code = head.MARK in os.environ, os.environ.get(environment.CODE)
        self.outdated = False  # whether what is wanted is for a driver of other code to do, and this one has no work left
        self.work: dict[str, Work] = {}
        self.published: set[str] = set()
        self.seen: dict[str, Offer] = {}
        self.free: list[Offer] = []
        self._beaten, self._seen_at = 0.0, float("-inf")

    def clear(self) -> None:
        """Forget the sessions whose drivers were on this host and are no more: nobody else takes up their requests."""
        for record in self.board.drivers():
            if record["session"] != self.session and record.get("host") == self.facts["host"] and not head.runs(record):
                self.board.forget(record["session"])

    def turn(self) -> bool:
        """Look at the board and at the tasks once. Returns whether anything is left to do."""
        board = self.board.wanted(self.session)
        wanted = {item.request.key: item for item in board if item.request.environment.get("code") == self.code}
        self.outdated = len(wanted) < len(board) and not self.work and not wanted
        for key, item in wanted.items():
            if key not in self.work:
                self.work[key] = Work(item.request, {item.id}, item.ahead)
                if not self.local and not self._can_be_placed(self.work[key]):
                    continue
            self.work[key].ids.add(item.id)
            self.work[key].ahead = min(self.work[key].ahead, item.ahead)
        for key in self.work.keys() - wanted.keys():
            self._stop(key)
        self._start()
        self._collect()
        if time.monotonic() - self._beaten > BEAT_SECONDS:
            self.beat()
        return bool(self.work)

    def _can_be_placed(self, work: Work) -> bool:
        """Whether there is any place for it, asked when it is first seen, long before its inputs are made; it is refused where there is none."""
        nodes, _ = self._nodes()
        if first(work.request.choices, nodes + later(work.request.later)):
            return True
        self._refuse(work, nodes)
        return False

    def beat(self) -> None:
        self.board.beat(
            self.session,
            self.facts | {"working": sorted(key for key, work in self.work.items() if work.task is not None or not work.ahead)},
        )
        self._beaten = time.monotonic()

    def _start(self) -> None:
        idle = [work for work in self.work.values() if work.task is None and not work.stopping and time.monotonic() >= work.again]
        for work in [item for item in idle if not item.ahead]:
            self._give(work)
        ahead = [item for item in idle if item.ahead and self._has_inputs(item)]
        if not ahead:
            return
        given = [item for item in self.work.values() if item.task is not None]
        room = max(QUEUED_AHEAD, self._room(ahead[0])) - sum(not self._begun(item) for item in given)
        running = sum(item.ahead > 0 for item in given)
        for work in ahead[: max(0, room)]:
            if running >= work.ahead:
                break
            self._give(work)
            running += 1

    def _room(self, work: Work) -> int:
        """For how many like it there is room now: all of them are begun at once, however long a worker takes to start."""
        place = work.request.choices[0]
        return sum(offer.processes(place) for offer in self._nodes()[1]) // max(1, place.processes)

    def _has_inputs(self, work: Work) -> bool:
        """Whether all that it is made from is in the store."""
        for key, _ in work.request.makers.values():
            if key not in self.published and self.store.published(key):
                self.published.add(key)
        if all(key in self.published for key, _ in work.request.makers.values()):
            return True
        work.again = time.monotonic() + LOOK_SECONDS
        return False

    def _begun(self, work: Work) -> bool:
        """Whether a worker has taken the task up."""
        return self._newest(work.request.key) > work.attempt

    def _newest(self, key: str) -> int:
        return self.store.newest(key)

    def _give(self, work: Work) -> None:
        """Hand the work to Ray, unless somebody else (another cluster, a run without Ray) is at it."""
        request = work.request
        if self.store.alive(request.key) is not None:
            work.again = time.monotonic() + BUSY_SECONDS
            return
        place = self._place(work)
        if place is None:
            return
        asked = dict(place.resources)
        cpus, gpus = asked.pop("cpus", 1), asked.pop("gpus", 0)
        if self.local:
            cpus = min(cpus, ray.cluster_resources().get("CPU", 1))  # one machine: fewer processors are slower, not impossible
        work.attempt, work.given, work.place = self._newest(request.key), time.monotonic(), place
        options = {"num_cpus": cpus, "num_gpus": gpus, "resources": asked, "name": f"{request.stage}@{request.cell}"}
        try:
            located = request.located(self.store, data=False).at(place)
        except ValueError as damaged:
            self._answer(request.key, Outcome("failed", str(damaged), "mistake"))
            return
        if place.processes > 1:  # Ray Train asks for what its processes need
            options |= {"num_cpus": 0, "num_gpus": 0, "resources": {}}
        elif place.labels and not self.local:
            options["label_selector"] = place.labels
        work.task = perform.options(**options).remote(asdict(located), (None if request.places else request.threads) or max(1, int(cpus)))

    def _place(self, work: Work) -> Place | None:
        """Where it is to run, as placement.py says; None where it waits for room, or was refused."""
        choices = work.request.choices
        if self.local:
            return self._place_here(work, choices)
        nodes, free = self._nodes()
        possible = [place for place in choices if fits(place, nodes + later(work.request.later))]
        if not possible:
            self._refuse(work, nodes)
            return None
        if len(possible) == 1:
            return possible[0]  # Ray queues it, and an autoscaler sees it wait
        given = [other for other in self.work.values() if other.task is not None and time.monotonic() - other.given < SETTLE_SECONDS]
        unsettled = [other for other in given if not self._begun(other)]
        for other in unsettled:
            free = take(other.place, free)
        place = first(possible, free)
        if place is None and not unsettled:  # what may be added is added only where something waits for it in Ray's queue
            place = next((place for place in possible if fits(place, later(work.request.later)) or not fits(place, nodes)), None)
        if place is possible[0] or (place is not None and not unsettled):
            return place
        work.again = time.monotonic() + BUSY_SECONDS
        return None

    def _place_here(self, work: Work, choices: list[Place]) -> Place | None:
        """On one machine, whose user knows what it has, a chip's name and a slice's shape are not asked after, only how many there are."""
        offered = ray.cluster_resources()
        shorts = [
            [f"{size:g} {name}" for name, size in place.each.items() if name != "CPU" and size * place.processes > offered.get(name, 0)]
            for place in choices
        ]
        for place, short in zip(choices, shorts, strict=True):
            if not short:
                return replace(place, type=None, topology=None)
        request = work.request
        self._answer(request.key, Outcome("failed", f"{request.stage} of {request.cell} wants {', or '.join(' and '.join(short) for short in shorts)}, which this machine "
                                          "does not offer; set RAY_ADDRESS to a cluster that does, or change cluster.workers in params.yaml.", "mistake"))  # fmt: skip
        return None

    def _nodes(self) -> tuple[list[Offer], list[Offer]]:
        """(every node that was seen, what is free of those that live). One that is lost may come back: it counts as a place to wait for."""
        if time.monotonic() - self._seen_at > LOOK_SECONDS:
            self._seen_at = time.monotonic()
            living = {node["NodeID"]: Offer(node["Resources"], node["Labels"], node["NodeID"]) for node in ray.nodes() if node["Alive"]}
            self.seen |= living
            available = available_resources_per_node()
            self.free = [replace(offer, resources=available.get(name, {})) for name, offer in living.items()]
        return list(self.seen.values()), list(self.free)

    def _refuse(self, work: Work, nodes: list[Offer]) -> None:
        request = work.request
        sentence = refusal(f"{request.stage} of {request.cell}", request.choices, nodes + later(request.later))
        self._answer(request.key, Outcome("failed", sentence, "mistake"))

    def _collect(self) -> None:
        tasks = {work.task: key for key, work in self.work.items() if work.task is not None}
        done = ray.wait(list(tasks), num_returns=len(tasks), timeout=POLL_SECONDS)[0] if tasks else time.sleep(POLL_SECONDS) or []
        for task in done:
            key = tasks[task]
            work, self.work[key].task = self.work[key], None
            outcome = self._outcome(work, task)
            if outcome is not None:
                self._answer(key, outcome)
        if done and self.local:
            for _ in range(2):
                nothing.remote()  # the next workers start while DVC takes in what this one made

    def _outcome(self, work: Work, task: ray.ObjectRef) -> Outcome | None:
        """How a finished task ended; None where it is to be tried again: a worker lost, or a key that somebody else is making."""
        try:
            outcome = Outcome(**ray.get(task))
            if outcome.status not in ("busy", "lost"):
                return outcome
            work.again = time.monotonic() + BUSY_SECONDS
            return Outcome("stopped", "It was stopped.") if work.stopping else None
        except exceptions.TaskCancelledError:
            return Outcome("stopped", "It was stopped before it began.")
        except LOST as loss:
            if work.stopping:
                return Outcome("stopped", "It was stopped.")
            work.losses.append(f"{type(loss).__name__}: {str(loss).strip().splitlines()[0]}")
            print(f"{work.request.stage}@{work.request.cell}: {work.losses[-1]}", flush=True)
            if len(work.losses) <= work.request.retries:
                return None
            times = f"{len(work.losses)} times" if len(work.losses) > 1 else "once"
            return Outcome("lost", f"The worker of {work.request.stage} {work.request.cell} was lost {times} (last: {work.losses[-1]}). "
                           "What it had saved is kept: ask again, or raise cluster.retries.", "error")  # fmt: skip
        except exceptions.RayError:
            return Outcome("failed", traceback.format_exc(), "error")

    def _stop(self, key: str) -> None:
        """Its request was withdrawn: have it save what it has and end."""
        work = self.work[key]
        if work.task is None:
            self._answer(key, Outcome("stopped", "It was stopped before it began."))
        elif not work.stopping:
            work.stopping = True
            if not self.store.ask_to_stop(key):
                ray.cancel(work.task)

    def _answer(self, key: str, outcome: Outcome) -> None:
        self.board.answer(self.session, key, outcome, self.work.pop(key).ids)
        self._beaten = 0.0  # whoever waits for all work to end sees it at once


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("store", type=normal, help="its folder, or its URL")
    parser.add_argument("study")
    parser.add_argument("session", help="the Ray session whose requests it takes")
    parser.add_argument("--linger", type=float, default=60.0, help="seconds without work after which it ends (on a cluster)")
    parser.add_argument("--job", default="", help="its own submission id")
    options = parser.parse_args(arguments)

    driver = Driver(options.store, options.study, options.session, options.job)
    driver.clear()
    ray.init(log_to_driver=False, logging_level="warning")
    driver.beat()
    idle = time.monotonic()
    while True:
        if driver.turn():
            idle = time.monotonic()
        if not driver.local and (driver.outdated or time.monotonic() - idle > options.linger):
            driver.board.leave(options.session)
            if driver.outdated or not driver.turn():  # whoever asked before the sign of life went away is still served
                break
            driver.beat()
    driver.board.leave(options.session)


if __name__ == "__main__":
    main()
