"""A short fault campaign: a share of all faults at all stages, once each, and what the campaign itself would miss if it were blind."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_nothing_is_lost_wrong_or_made_again(tmp_path):
    """In a process of its own, which loads the libraries and is forked: this one may have threads."""
    command = [sys.executable, "-m", "benchmarks", "faults", "stages", "--tries", "1", "--share", "0.25", "--seed", "1", "--no-table"]
    done = subprocess.run(
        [*command, "--keep", str(tmp_path / "logs")], cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["tried"] >= 10 and sum(counts.values()) == counts["tried"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    from stages import artifact

    folder = tmp_path / ".strata" / "units" / "ab" / ("ab" * 32)
    folder.mkdir(parents=True)
    (folder / "data.txt").write_text("whole")
    artifact.write(folder, key="ab" * 32, stage="pack", files=["data.txt"], inputs={})
    return tmp_path


def test_the_campaign_sees_a_unit_that_is_half(tree, monkeypatch):
    from benchmarks.campaign import study

    monkeypatch.chdir(tree)
    assert list(study.standing("resolve", "resolve")["units"]) == ["ab" * 32]
    next(tree.rglob("data.txt")).write_text("wrong")  # of the same size: only its content tells
    facts = study.standing("resolve", "resolve")
    assert facts["units"] == {} and len(facts["half"]) == 1


def test_damage_changes_the_file_and_nothing_else(tmp_path):
    from benchmarks.campaign.in_process import damage

    whole = bytes(range(200))
    (tmp_path / "one").write_bytes(whole)
    os.link(tmp_path / "one", tmp_path / "two")
    for seed in range(20):
        (tmp_path / "one").write_bytes(whole)
        damage(tmp_path / "one", random.Random(seed))
        now = (tmp_path / "two").read_bytes()
        flipped = len(now) == len(whole) and sum(bin(a ^ b).count("1") for a, b in zip(now, whole, strict=True)) == 1
        assert flipped or whole.startswith(now) and len(now) < len(whole)


def test_a_tally_counts_each_try_once_a_kind():
    from benchmarks.campaign.tally import Tally

    tally = Tally()
    tally.add("kill -9", "train", 1.0, [])
    tally.add("kill -9", "train", 1.0, [("wrong", "one"), ("wrong", "two"), ("lost", "three")])
    [row] = tally.rows()
    assert (row["tried"], row["wrong"], row["lost"], row["orphans"]) == (2, 1, 1, 0) and tally.failed
