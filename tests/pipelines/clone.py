"""A repository of its own with one small study, made by `dvc repro` as a user makes it."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from pipelines.reading import read

ROOT = Path(__file__).parents[2]
FLOORS = ("kernels", "models", "stages", "pipelines")
MADE = ("__pycache__", "analysis", "weights", "history", "evaluations", "provenance", "specs", "packed", "items", "tokens", "vocabulary")


class Study:
    """A clone-like repository in a folder of its own, with one study of a few training steps at its root."""

    def __init__(self, root: Path, *, ray: bool = False) -> None:
        self.root = root
        self.environment = os.environ | {
            "STRATA_RAY": str(int(ray)),
            "RAY_ADDRESS": "",
            "PYTHONPATH": str(root),
            "DVC_NO_ANALYTICS": "1",
            "OMP_NUM_THREADS": "2",
        }
        self.environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        for name in FLOORS:
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns(*MADE))
        for other in (root / "pipelines").glob("*/dvc.yaml"):  # one study is enough
            other.unlink()
        for name in ("dvc.yaml", ".gitignore", ".dvcignore"):
            shutil.copyfile(ROOT / name, root / name)
        self.params = small(read(ROOT / "pipelines" / "nano"))
        self.write(self.params)
        (root / ".dvc").mkdir()
        shutil.copyfile(ROOT / ".dvc" / "config", root / ".dvc" / "config")
        shutil.copytree(ROOT / ".dvc" / "plots", root / ".dvc" / "plots")
        (root / ".dvc" / ".gitignore").write_text("/config.local\n/tmp\n/cache\n")
        self.git("init", "-q", "-b", "main")
        self.commit("Begin")

    def write(self, params: dict[str, Any]) -> None:
        with (self.root / "params.yaml").open("w") as file:
            YAML().dump(params, file)

    def git(self, *arguments: str) -> str:
        command = ["git", "-c", "user.name=test", "-c", "user.email=test@example.org", *arguments]
        return subprocess.run(command, cwd=self.root, check=True, capture_output=True, text=True).stdout

    def commit(self, message: str) -> None:
        self.git("add", "-A")
        self.git("commit", "-qm", message)

    def dvc(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "dvc", *arguments]
        done = subprocess.run(command, cwd=self.root, env=self.environment, capture_output=True, text=True)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def ran(self, output: str) -> set[str]:
        """The stages that a `dvc repro` ran, by its output."""
        return {line.split("'")[1] for line in output.splitlines() if line.startswith("Running stage '")}

    def changed(self) -> set[str]:
        """The stages that DVC would rerun of themselves now."""
        status = json.loads(self.dvc("status", "--json").stdout)
        return {name for name, changes in status.items() if any("changed deps" in change for change in changes)}


def small(params: dict[str, Any]) -> dict[str, Any]:
    """The nano study, cut to a few steps of a very small model."""
    params = copy.deepcopy(params)
    params["root"] = "."
    params["grid"]["models"] = ["transformer", "mesa"]
    params["scales"]["tiny"] = {"layers": 2, "width": 16, "heads": 2, "key_size": 8, "mlp": 16}
    params["packing"] |= {"sequence_length": 32, "shard_rows": 32, "validation_rows": 8, "window": 64}
    params["training"] |= {"batch": 4, "warmup_steps": 2, "checkpoint_every": 4}
    params["budgets"]["1m"]["tokens"] = 4 * 32 * 6
    params["evaluation"] |= {"lengths": [32, 64], "settings_lengths": [64], "settings": {"cg-2": {"steps": 2}}}
    params["vocabulary"] |= {"size": 300, "megabytes": 0.2}
    for source in params["data"]["sources"].values():
        source["files"] = [f"pipelines/nano/{name}" for name in source["files"]]
    for task in params["tasks"].values():
        if "items" in task:
            task["items"]["files"] = [f"pipelines/nano/{name}" for name in task["items"]["files"]]
        else:
            task["generate"]["samples"] = 4
    return params
