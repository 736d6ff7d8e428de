"""The `strata` command, as a person types it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Millions of parameters at 140m, 440m, 1b (MesaNet, section 2, and what follows from it).
COUNTS = {
    "transformer": (145.97, 433.20, 936.07),
    "mamba2": (146.13, 433.69, 936.97),
    "deltanet": (146.13, 433.69, 936.97),
    "gla": (146.19, 433.92, 937.49),
    "gated_deltanet": (146.19, 433.92, 937.49),
    "mesa": (146.20, 433.95, 937.53),
    "hawk": (148.35, 437.72, 937.33),
    "hawk_mesa": (147.28, 435.83, 937.43),
}


def strata(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"COLUMNS": "160"} | environment
    return subprocess.run([sys.executable, "-m", "pipelines", *arguments], cwd=cwd, env=variables, capture_output=True, text=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with the root's files and the nano study, without the code."""
    (tmp_path / ".dvc").mkdir()
    (tmp_path / "pipelines").mkdir()
    shutil.copytree(ROOT / "pipelines" / "nano" / "data", tmp_path / "pipelines" / "nano" / "data")
    for name in ("params.yaml", "dvc.yaml"):
        shutil.copyfile(ROOT / name, tmp_path / name)
        shutil.copyfile(ROOT / "pipelines" / "nano" / name, tmp_path / "pipelines" / "nano" / name)
    return tmp_path


def here(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return strata(*arguments, cwd=repository, PYTHONPATH=str(ROOT))


def test_the_plan_of_the_whole_study() -> None:
    began = time.monotonic()
    done = strata("plan", "--json")
    took = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    cells = json.loads(done.stdout)["cells"]
    assert len(cells) == 80
    for cell in cells:
        if cell["model"] in COUNTS:
            expected = COUNTS[cell["model"]][["140m", "440m", "1b"].index(cell["scale"])]
            assert round(cell["parameters"] / 1e6, 2) == pytest.approx(expected, abs=0.006)
        assert cell["flops"] > 6 * 0.7 * cell["parameters"] * cell["tokens"]
        assert cell["state"] in ("to run", "done", "stale", "running", "unavailable")
    mesa, gla = ({c["cell"]: c for c in cells}[f"{model}-1b-50b"] for model in ("mesa", "gla"))
    assert mesa["cg_share"] > 0.1 and gla["cg_share"] == 0 and mesa["flops"] > gla["flops"]
    assert took < 10, "a plan is for looking at often"  # 1 s on a free processor; the bound here is for a busy one


def test_the_plan_as_a_person_sees_it() -> None:
    done = strata("plan", "nano")
    assert done.returncode == 0, done.stderr
    assert "mesa-tiny-1m" in done.stdout and "Traceback" not in done.stdout


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("plan", "nno"), ["nno", "did you mean 'nano'"]),
        (("run", "trian"), ["trian", "did you mean 'train'"]),
        (("run", "train"), ["Which cell"]),
        (("forget", "mesa-tny-1m", "--study", "nano"), ["mesa-tny-1m", "mesa-tiny-1m"]),
        (("study", "Bad Name"), ["Bad Name", "small letters"]),
        (("stop", "mesa-tny-1m", "nano"), ["mesa-tny-1m"]),
    ],
)
def test_a_mistake_is_a_sentence_and_exit_code_2(repository: Path, arguments: tuple[str, ...], words: list[str]) -> None:
    done = here(repository, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: ") and "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_a_study_that_cannot_run_here_says_what_it_needs_and_where_to_begin() -> None:
    done = strata("run", "resolve", RAY_ADDRESS="")
    assert done.returncode == 2
    for word in ("slimpajama", "accelerators", "h100", "make nano"):
        assert word in done.stderr
    assert not (ROOT / "specs").exists()


def test_a_new_study_is_well_formed(repository: Path) -> None:
    done = here(repository, "study", "mine")
    assert done.returncode == 0, done.stderr
    assert (repository / "pipelines" / "mine" / "dvc.yaml").read_bytes() == (repository / "dvc.yaml").read_bytes()
    assert here(repository, "check", "mine").returncode == 0
    again = here(repository, "study", "mine")
    assert again.returncode == 2 and "exists" in again.stderr


def test_lock_data_writes_pins_and_nothing_else(repository: Path) -> None:
    file = repository / "pipelines" / "nano" / "params.yaml"
    before = file.read_text()
    pin = next(line.split("sha256:")[1] for line in before.splitlines() if "pin: sha256:" in line)
    file.write_text(before.replace(f"sha256:{pin}", "null"))
    refused = here(repository, "check", "nano")
    assert refused.returncode == 2 and "lock-data" in refused.stderr
    done = here(repository, "lock-data", "nano")
    assert done.returncode == 0 and pin in done.stdout
    assert file.read_text() == before


def test_data_that_changed_under_its_pin_is_refused(repository: Path) -> None:
    study = repository / "pipelines" / "nano"
    (study / "data" / "evaluation.parquet").write_bytes((study / "data" / "validation.parquet").read_bytes())
    assert here(study, "run", "resolve").returncode == 0
    assert here(study, "run", "--no-ray", "vocabulary").returncode == 0
    done = here(study, "run", "--no-ray", "tokenize", "long")
    assert done.returncode == 2 and "lock-data" in done.stderr and "Traceback" not in done.stderr


def test_a_stage_is_made_taken_from_the_store_and_forgotten(repository: Path) -> None:
    study = repository / "pipelines" / "nano"
    assert here(study, "run", "resolve").returncode == 0
    first = here(study, "run", "--no-ray", "vocabulary")
    assert first.returncode == 0 and ": made" in first.stdout, first.stderr
    shutil.rmtree(study / "vocabulary")
    second = here(study, "run", "--no-ray", "vocabulary")
    assert "taken from the store" in second.stdout and (study / "vocabulary" / "tokenizer.json").exists()
    assert "forgotten" in here(study, "forget", "vocabulary").stdout
    assert not (study / "vocabulary").exists()
    assert ": made" in here(study, "run", "--no-ray", "vocabulary").stdout


def test_what_is_not_there_yet_is_named(repository: Path) -> None:
    study = repository / "pipelines" / "nano"
    before = here(study, "run", "--no-ray", "vocabulary")
    assert before.returncode == 2 and "strata run resolve" in before.stderr
    here(study, "run", "resolve")
    missing = here(study, "run", "--no-ray", "train", "mesa-tiny-1m")
    assert missing.returncode == 2 and "budgets" in missing.stderr and "Traceback" not in missing.stderr


def test_the_doctor_looks_at_everything() -> None:
    done = strata("doctor", RAY_ADDRESS="")
    assert done.returncode in (0, 1)
    for word in ("python", "processors", "kernel mesa", "store", "ray"):
        assert word in done.stdout


def test_the_doctor_names_a_damaged_lock(repository: Path) -> None:
    (repository / "dvc.lock").write_text("schema: '2.0'\nstages:\n  resolve:\n    cmd: [unclosed\n")
    done = here(repository, "doctor")
    assert done.returncode == 1 and "dvc.lock" in done.stdout and "git checkout dvc.lock" in done.stdout
