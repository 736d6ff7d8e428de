"""`strata relock`: a lock from the store, training nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines import run
from pipelines.relock import relock
from pipelines.resolve import resolve
from pipelines.store import Store
from tests.pipelines.clone import Study


@pytest.mark.slow
def test_a_lock_is_made_anew_from_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = Study(tmp_path / "study")
    params = study.params | {"tasks": {}}
    params["grid"]["models"] = ["transformer"]
    study.write(params)
    study.commit("A small study")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.chdir(study.root)
    specs = resolve(Path("."))
    for stage, cell in specs:
        run.run(stage, cell, ray=False)
    lock, store = study.root / "dvc.lock", Store(study.root / ".strata")
    attempts = {key: store.newest(key) for key in store.keys()}

    lock.write_text("stages: {broken")
    assert f"{len(specs) + 1} stages recorded" in list(relock(Path(".")))[-1]
    assert "up to date" in study.dvc("status").stdout and not (study.root / "dvc.lock.damaged").exists()
    whole = lock.read_text()

    evaluation = specs["evaluate", "transformer-tiny-1m"].key
    (store.folder(evaluation) / "published").rename(tmp_path / "published")
    lock.unlink()
    lines = list(relock(Path(".")))
    assert len(lines) == 3 and "is not in the store" in lines[0] and "waits for evaluate" in lines[1] and "2 left" in lines[2]
    assert "train@transformer-tiny-1m" in lock.read_text() and "evaluate@" not in lock.read_text()
    (tmp_path / "published").rename(store.folder(evaluation) / "published")
    list(relock(Path(".")))
    assert lock.read_text() == whole
    assert attempts == {key: store.newest(key) for key in store.keys()}, "nothing was made again"
