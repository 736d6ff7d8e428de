"""Faults of a whole `dvc repro` by Ray, at a random moment of it: any of its processes killed, signals, damaged files, a clock that is set."""

from __future__ import annotations

import copy
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.campaign import study, warm
from benchmarks.campaign.forked import ask
from benchmarks.campaign.tally import AGAIN, HALF, LOST, ORPHAN, WRONG, Found, Tally

PATIENCE, GONE_SECONDS = 600.0, 90.0
FAKETIME = ("/usr/lib/*/faketime/libfaketimeMT.so.1", "/usr/lib/faketime/libfaketimeMT.so.1", "/usr/local/lib/faketime/libfaketimeMT.so.1")
WHERE = "whole study"
STAGES = [pair for pair in study.STAGES if pair[1] not in ("resolve", study.OTHER)]


class Run:
    """One `dvc repro` in a clone of its own."""

    def __init__(self, template: Any, root: Path, log: Path) -> None:
        from benchmarks.campaign.in_process import copy as copy_tree

        copy_tree(template.root, root)
        self.clone, self.root, self.log = copy.copy(template), root, log
        self.clone.root = root
        self.environment = template.environment | {"PYTHONPATH": str(root)}
        self.found: Found = []

    def begin(self, *targets: str, **environment: str) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "dvc", "repro", *targets], cwd=self.root, env=self.environment | environment, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def processes(self) -> list[psutil.Process]:
        """All that work for this clone."""
        found = []
        for process in psutil.process_iter():
            try:
                mine = str(self.root) in " ".join(process.cmdline()) or process.environ().get("PYTHONPATH", "").startswith(str(self.root))
                if process.pid != os.getpid() and mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def wait_until_nothing_runs(self) -> None:
        deadline = time.monotonic() + GONE_SECONDS
        while left := self.processes():
            if time.monotonic() > deadline:
                for process in left:
                    self.found.append((ORPHAN, f"process {process.pid} ({process.name()}) goes on"))
                    process.kill()
                return
            time.sleep(0.2)

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-2500:]

    def ask(self, question: Callable[[], Any]) -> Any:
        return ask(question, self.root, self.log.with_suffix(".ask"))

    def standing(self) -> dict[str, Any]:
        """Of every stage whose spec is written."""
        facts = self.ask(
            lambda: {
                f"{stage} {cell}": study.standing(stage, cell) for stage, cell in STAGES if study.workspace.spec_file(stage, cell).is_file()
            }
        )
        self.found += [(HALF, why) for one in facts.values() for why in one["half"]]
        return facts

    def finish(self, before: dict[str, Any], expected: dict[str, Any]) -> None:
        """The next `dvc repro`, to its end; its results against the undisturbed run's, and what was complete before against what is now."""
        process = self.begin()
        try:
            code = process.wait(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            code = None
            for each in self.processes():
                each.kill()
            process.wait()
        self.wait_until_nothing_runs()
        if code != 0:
            self.found.append((LOST, f"the next dvc repro ended with {code}: {self.said()}"))
            return
        now = self.ask(results)
        self.found += [(WRONG, f"{name} differs from the undisturbed run's") for name in expected if now.get(name) != expected[name]]

        def again() -> list[str]:
            return [f"{name}: {why}" for name, facts in before.items() for why in study.made_again(*name.split(), facts)]

        self.found += [(AGAIN, why) for why in self.ask(again)]


def results() -> dict[str, Any]:
    """Of every stage; of the analysis, which shows how long things took, the numbers alone."""
    made = {f"{stage} {cell}": study.results(stage, cell) for stage, cell in STAGES if stage != "analyze"}
    return made | {"analyze": Path("analysis/metrics.json").read_text()}


# The faults: each is given a run that is under way


def _kill(choose: Callable[[Run, psutil.Process], bool]) -> Callable[[Run, subprocess.Popen[bytes], random.Random], None]:
    def fault(run: Run, process: subprocess.Popen[bytes], chosen: random.Random) -> None:
        """kill -9 of those that `choose` says, as soon as there is one."""
        deadline = time.monotonic() + 20
        while process.poll() is None and time.monotonic() < deadline:
            victims = [one for one in run.processes() if _says(choose, run, one)]
            for one in victims:
                try:
                    one.kill()
                except psutil.Error:
                    continue
            if victims:
                return
            time.sleep(0.02)

    return fault


def _says(choose: Callable[[Run, psutil.Process], bool], run: Run, process: psutil.Process) -> bool:
    try:
        return choose(run, process)
    except psutil.Error:
        return False


def _has(*words: str) -> Callable[[Run, psutil.Process], bool]:
    return lambda run, process: any(word in " ".join(process.cmdline()) for word in words)


def _of_the_head(heir: bool) -> Callable[[Run, psutil.Process], bool]:
    """The head's guardian, or its heir, which is the guardian's child and a copy of it."""
    known = _has("pipelines.head")

    def chosen(run: Run, process: psutil.Process) -> bool:
        parent = process.parent()
        return known(run, process) and (parent is not None and known(run, parent)) == heir

    return chosen


def _signal(number: signal.Signals, group: bool) -> Callable[[Run, subprocess.Popen[bytes], random.Random], None]:
    def fault(run: Run, process: subprocess.Popen[bytes], chosen: random.Random) -> None:
        os.killpg(process.pid, number) if group else process.send_signal(number)

    return fault


def _damaged(name: str) -> Callable[[Run, subprocess.Popen[bytes], random.Random], None]:
    def fault(run: Run, process: subprocess.Popen[bytes], chosen: random.Random) -> None:
        """All of it is killed while the file is being written: it is torn. The remedy is the one that `strata doctor` or DVC names."""
        everything(run, process, chosen)
        process.wait()
        path = run.root / name
        if not path.exists():
            return
        whole = path.read_bytes()
        path.write_bytes(whole[: chosen.randrange(1, max(2, len(whole)))])
        log = run.root.with_suffix(".torn")
        with log.open("wb") as file:
            done = subprocess.run([sys.executable, "-m", "dvc", "repro", "vocabulary"], cwd=run.root, env=run.environment, stdout=file, stderr=file)  # fmt: skip
        if done.returncode and name not in log.read_text(errors="replace"):
            run.found.append((LOST, f"{name} was torn, and that was not said: {log.read_text(errors='replace')[-1500:]}"))
        if name == "dvc.lock":
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(whole)

    return fault


def _clock_set(run: Run, process: subprocess.Popen[bytes], chosen: random.Random) -> None:
    (run.root.with_suffix(".clock")).write_text(chosen.choice(("+1h", "-1h")) + "\n")
    process.wait(timeout=PATIENCE)


everything = _kill(lambda run, process: True)
FAULTS: dict[str, Callable[[Run, subprocess.Popen[bytes], random.Random], None]] = {
    "kill -9 of a Ray worker": _kill(lambda run, process: process.name().startswith("ray::")),
    "kill -9 of dvc": _kill(lambda run, process: process.cmdline()[1:4] == ["-m", "dvc", "repro"]),
    "kill -9 of the stage's command": _kill(_has("strata run")),
    "kill -9 of the driver": _kill(_has("pipelines.driver")),
    "kill -9 of the head's guardian": _kill(_of_the_head(heir=False)),
    "kill -9 of the guardian's heir": _kill(_of_the_head(heir=True)),
    "kill -9 of Ray's control store": _kill(_has("gcs_server")),
    "kill -9 of the raylet": _kill(_has("raylet/raylet")),
    "kill -9 of everything": everything,
    "SIGTERM to dvc": _signal(signal.SIGTERM, group=False),
    "Ctrl-C": _signal(signal.SIGINT, group=True),
    "dvc.lock torn": _damaged("dvc.lock"),
    "params.yaml torn": _damaged("params.yaml"),
    "the clock is set": _clock_set,
}


def faketime() -> str | None:
    """libfaketime's library: at its usual places, or where LIBFAKETIME says."""
    given = os.environ.get("LIBFAKETIME")
    found = [given] if given else [str(path) for pattern in FAKETIME for path in Path("/").glob(pattern.lstrip("/"))]
    return next(iter(found), None)


def clone(root: Path) -> Any:
    """A repository with the campaign's study at its root."""
    from tests.pipelines.clone import Study

    root.mkdir(parents=True)
    made = Study(root, ray=True)
    made.environment |= {"OMP_NUM_THREADS": "1"}
    made.params = study.params(study.write_data(root.with_name("data")))
    made.params["grid"]["models"], made.params["analysis"]["baseline"] = ["mesa"], None
    made.write(made.params)
    made.commit("Make it small")
    return made


def campaign(folder: Path, logs: Path, tally: Tally, *, tries: int, only: str = "", seed: int = 0) -> None:
    faults = {name: fault for name, fault in FAULTS.items() if only in name}
    if "the clock is set" in faults and faketime() is None:
        print("libfaketime is not installed: the clock is not set (LIBFAKETIME=/path/to/libfaketimeMT.so.1 names it).", file=sys.stderr)
        faults.pop("the clock is set")
    if not faults:
        return
    warm.load()
    template = clone(folder / "clone")
    whole = Run(template, folder / "undisturbed", logs / "undisturbed-repro.txt")
    began = time.monotonic()
    if whole.begin().wait() != 0:
        raise RuntimeError(f"The undisturbed dvc repro failed:\n{whole.said()}")
    length = time.monotonic() - began
    whole.wait_until_nothing_runs()
    expected = whole.ask(results)
    print(f"undisturbed: {length:.0f} s", file=sys.stderr, flush=True)
    for turn in range(tries):
        for name, fault in faults.items():
            began, chosen = time.monotonic(), random.Random(f"{seed} {name} {turn}")
            run = Run(template, folder / f"{name.replace(' ', '-').replace('.', '')}-{turn}", logs / f"{name.replace(' ', '-')}-{turn}.txt")
            environment = {}
            if name == "the clock is set":
                clock = run.root.with_suffix(".clock")
                clock.write_text("+0\n")
                environment = {
                    "LD_PRELOAD": str(faketime()), "FAKETIME_TIMESTAMP_FILE": str(clock), "FAKETIME_NO_CACHE": "1", "NO_FAKE_STAT": "1",
                    "FAKETIME_DONT_FAKE_MONOTONIC": "1",
                }  # fmt: skip
            try:
                _disturb(run, fault, chosen, chosen.uniform(0.1, 0.95) * length, expected, environment)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                run.found.append((LOST, f"{error}"[-2500:]))
                for each in run.processes():
                    each.kill()
            tally.add(name, WHERE, time.monotonic() - began, run.found)
            print(f"{name}: {time.monotonic() - began:.0f} s, {len(run.found)} found", file=sys.stderr, flush=True)


def _disturb(run: Run, fault: Any, chosen: random.Random, moment: float, expected: dict[str, Any], environment: dict[str, str]) -> None:
    process = run.begin(**environment)
    deadline = time.monotonic() + moment
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    fault(run, process, chosen)
    process.wait(timeout=PATIENCE)
    run.wait_until_nothing_runs()
    run.finish(run.standing(), expected)
