"""The fault campaign: every fault that a study must survive, at random moments of every stage, and what came of it.

After each fault the work is asked for again, and counted: lost (the next run does not succeed), wrong (its results are not the
undisturbed run's), made again (what was complete was made anew), orphans (a process goes on), half visible (something
incomplete that a reader would take), not said (a traceback where a sentence was due). All are to be 0.

Three parts: `stages`, one stage at a time without Ray; `repro`, a whole `dvc repro` by Ray; `nodes`, a training by two processes
on two Ray nodes of this machine. The study is the nano study cut to seconds (benchmarks/campaign/study.py).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.campaign.tally import LOST, Tally
from benchmarks.table import report

PARTS = ("stages", "repro", "nodes")
DISK = "STRATA_CAMPAIGN_DISK"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks faults", description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS), metavar="PART", help="stages, repro, nodes; all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tries", type=int, default=4, help="of each fault at each stage (a quarter of it, at least 1, of each with Ray)")
    parser.add_argument("--only", default="", help="faults whose name has this in it")
    parser.add_argument("--stage", default="", help="stages whose name has this in it")
    parser.add_argument("--share", type=float, default=1.0, help="of all pairs of a fault and a stage, chosen at random")
    parser.add_argument("--no-table", action="store_true", help="write no table; print the sums as JSON")
    parser.add_argument("--keep", type=Path, help="a folder for the logs, and the folders of tries that failed")
    parser.add_argument("--name", default="faults", help="of the table in benchmarks/results")
    options = parser.parse_args(arguments)
    if strange := set(options.parts) - set(PARTS):
        parser.error(f"{', '.join(strange)}: the parts are {', '.join(PARTS)}")
    if DISK not in os.environ and "stages" in options.parts:
        sys.exit(_on_a_disk_of_its_own(arguments))
    tally = Tally()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was tried until then is reported
    try:
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            _campaign(options, Path(folder), tally)
    finally:
        for line in tally.told:
            print(line)
        if options.no_table:
            print(json.dumps(tally.sums()))
        elif tally.rows():
            print(f"\n{report(options.name, tally.rows())}")
    sys.exit(int(tally.failed))


def _campaign(options: argparse.Namespace, folder: Path, tally: Tally) -> None:
    logs = options.keep or folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with_ray_tries = max(1, options.tries // 4)
    if "stages" in options.parts:
        _stages(options, Path(os.environ[DISK]), logs, tally)
    if "repro" in options.parts:
        from benchmarks.campaign import with_ray

        with_ray.campaign(folder, logs, tally, tries=with_ray_tries, only=options.only, seed=options.seed)
    if "nodes" in options.parts:
        from benchmarks.campaign import nodes

        nodes.campaign(folder, tally, tries=with_ray_tries, only=options.only, seed=options.seed)


def _on_a_disk_of_its_own(arguments: list[str]) -> int:
    """Run the campaign again where a small disk in memory is mounted that nobody else sees, to be filled."""
    from benchmarks.campaign.in_process import DISK_BYTES

    folder = tempfile.mkdtemp(prefix="faults-disk-")
    private = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    mount = ["sh", "-c", f'mount -t tmpfs -o size={DISK_BYTES} faults "$0" && exec "$@"', folder]
    try:
        if subprocess.run([*private, *mount, "true"], capture_output=True).returncode:
            print("This machine lets us mount no small disk: the full disk is not tried.", file=sys.stderr)
            private, mount = [], []
        command = [sys.executable, "-m", "benchmarks", "faults", *arguments]
        environment = {DISK: folder, "OMP_NUM_THREADS": "1"} | ({"STRATA_CAMPAIGN_WHOLE_DISK": "1"} if not private else {})
        return subprocess.run([*private, *mount, *command], env=os.environ | environment).returncode
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _stages(options: argparse.Namespace, disk: Path, logs: Path, tally: Tally) -> None:
    for name, stage, seconds, found in stages(
        disk, logs, tries=options.tries, only=options.only, stage=options.stage, seed=options.seed, share=options.share
    ):
        tally.add(name, stage, seconds, found)


def stages(
    disk: Path, logs: Path, *, tries: int, only: str = "", stage: str = "", seed: int = 0, share: float = 1.0
) -> Iterator[tuple[str, str, float, list[tuple[str, str]]]]:
    """(fault, stage, seconds, what was found) of each try without Ray. share: of all pairs of a fault and a stage, chosen at random."""
    from benchmarks.campaign import in_process, study, warm

    warm.load()
    template = in_process.Template(disk / "template", logs)
    template.make()
    faults = {name: fault for name, fault in in_process.FAULTS.items() if only in name}
    if os.environ.get("STRATA_CAMPAIGN_WHOLE_DISK"):
        faults.pop("disk full", None)
    chosen = random.Random(seed)
    number = 0
    for at, cell in (pair for pair in study.TRIED if stage in pair[0]):
        for name, fault in faults.items():
            if chosen.random() >= share:
                continue
            for turn in range(tries):
                number += 1
                folder, began = disk / f"{number:04d}", time.monotonic()
                in_process.copy(template.before(at, cell), folder)
                one = in_process.Try(template, at, cell, random.Random(f"{seed} {name} {at} {turn}"), folder)
                try:
                    fault(one)
                except in_process.NotHere:
                    shutil.rmtree(folder)
                    break
                except RuntimeError as error:
                    one.note(LOST, str(error))
                if one.found:
                    shutil.copytree(folder, logs / folder.name, dirs_exist_ok=True)
                shutil.rmtree(folder)
                yield name, at, time.monotonic() - began, one.found
