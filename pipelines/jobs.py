"""Asking for a stage on Ray: put the request on the board, see that a driver runs, follow, return how it ended.

While a driver is up this needs the store alone; `ray` is imported only to submit one.
"""

from __future__ import annotations

import shlex
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from pipelines.board import Board
from pipelines.code import Code
from pipelines.head import Address, caller, identity, runs
from pipelines.objects import is_url, normal
from pipelines.opening import open_store
from pipelines.progress import Follower, Progress
from pipelines.work import Outcome, Request
from stages.spec import fingerprint

POLL_SECONDS, LONGEST_POLL_SECONDS = 0.05, 1.0  # between looks at the store: the longer it takes, the fewer
LOOK_SECONDS = 1.0  # between looks at the driver
SILENT_SECONDS = 15.0  # without a sign of life on a cluster, before Ray is asked
STOP_SECONDS = 120.0  # for a stage to save its work after Ctrl-C
SUBMIT_SECONDS = 60.0
PATIENCE_SECONDS = 5.0  # before it is said that others run first
PUBLISHED_SECONDS = 2.0  # for the driver to say what it has published


CODE_HERE = Code()


def ask(request: Request, address: Address, *, code: Code = CODE_HERE, progress: Progress | None = None) -> Outcome:
    """Have `request` run on the Ray cluster at `address` and wait for the outcome, showing its progress. Never raises for a stage that fails.

    Ctrl-C, SIGTERM, or a DVC that was killed: on our own head the stage saves its work and ends ("stopped"); on a cluster it
    goes on ("detached").
    ValueError where the cluster does not answer, RuntimeError where it will not run a driver.
    """
    session, request = _session(address), code.mark(request)
    with progress or Progress(f"{request.stage} {request.cell}") as shown, _signals() as caught:
        return _Asking(request, address, session, code, shown).wait(caught)


def release(requests: Iterable[Request], address: Address, *, at_once: int, code: Code = CODE_HERE) -> int:
    """Let these run whenever there is room and their inputs are made, `at_once` at a time, though nobody waits for them; a driver that is up takes
    them. Returns how many were not on the board before."""
    session = _session(address)
    new = 0
    for request in requests:
        board = Board(request.store, request.study)
        if not board.has(session, request.key):
            board.put(code.mark(request), session, ahead=at_once)
            new += 1
    return new


def _session(address: Address) -> str:
    session = address.session(timeout=10)
    if session is None:
        raise ValueError(
            f"No Ray cluster answers at {address.url}; see that it runs and that this machine reaches it, or work with --no-ray."
        )
    return session


@contextmanager
def _signals() -> Iterator[list[int]]:
    """The SIGINT and SIGTERM received inside, instead of their usual effect. Works in the main thread only."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    before = {number: signal.signal(number, lambda number, _: caught.append(number)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Asking:
    """One request, from the board to its outcome."""

    def __init__(self, request: Request, address: Address, session: str, code: Code, shown: Progress) -> None:
        self.request, self.address, self.session, self.shown = request, address, session, shown
        self.key, self.name = request.key, f"{request.stage} {request.cell}"
        self.board, self.store = Board(request.store, request.study), open_store(request.store)
        self.post = _Post(self.board, address, session, code, request)
        self.follower = Follower(lambda: self.store.attempts(self.key), shown.show, shown.say, self.store.alive(self.key))
        self.caller = identity(caller())
        # What failed ahead of this DVC's asking is told, not tried again: an error is reported once a run.
        self.failed = self.board.outcome(session, self.key, since=caller().create_time())
        self.failed = self.failed if self.failed and self.failed.status in ("failed", "lost") else None
        self.id = "" if self.failed else self.board.put(request, session)
        self._published: float | None = None
        self._said = False

    def wait(self, caught: list[int]) -> Outcome:
        """The outcome; `caught` fills when a signal comes."""
        if self.failed:
            return self.failed
        began = time.monotonic()
        while not caught and runs(self.caller):
            if outcome := self.board.outcome(self.session, self.key, self.id) or self._made_by_others():
                self.follower.look()
                return outcome
            if not self.board.has(self.session, self.key) and self.board.outcome(self.session, self.key, self.id) is None:
                self.board.put(self.request, self.session, id=self.id)
            self.post.see_to_driver()
            self.follower.look()
            self._say_that_it_waits(time.monotonic() - began)
            often = LONGEST_POLL_SECONDS if is_url(self.request.store) else POLL_SECONDS  # each look at a bucket costs
            time.sleep(min(LONGEST_POLL_SECONDS, often + (time.monotonic() - began) / 100))
        return self._stop(caught) if self.address.local else self._detach()

    def _made_by_others(self) -> Outcome | None:
        """What stands in the store, where our driver has nothing to say of it: another cluster's, or a run's without Ray."""
        if not self.store.published(self.key):
            return None
        self._published = self._published or time.monotonic()
        if time.monotonic() - self._published < PUBLISHED_SECONDS:
            return None
        found = self.store.find(self.key, lambda name: False)
        return Outcome("present", folder=str(found)) if found else None

    def _say_that_it_waits(self, seconds: float) -> None:
        """Once, where others have the room."""
        if self._said or seconds < PATIENCE_SECONDS or self.store.alive(self.key):
            return
        others = [key for key in (self.board.driver(self.session) or {}).get("working", ()) if key != self.key]
        if others:
            self.shown.say(
                f"{self.name} waits for room: {len(others)} other{'s' if len(others) > 1 else ''} of this study run; `strata status` shows them."
            )
            self._said = True

    def _detach(self) -> Outcome:
        return Outcome(
            "detached", f"{self.name} goes on at {self.address.url}; ask again to follow it, `strata stop {self.request.cell}` ends it."
        )

    def _stop(self, caught: list[int]) -> Outcome:
        self.shown.say(f"Stopping {self.name}: it saves its work first. Once more to leave at once.")
        self.board.withdraw_all(self.session)  # what runs ahead ends with it: the head is DVC's child
        deadline = time.monotonic() + STOP_SECONDS
        while time.monotonic() < deadline and len(caught) < 2 and runs(self.board.driver(self.session)):
            outcome = self.board.outcome(self.session, self.key, self.id)
            if outcome and not (self.board.driver(self.session) or {}).get("working"):
                return outcome
            self.follower.look()
            time.sleep(POLL_SECONDS)
        return self.board.outcome(self.session, self.key, self.id) or Outcome(
            "stopped", f"{self.name} was left before it had stopped; what it had saved is kept."
        )


class _Post:
    """Sees to it that a driver is there for the request."""

    def __init__(self, board: Board, address: Address, session: str, code: Code, request: Request) -> None:
        self.board, self.address, self.session, self.code, self.request = board, address, session, code, request
        self.name = f"strata-{request.study}-{fingerprint(normal(request.store))[:8]}"
        self._looked = self._changed = 0.0
        self._beat: Any = None
        self._submitted: tuple[Any, str, float] | None = None

    def see_to_driver(self) -> None:
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS and self._looked:
            return
        self._looked = now
        if self._alive(now):
            self._submitted = None
        elif self._submitted is not None:
            self._wait_for_it(now)
        else:
            self._submit(now)

    def _alive(self, now: float) -> bool:
        beat = self.board.driver(self.session)
        if beat is None:
            return False
        if beat.get("host") == socket.gethostname():
            return runs(beat)
        if beat["time"] != self._beat:
            # The first look goes by the other host's clock, all later ones by change alone.
            fresh = self._beat is not None or abs(time.time() - beat["time"]) < SILENT_SECONDS
            self._beat, self._changed = beat["time"], now if fresh else now - SILENT_SECONDS
        return now - self._changed < SILENT_SECONDS

    def _submit(self, now: float) -> None:
        """Submit a driver under the study's next free number, unless Ray says that its last one still runs."""
        from ray.job_submission import JobStatus, JobSubmissionClient

        client = JobSubmissionClient(self.address.url, headers=self.address.headers)
        numbers = {}
        for job in client.list_jobs():
            stem, _, number = (job.submission_id or "").rpartition(".")
            if stem == self.name and number.isdigit():
                numbers[int(number)] = job.status
        last = max(numbers, default=0)
        if last and numbers[last] in (JobStatus.PENDING, JobStatus.RUNNING):
            self._submitted = (client, f"{self.name}.{last}", now)
            return
        job = f"{self.name}.{last + 1}"
        words = [
            self.code.python,
            "-m",
            "pipelines.driver",
            normal(self.request.store),
            self.request.study,
            self.session,
            "--job",
            job,
        ]
        entrypoint = "exec " + shlex.join(words)
        if self.code.folder is not None:
            entrypoint = f"cd {shlex.quote(str(self.code.folder))} && {entrypoint}"
        try:
            client.submit_job(entrypoint=entrypoint, submission_id=job, runtime_env=self.code.runtime_env)
        except RuntimeError as error:
            if job not in [other.submission_id for other in client.list_jobs()]:  # else somebody was faster: it serves us too
                raise RuntimeError(f"The Ray cluster at {self.address.url} did not take the study's driver: {error}") from error
        self._submitted = (client, job, now)

    def _wait_for_it(self, now: float) -> None:
        """A submitted driver that shows no life: has it failed, or ended before it saw our request?"""
        from ray.job_submission import JobStatus

        client, job, since = self._submitted or (None, "", 0.0)
        status = client.get_job_status(job)
        if status == JobStatus.FAILED and self.board.driver(self.session) is None:
            log = client.get_job_logs(job)[-3000:]
            raise RuntimeError(f"The study's driver (Ray job {job}) ended before it began:\n{log}")
        if status in (JobStatus.FAILED, JobStatus.STOPPED, JobStatus.SUCCEEDED):
            self._submitted = None
        elif now - since > SUBMIT_SECONDS and status == JobStatus.PENDING:
            raise RuntimeError(
                f"The study's driver (Ray job {job}) has waited for {SUBMIT_SECONDS:.0f} s at {self.address.url}: {client.get_job_info(job).message}"
            )
