"""A study of many cells, and artifacts that stand for what its stages make: a few bytes each, under the right keys."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from pathlib import Path
from typing import Any

from pipelines import workspace
from pipelines.store import Store
from pipelines.work import LOG
from stages import artifact
from stages.spec import Spec

ROOT = Path(__file__).parents[2]
BUDGETS = ("b1", "b2", "b3", "b4")


def params(cells: int) -> dict[str, Any]:
    """params.yaml of about `cells` cells: windows of one layer, at one scale, on four budgets."""
    from pipelines.reading import read

    made = copy.deepcopy(read(ROOT / "pipelines" / "nano"))
    names = [f"swa{number}" for number in range(max(1, round(cells / len(BUDGETS))))]
    made |= {"root": ".", "study": f"grid-of-{cells}", "tasks": {}}
    made["grid"] = {"models": names, "scales": ["tiny"], "budgets": list(BUDGETS)}
    made["sweep"] = {"models": [], "scales": [], "budgets": []}
    made["models"] = {name: {"layer": "attention", "window": 2 + number} for number, name in enumerate(names)}
    made["budgets"] = {name: {"tokens": 1_000_000 + 10_000 * number} for number, name in enumerate(BUDGETS)}
    made["learning_rates"] = {name: {"tiny": dict.fromkeys(BUDGETS, 1e-3)} for name in names}
    made["analysis"]["baseline"] = None
    made["cluster"] |= {"workers": {"default": {"cpus": 1}}, "ahead": 10_000}
    for source in made["data"]["sources"].values():
        source["files"] = [str(ROOT / "pipelines" / "nano" / name) for name in source["files"]]
    return made


FILES = {  # what else of a stage's artifact somebody looks for
    "train": ("history.parquet",),
    "pack": (*(f"budgets/{name}.json" for name in BUDGETS), "validation/artifact.json"),
}


def publish(store: Store, spec: Spec) -> Path:
    """Make and publish the stub of one artifact, as `execute` does: a lease, files, a record, publication."""
    lease = store.acquire(spec.key, json.dumps(spec.model_dump()))
    out = lease.folder
    (out / "data.txt").write_text(spec.key)
    for name in FILES.get(spec.stage, ()):
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"key": spec.key, "digest": spec.key}))
    (out / "provenance.json").write_text(json.dumps({"started": 0.0, "seconds": 0.0}))
    (out / LOG).write_text("")
    artifact.write(out, key=spec.key, stage=spec.stage, files=["data.txt"], inputs={})
    lease.publish()
    lease.release({"status": "succeeded", "error": None, "kind": None, "folder": str(out)})
    return out


def clone(folder: Path, cells: int, *, ray: bool = False) -> Any:
    """A repository whose root is such a study, resolved."""
    from tests.pipelines.clone import Study

    folder.mkdir(parents=True)
    made = Study(folder, ray=ray)
    made.environment |= {"OMP_NUM_THREADS": "1"}
    made.params = params(cells)
    made.write(made.params)
    made.commit("Ask for a large grid")
    return made


def place_all(folder: Path) -> int:
    """Publish a stub of everything and put it where DVC expects it. Returns how many."""
    context = workspace.context(folder)
    store = Store(folder / ".strata")
    files = sorted((folder / "specs").rglob("*.json"))
    for path in files:
        spec = Spec.load(path)
        made = publish(store, spec)
        if spec.stage == "analyze":
            (made / "plots").mkdir()
            for name in ("metrics.json", "plots/loss.json", "plots/positions.json", "plots/perplexity.json"):
                (made / name).write_text("{}" if name == "metrics.json" else "[]")
        workspace.place(spec.stage, path.stem, context["roles"].get(path.stem), made, folder)
    return len(files)


def lock(folder: Path) -> int:
    """Write dvc.lock as a `dvc repro` of all of it would have: all stages at once instead of one by one. Returns how many stages."""
    from dvc.repo import Repo
    from dvc.stage.serialize import to_single_stage_lockfile
    from ruamel.yaml import YAML

    with contextlib.chdir(folder), Repo(".") as repo, repo.lock:
        stages = {}
        for stage in repo.index.stages:
            stage.save(allow_missing=True)
            stage.commit(allow_missing=True)
            stages[stage.name] = json.loads(json.dumps(to_single_stage_lockfile(stage)))
    with (folder / "dvc.lock").open("w") as file:
        YAML(typ="safe").dump({"schema": "2.0", "stages": stages}, file)
    shutil.rmtree(folder / ".dvc" / "tmp" / "rwlock", ignore_errors=True)
    return len(stages)
