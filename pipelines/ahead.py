"""What a plain `dvc repro` will ask for, released at once: DVC asks for one stage after another, Ray runs what has its inputs."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from pipelines import workspace
from pipelines.head import caller
from pipelines.store import Store
from stages.spec import Spec

STAGES = ("vocabulary", "tokenize", "pack", "items", "train", "evaluate")  # analyze alone is DVC's to ask for: it is last and takes seconds
FLAGS = ("-q", "--quiet", "-v", "--verbose", "-k", "--keep-going", "--no-commit", "-P", "--all-pipelines", "-p", "--pipeline")

Cells = list[tuple[str, str]]  # (stage, cell)


def whole_study(folder: Path = Path(".")) -> bool:
    """Whether the DVC that called asks for all of this study: `dvc repro` without a target, or with the study's dvc.yaml alone."""
    words = caller().cmdline()
    if "repro" not in words:
        return False
    targets = [word for word in words[words.index("repro") + 1 :] if word not in FLAGS]
    started = Path(caller().cwd())
    return all(Path(word).name == "dvc.yaml" and (started / word).resolve() == (folder / "dvc.yaml").resolve() for word in targets)


def room_here(context: dict[str, Any]) -> bool:
    """Whether this machine has room for two of the study's workers at once. With room for one, DVC's own order serves as well, and shows what runs."""
    from pipelines.nodes import accelerators

    here = accelerators()

    def at_once(worker: dict[str, Any]) -> int:
        chip = worker["chip"]
        chips = here.get(chip["kind"], 0) // worker["count"] if chip and chip["kind"] != "cpu" else None
        cpus = (os.cpu_count() or 1) // worker["cpus"]
        return cpus if chips is None else min(chips, cpus)

    return max(at_once(worker) for workers in context["workers"].values() for worker in workers) > 1


def unmade(context: dict[str, Any], store: Store, folder: Path = Path(".")) -> Cells:
    """(stage, cell) of all that DVC will run and the store lacks, inputs first: neither published nor, by dvc.lock, made already."""
    locked = _locked(folder)
    found = []
    for stage in STAGES:
        for file in sorted((folder / "specs" / stage).glob("*.json")):
            cell, group = file.stem, context["cells"].get(file.stem, {}).get("group")
            name = workspace.dvc_stage(stage, cell, group)
            if locked.get(name) == hashlib.md5(file.read_bytes()).hexdigest():
                continue
            if not store.published(Spec.load(file).key):
                found.append((stage, cell))
    return found


def _locked(folder: Path) -> dict[str, str]:
    """DVC's stage -> MD5 of the spec that dvc.lock holds it for."""
    import yaml

    try:
        lock = yaml.load((folder / "dvc.lock").read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}
    except (OSError, yaml.YAMLError):
        return {}
    found = {}
    for name, stage in (lock.get("stages") or {}).items():
        for dependency in stage.get("deps", ()):
            if str(dependency.get("path", "")).startswith("specs/"):
                found[name] = dependency.get("md5", "")
    return found
