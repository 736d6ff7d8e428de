"""Faults of one stage at a time, at a random moment of it: `strata run STAGE CELL` without Ray, in a child that begins at once.

Each try has a folder as the study's was before the stage. After the fault the stage is run again, as the next `dvc repro`
does, and what it made is held against the undisturbed run's.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.campaign import study
from benchmarks.campaign.forked import Child, ask
from benchmarks.campaign.tally import AGAIN, HALF, LOST, ORPHAN, UNSAID, WRONG
from pipelines import workspace
from pipelines.store import STALE_SECONDS, Store
from stages.spec import Spec

MISTAKE, STOPPED = 2, 130
HOUR = 3600
DISK_BYTES = 256 << 20


def make(stage: str, cell: str) -> int:
    """`strata run`, but for MLflow, which has a test of its own. Returns the exit code."""
    from pipelines import cli
    from pipelines import run as running

    running.REMEMBERED = ()
    sys.argv = ["strata", "run", stage, *([cell] if cell != stage else []), "--no-ray"]
    try:
        cli.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


class NotHere(Exception):
    """The fault cannot strike this stage: it reads nothing of the store, or leaves nothing half made there."""


@dataclass
class Template:
    """The study as it was before each stage, and what each makes when nothing disturbs it.

    seconds: how long a stage takes. bytes: how much the disk loses to it.
    """

    root: Path
    logs: Path
    expected: dict[tuple[str, str], Any] = field(default_factory=dict)
    seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    bytes: dict[tuple[str, str], int] = field(default_factory=dict)

    def before(self, stage: str, cell: str) -> Path:
        return self.root / "before" / f"{stage}@{cell}"

    def make(self) -> None:
        """Run every stage once, keeping a copy of the folder before each that is tried, and one of the end."""
        from ruamel.yaml import YAML

        folder = self.root / "whole"
        folder.mkdir(parents=True)
        with (folder / "params.yaml").open("w") as file:
            YAML().dump(study.params(study.write_data(self.root / "data")), file)
        for stage, cell in study.STAGES:
            if (stage, cell) in study.TRIED:
                copy(folder, self.before(stage, cell))
            free, began = _free(folder), time.monotonic()
            child = Child(lambda stage=stage, cell=cell: make(stage, cell), folder, self.logs / "undisturbed.txt")
            if child.wait() != 0:
                raise RuntimeError(f"The undisturbed {stage} of {cell} failed:\n{child.said()[-3000:]}")
            self.seconds[stage, cell] = time.monotonic() - began
            self.bytes[stage, cell] = max(1 << 14, free - _free(folder))
            self.expected[stage, cell] = ask(lambda stage=stage, cell=cell: study.results(stage, cell), folder, self.logs / "ask.txt")


def copy(source: Path, target: Path) -> None:
    """With hard links among the copied files as they are."""
    target.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-a", str(source), str(target)], check=True)


def _free(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


class Try:
    """One try of one fault at one stage."""

    def __init__(self, template: Template, stage: str, cell: str, random: random.Random, folder: Path) -> None:
        self.template, self.stage, self.cell, self.random, self.folder = template, stage, cell, random, folder
        self.found: list[tuple[str, str]] = []
        self.asked = 0

    def note(self, kind: str, why: str) -> None:
        self.found.append((kind, f"{self.stage} {self.cell}: {why}"))

    def begin(self, stage: str = "", cell: str = "") -> Child:
        self.asked += 1
        log = self.template.logs / f"{self.folder.name}-{self.asked}.txt"
        log.unlink(missing_ok=True)
        return Child(lambda: make(stage or self.stage, cell or self.cell), self.folder, log)

    def wait_a_moment(self) -> None:
        """Up to the length of the undisturbed stage: anywhere in it."""
        time.sleep(self.random.uniform(0, self.template.seconds[self.stage, self.cell]))

    def ask(self, question: Callable[..., Any], *more: Any) -> Any:
        return ask(lambda: question(self.stage, self.cell, *more), self.folder, self.template.logs / f"{self.folder.name}-ask.txt")

    def standing(self) -> dict[str, Any]:
        facts = self.ask(study.standing)
        for why in facts["half"]:
            self.note(HALF, why)
        return facts

    def look_for_orphans(self, *children: Child) -> None:
        for child in children:
            for process in child.left():
                self.note(ORPHAN, f"process {process.pid} ({process.name()}) goes on")
                process.kill()

    def recover(self, before: dict[str, Any] | None = None, *, damaged: bool = False) -> None:
        """Run the stage again to its end and compare; before: what was complete by then. damaged: see `compare`."""
        child = self.begin()
        code = child.wait()
        if code != 0:
            child.send(signal.SIGKILL)
            self.note(LOST, f"the next run ended with {code}: {child.said()[-1500:]}")
            return
        self.compare(damaged=damaged)
        if before is not None:
            for why in self.ask(study.made_again, before):
                self.note(AGAIN, why)

    def compare(self, *, damaged: bool = False) -> None:
        """damaged: what was made may be refused by whoever reads it, if it is right once it was made again on request."""
        now, expected = self.ask(study.results), self.template.expected[self.stage, self.cell]
        if damaged and "refused" in now:
            self.forget(self.stage, self.cell)
            self.recover()
        elif now != expected:
            differ = sorted(name for name in now.keys() | expected.keys() if now.get(name) != expected.get(name))
            self.note(WRONG, f"{', '.join(differ[:5])} differ from the undisturbed run's")

    def attempt(self) -> Path | None:
        """The newest attempt's folder at this stage's artifact, once there is one."""
        if self.stage == "resolve":
            return None
        key = Spec.load(self.folder / workspace.spec_file(self.stage, self.cell)).key
        return next(iter(Store(self.folder / ".strata").attempts(key)), None)

    def refused(self, child: Child, *named: str) -> None:
        """It ended by a sentence; with a traceback, or without naming any of `named`, that is noted."""
        said = child.said()
        if child.code != MISTAKE or "Traceback" in said or (named and not any(name in said for name in named)):
            self.note(UNSAID, f"ended with {child.code}: {said[-1500:]}")


# The faults


def killed(self: Try, times: int = 1) -> None:
    for _ in range(times):
        child = self.begin()
        self.wait_a_moment()
        child.send(signal.SIGKILL)
        child.wait()
    self.look_for_orphans(child)
    self.recover(self.standing())


def terminated(self: Try) -> None:
    child = self.begin()
    self.wait_a_moment()
    child.send(signal.SIGTERM)
    if child.wait() is None:
        self.note(LOST, "did not end after SIGTERM")
        child.send(signal.SIGKILL)
        child.wait()
    elif child.code not in (0, STOPPED, -signal.SIGTERM):
        self.refused(child)
    self.look_for_orphans(child)
    self.recover(self.standing())


def disk_full(self: Try) -> None:
    left = self.random.randint(0, self.template.bytes[self.stage, self.cell])
    filler = self.template.root / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, _free(self.folder) - left))
    child = self.begin()
    if child.wait() is None:
        self.note(LOST, "did not end on a full disk")
        child.send(signal.SIGKILL)
        child.wait()
    filler.unlink()
    if child.code != 0:
        self.refused(child, "disk")
    self.look_for_orphans(child)
    self.recover(self.standing())


def suspended(self: Try) -> None:
    """SIGSTOP while another takes over, then SIGCONT: the lease is stolen, and the one who lost it must write nothing more."""
    child = self.begin()
    self.wait_a_moment()
    child.send(signal.SIGSTOP)
    _age_heartbeat(self, -2 * STALE_SECONDS)
    before = self.standing()
    self.recover(before)
    child.send(signal.SIGCONT)
    if child.wait() is None:
        self.note(LOST, "did not end after its lease was lost")
        child.send(signal.SIGKILL)
        child.wait()
    elif child.code != 0:
        self.refused(child)
    self.compare()
    self.recover(self.standing())


def clock_jumps(self: Try) -> None:
    """The clock of the store's disk jumps by an hour, either way, while one works and another comes to ask."""
    child = self.begin()
    self.wait_a_moment()
    _age_heartbeat(self, self.random.choice((-HOUR, HOUR)))
    other = self.begin()
    for one in (child, other):
        if one.wait() is None:
            self.note(LOST, "did not end after the clock had jumped")
            one.send(signal.SIGKILL)
            one.wait()
        elif one.code != 0:
            self.refused(one)
    self.recover(self.standing())


def killed_and_clock_jumps(self: Try) -> None:
    """kill -9, and the clock is set back by an hour: the heartbeat of the dead is of the future."""
    child = self.begin()
    self.wait_a_moment()
    child.send(signal.SIGKILL)
    child.wait()
    _age_heartbeat(self, HOUR)
    self.recover(self.standing())


def _age_heartbeat(self: Try, seconds: float) -> None:
    attempt = self.attempt()
    if attempt is not None and (attempt / "heartbeat").exists():
        now = time.time()
        try:
            os.utime(attempt / "heartbeat", (now + seconds, now + seconds))
        except FileNotFoundError:
            pass  # it ended this moment


def unfinished_work_damaged(self: Try) -> None:
    """kill -9, and a file of what it was at is truncated or has a bit flipped: it is not used, or, deep in the data of a unit that was
    complete, seen by whoever reads it."""
    if self.stage == "resolve":
        raise NotHere
    child = self.begin()
    self.wait_a_moment()
    child.send(signal.SIGKILL)
    child.wait()
    attempt = self.attempt()
    files = (
        [path for path in attempt.rglob("*") if path.is_file()] if attempt and not (attempt.parent.parent / "published").exists() else []
    )
    if files:
        damage(self.random.choice(sorted(files)), self.random)
    self.recover(damaged=True)


def record_damaged(self: Try) -> None:
    """A record of the finished artifact is truncated, emptied or has a bit flipped: taken still, or refused and named, and made again on request."""
    if self.begin().wait() != 0:
        self.note(LOST, "the run before the damage failed")
        return
    attempt = self.attempt()
    if attempt is None:
        files = [path for path in (self.folder / "specs").rglob("*.json")]
    else:
        key_folder = attempt.parent.parent
        files = [key_folder / "published", key_folder / "spec.json", attempt / "outcome.json", *attempt.rglob("artifact.json")]
    damage(self.random.choice(sorted(files)), self.random)
    child = self.begin()
    if child.wait() == 0:
        self.compare(damaged=True)
        return
    self.refused(child, "strata forget")
    self.forget(self.stage, self.cell)
    self.recover()


def input_damaged(self: Try) -> None:
    """A data file of what it is made from is truncated or has a bit flipped: refused and named, or of no effect; made again on request."""
    makers = self.ask(_makers)
    files = [Path(name) for name in self.ask(_files)]
    if not files:
        raise NotHere
    path = self.random.choice(files)
    damage(path, self.random)
    child = self.begin()
    if child.wait() == 0:
        self.compare()
        return
    self.refused(child, "strata forget", path.name)
    key = path.relative_to(self.folder / ".strata" / "artifacts").parts[1]
    self.forget(*makers[key])
    maker = self.begin(*makers[key])
    if maker.wait() != 0:
        self.note(LOST, f"{makers[key]} was not made again: {maker.said()[-1500:]}")
    self.recover()


def _files(stage: str, cell: str) -> list[str]:
    return [] if stage == "resolve" else [str(path) for path in study.files_of(stage, cell, inputs=True)]


def _makers(stage: str, cell: str) -> dict[str, tuple[str, str]]:
    """key -> what makes it, of the whole study."""
    return {Spec.load(path).key: (path.parent.name, path.stem) for path in Path("specs").rglob("*.json")} if stage != "resolve" else {}


def damage(path: Path, random: random.Random) -> None:
    """Truncate the file at a random byte, or flip one bit of it, in place: whoever has a link to it has the damage."""
    path.chmod(0o644)
    size = path.stat().st_size
    with path.open("r+b") as file:
        if not size or random.random() < 0.5:
            file.truncate(random.randrange(size) if size else 0)
            return
        place = random.randrange(size)
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ (1 << random.randrange(8))]))


def forget(self: Try, stage: str, cell: str) -> None:
    def work() -> int:
        from pipelines.forget import forget

        print("\n".join(forget(Path("."), [f"{stage}/{cell}"])))
        return 0

    child = Child(work, self.folder, self.template.logs / f"{self.folder.name}-forget.txt")
    if child.wait() != 0:
        self.note(LOST, f"`strata forget` failed: {child.said()[-1500:]}")


Try.forget = forget

FAULTS: dict[str, Callable[[Try], None]] = {
    "kill -9": killed,
    "kill -9 twice": partial(killed, times=2),
    "SIGTERM": terminated,
    "disk full": disk_full,
    "SIGSTOP, lease stolen, SIGCONT": suspended,
    "the clock jumps, another asks": clock_jumps,
    "kill -9, the clock jumps": killed_and_clock_jumps,
    "unfinished work damaged": unfinished_work_damaged,
    "a record damaged": record_damaged,
    "an input damaged": input_damaged,
}
