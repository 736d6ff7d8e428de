"""What reruns is exact: DVC reruns the stages whose key changes, for every leaf of params.yaml and of the version table.

One small study is made whole by `dvc repro`; then each leaf is edited, resolved, and DVC is asked what it would run.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from pipelines.cells import specs, version_table
from pipelines.params import cells
from pipelines.reading import parse
from pipelines.workspace import dvc_stage
from tests.pipelines.clone import Study

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Study]:
    made = Study(tmp_path_factory.mktemp("study"))
    made.dvc("repro")
    made.commit("Make the study")
    yield made


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from leaves(inner, (*path, index))
    else:
        yield path


# How a leaf may be edited where "a little more" would not be valid: dotted name -> values to try.
EDITS: dict[str, list[Any]] = {
    "root": [], "study": ["other"], "outputs": [], "tracking": ["http://localhost:1"],
    "vocabulary.kind": [], "training.precision": ["bfloat16"], "training.on_nonfinite": ["skip"],
    "cluster.storage": [], "analysis.baseline": ["mesa"], "scales.tiny.key_size": [16], "training.floor": [0.2], "packing.epochs": [2],
    "evaluation.settings_lengths.0": [32], "evaluation.lengths.1": [],  # the one that solver settings are asked at
}  # fmt: skip


def edits(params: dict[str, Any], path: tuple[Any, ...]) -> list[Any]:
    name, value = ".".join(map(str, path)), params
    for part in path:
        value = value[part]
    if name in EDITS:
        return EDITS[name]
    if (
        path[0] in ("grid", "references", "sweep")
        or name.endswith((".layer", ".role", ".format", ".column", ".id", ".pin"))
        or ".files." in name
        or ".where." in name
    ):
        return []
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [value * 0.99]
    return []


def stage_names(keys: set[tuple[str, str]], params: dict[str, Any]) -> set[str]:
    """(stage, cell) as DVC names them."""
    groups = {cell.name: cell.group for cell in cells(parse(params))}
    return {dvc_stage(stage, cell, groups.get(cell)) for stage, cell in keys}


def keys_of(params: dict[str, Any], versions: dict[str, dict[str, int]]) -> dict[tuple[str, str], str]:
    return {name: spec.key for name, spec in specs(parse(params), versions).items()}


def resolve(study: Study) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pipelines", "run", "resolve"], cwd=study.root, env=study.environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_what_dvc_reruns_is_what_has_another_key(study: Study) -> None:
    before = keys_of(study.params, version_table())
    tried = 0
    try:
        for path in leaves(study.params):
            for value in edits(study.params, path):
                edited = copy.deepcopy(study.params)
                inner = edited
                for part in path[:-1]:
                    inner = inner[part]
                inner[path[-1]] = value
                study.write(edited)
                resolve(study)
                after = keys_of(edited, version_table())
                expected = stage_names({name for name in after if before.get(name) != after[name]}, edited)
                assert study.changed() - {"resolve"} == expected, path
                tried += 1
    finally:
        study.write(study.params)
        resolve(study)
    assert tried > 30


def test_a_version_reruns_what_it_versions(study: Study) -> None:
    file = study.root / "stages" / "versions.yaml"
    text = file.read_text()
    before, table = keys_of(study.params, version_table()), version_table()
    try:
        for part, name in [(part, name) for part, names in table.items() for name in names]:
            raised = copy.deepcopy(table)
            raised[part][name] += 1
            with file.open("w") as out:
                YAML().dump(raised, out)
            resolve(study)
            after = keys_of(study.params, raised)
            assert study.changed() - {"resolve"} == stage_names({cell for cell in after if before[cell] != after[cell]}, study.params), name
    finally:
        file.write_text(text)
        resolve(study)


def test_what_is_forgotten_is_made_again(study: Study) -> None:
    subprocess.run(
        [sys.executable, "-m", "pipelines", "forget", "evaluate/mesa-cg-2-tiny-1m"], cwd=study.root, env=study.environment, check=True
    )
    done = study.dvc("repro").stdout
    assert study.ran(done) == {"evaluate-sweep@mesa-cg-2-tiny-1m"} and "evaluate mesa-cg-2-tiny-1m: made" in done


def test_nothing_to_do_runs_nothing(study: Study) -> None:
    assert study.ran(study.dvc("repro").stdout) == set()


def test_a_comment_reruns_resolve_alone(study: Study) -> None:
    path = study.root / "params.yaml"
    text = path.read_text()
    path.write_text(text + "# a comment\n")
    assert study.ran(study.dvc("repro").stdout) == {"resolve"}
    path.write_text(text)
    study.dvc("repro")


def test_a_learning_rate_reruns_its_cell_and_coming_back_takes_the_old_result(study: Study) -> None:
    edited = copy.deepcopy(study.params)
    edited["learning_rates"]["mesa"]["tiny"]["1m"] *= 0.5
    study.write(edited)
    assert study.ran(study.dvc("repro").stdout) == {"resolve", "train@mesa-tiny-1m", "evaluate@mesa-tiny-1m", "analyze"}
    study.write(study.params)
    back = study.dvc("repro").stdout
    assert "made" not in [line.split(": ")[-1] for line in back.splitlines() if line.startswith("train")]
    assert study.dvc("status").stdout.strip().endswith("up to date.")


def test_a_setting_reruns_the_solvers_evaluation_alone(study: Study) -> None:
    units = study.root / "evaluations" / "mesa-tiny-1m"
    kept = {path.name: path.stat().st_ino for path in units.glob("*/nll.parquet")}
    inode = {path.parent.name: path.stat().st_ino for path in units.glob("*/nll.parquet")}
    edited = copy.deepcopy(study.params)
    edited["evaluation"]["settings"]["cg-1"] = {"steps": 1}
    study.write(edited)
    assert study.ran(study.dvc("repro").stdout) == {"resolve", "evaluate@mesa-tiny-1m", "evaluate-sweep@mesa-cg-2-tiny-1m", "analyze"}
    record = json.loads((study.root / "provenance" / "evaluate" / "mesa-tiny-1m.json").read_text())
    assert record["computed"] and all(name.endswith("-cg-1") for name in record["computed"])
    assert kept and {path.parent.name for path in units.glob("*/nll.parquet")} > set(inode)
    study.write(study.params)
    study.dvc("repro")


def test_a_larger_budget_changes_no_earlier_shard_and_reruns_no_cell(study: Study) -> None:
    shards = {path.parent.name: path.read_bytes() for path in (study.root / "packed" / "shards").glob("*/rows.parquet")}
    edited = copy.deepcopy(study.params)
    edited["budgets"]["2m"] = {"tokens": 3 * edited["budgets"]["1m"]["tokens"]}
    edited["grid"]["budgets"] = ["1m", "2m"]
    for model in ("transformer", "mesa"):
        edited["learning_rates"][model]["tiny"]["2m"] = 1e-3
    study.write(edited)
    ran = study.ran(study.dvc("repro").stdout)
    new = {f"{stage}@{model}-tiny-2m" for stage in ("train", "evaluate") for model in ("transformer", "mesa")}
    assert ran == {"resolve", "pack", "analyze"} | new
    for name, data in shards.items():
        assert (study.root / "packed" / "shards" / name / "rows.parquet").read_bytes() == data
    study.write(study.params)
    study.dvc("repro")
    assert not (study.root / "weights" / "mesa-tiny-2m").exists()


def test_a_model_taken_out_leaves_the_report(study: Study) -> None:
    edited = copy.deepcopy(study.params)
    edited["sweep"] = {"models": [], "scales": [], "budgets": []}
    study.write(edited)
    assert study.ran(study.dvc("repro").stdout) == {"resolve", "analyze"}
    assert "mesa-cg-2" not in (study.root / "analysis" / "report.html").read_text()
    assert not (study.root / "weights" / "mesa-cg-2-tiny-1m").exists()
    study.write(study.params)
    study.dvc("repro")
    assert "mesa-cg-2" in (study.root / "analysis" / "report.html").read_text()


def test_params_edited_while_a_stage_runs_are_not_recorded_with_the_old_result(study: Study) -> None:
    edited = copy.deepcopy(study.params)
    edited["learning_rates"]["transformer"]["tiny"]["1m"] *= 0.7
    study.write(edited)
    later = copy.deepcopy(edited)
    later["learning_rates"]["transformer"]["tiny"]["1m"] *= 0.7
    process = subprocess.Popen(
        [sys.executable, "-m", "dvc", "repro"], cwd=study.root, env=study.environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("Running stage 'train@transformer"):
            study.write(later)
    assert process.wait() == 0
    assert study.ran(study.dvc("repro").stdout) == {"resolve", "train@transformer-tiny-1m", "evaluate@transformer-tiny-1m", "analyze"}
    study.write(study.params)
    study.dvc("repro")


def test_outputs_are_one_copy_of_the_bytes(study: Study) -> None:
    weights = study.root / "weights" / "mesa-tiny-1m" / "weights.safetensors"
    same = [path for path in (study.root / ".strata").rglob("weights.safetensors") if path.stat().st_ino == weights.stat().st_ino]
    cached = [path for path in (study.root / ".dvc" / "cache").rglob("*") if path.is_file() and path.stat().st_ino == weights.stat().st_ino]
    assert same and cached


def test_two_commits_compare(study: Study) -> None:
    edited = copy.deepcopy(study.params)
    edited["learning_rates"]["mesa"]["tiny"]["1m"] *= 0.25
    study.write(edited)
    study.dvc("repro")
    study.commit("Try another learning rate")
    metrics = json.loads(study.dvc("metrics", "diff", "HEAD~1", "--json").stdout)
    assert "mesa" in json.dumps(metrics)
    params = json.loads(study.dvc("params", "diff", "HEAD~1", "--json").stdout)
    assert "learning_rates.mesa.tiny.1m" in json.dumps(params)
    study.dvc("plots", "diff", "HEAD~1", "-o", "diff-plots")
    page = (study.root / "diff-plots" / "index.html").read_text()
    assert page.count("vega") > 0
    shown = json.loads(study.dvc("exp", "show", "--json", "-n", "2").stdout)
    assert len(shown) >= 2
    study.write(study.params)
    study.dvc("repro")
    study.commit("Go back")


def test_the_same_numbers_from_another_clone_are_the_same_bytes(study: Study, tmp_path: Path) -> None:
    other = Study(tmp_path / "other" if (tmp_path / "other").mkdir() is None else tmp_path)
    (other.root / "stages" / "train.py").open("a").write("\n# an edit that changes no number\n")
    other.commit("Edit without effect")
    other.dvc("repro")
    compared = 0
    for folder in ("tokens", "packed", "weights", "evaluations"):
        for path in (study.root / folder).rglob("*"):
            if path.suffix in (".parquet", ".safetensors") or path.name == "artifact.json":
                assert (other.root / path.relative_to(study.root)).read_bytes() == path.read_bytes(), path
                compared += 1
    assert compared > 20
    assert json.loads((other.root / "analysis" / "metrics.json").read_text()) == json.loads(
        (study.root / "analysis" / "metrics.json").read_text()
    )
