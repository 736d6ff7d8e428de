"""A whole small study with its store in a bucket and pointers in its folder, and a second clone that takes it from there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from pipelines import run, status
from pipelines.reading import load, read
from pipelines.resolve import resolve
from stages import artifact
from tests.pipelines.clone import ROOT, small
from tests.pipelines.places import server


def write(folder: Path, storage: str) -> dict[str, Any]:
    params = small(read(ROOT / "pipelines" / "nano"))
    params |= {"root": ".", "outputs": "pointers", "tasks": {}}
    params["grid"]["models"] = ["mesa"]
    params["analysis"] |= {"baseline": "mesa"}
    params["cluster"]["storage"] = storage
    for source in params["data"]["sources"].values():
        source["files"] = [str(ROOT / name) for name in source["files"]]
    folder.mkdir(parents=True)
    with (folder / "params.yaml").open("w") as file:
        YAML().dump(params, file)
    return params


def make(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every stage in order, in this process; how each came about."""
    monkeypatch.chdir(folder)
    return [run.run(stage, cell, ray=False).status for stage, cell in resolve(Path("."))]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "s3"])
def test_a_study_in_a_bucket(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "memory":
        whole(f"memory://{tmp_path.name}/store", tmp_path, monkeypatch)
    else:
        with server():
            whole("s3://bucket/store", tmp_path, monkeypatch)


def whole(storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.setenv("STRATA_CACHE", str(tmp_path / "cache-1"))
    one, two = tmp_path / "one", tmp_path / "two"
    write(one, storage)
    assert set(make(one, monkeypatch)) == {"succeeded"}
    assert (
        (one / "analysis" / "report.html").is_file()
        and not list(one.glob("weights/**/*.safetensors"))
        and not list(one.glob("tokens/**/*.parquet"))
    )
    assert (one / "packed" / "budgets" / "1m.json").is_file() and not list(one.glob("packed/**/rows.parquet"))
    cell = next((one / "weights").iterdir())
    assert json.loads((cell / artifact.NAME).read_text())["files"]["weights.safetensors"]["size"] > 0
    assert {state.state for state in _states(one).values()} == {"done"}

    # Another clone, on another machine: nothing is made again, and a new model trains on the rows that are there.
    monkeypatch.setenv("STRATA_CACHE", str(tmp_path / "cache-2"))
    params = write(two, storage)
    assert {state.state for state in _states(two).values()} == {"done"}
    assert set(make(two, monkeypatch)) == {"present"}
    assert not list((tmp_path / "cache-2").rglob("rows.parquet")), "pointers fetch no data"
    params["grid"]["models"] = ["mesa", "gla"]
    with (two / "params.yaml").open("w") as file:
        YAML().dump(params, file)
    assert sorted(make(two, monkeypatch)).count("succeeded") == 3  # its training, its evaluation, the analysis
    assert all(path.stat().st_nlink > 1 for path in (tmp_path / "cache-2").glob("*/blobs/*/*"))
    assert not [left for cache in (tmp_path / "cache-2").iterdir() for left in (cache / "work").glob("*")]
    assert "succeeded" in status.logs(two, cell.name)
    assert os.listdir(two / "weights")


def _states(folder: Path) -> dict[tuple[str, str], Any]:
    from pipelines.cells import specs, version_table
    from pipelines.resolve import context, roles
    from pipelines.states import states

    params = load(folder)
    workspace_context = context(params)
    return states(specs(params, version_table()), roles(params), run.store_of(workspace_context, folder), folder)
