"""What only this machine has is put where workers elsewhere see it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines import objects, sharing, workspace
from pipelines.objects import Bucket
from pipelines.opening import open_store
from pipelines.work import Request
from stages import artifact, sources, units
from stages.spec import Spec

UNIT = "ef" * 32


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Spec, dict[str, Any]]:
    """A study's folder with packed rows, as `dvc pull` leaves it."""
    folder = tmp_path / "study"
    spec = Spec(stage="pack", versions={"pack": 1}, parameters={})
    place = folder / "packed"
    with units.making(place / "shards" / "00000", key=UNIT, stage="pack", inputs={}) as unit:
        (unit / "rows").write_text("rows")
    (place / "budgets").mkdir()
    (place / "budgets" / "b.json").write_text("{}")
    artifact.write(place, key=spec.key, stage="pack", files=["budgets/b.json"], inputs={})
    for name, text in {"specs/pack/pack.json": spec.model_dump_json(), "provenance/pack/pack.json": "{}"}.items():
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    return folder, spec, {"roles": {}}


def request(store: str, **more: Any) -> Request:
    return Request("train", "cell", {"stage": "train", "versions": {}, "parameters": {}}, {}, store, "study", **more)


def test_a_studys_own_artifact_is_put_in_a_store_that_lacks_it(
    where: str, study: tuple[Path, Spec, dict[str, Any]], tmp_path: Path
) -> None:
    folder, spec, context = study
    said: list[str] = []
    wanted = request(where, makers={"budget": (spec.key, "budgets/b.json")})
    sharing.shared(wanted, context, open_store(where), say=said.append)
    found = open_store(where).find(spec.key)
    assert found is not None and (found / "shards" / "00000" / "rows").read_text() == "rows" and (found / "provenance.json").is_file()
    assert open_store(where).fetch(UNIT, tmp_path / "unit") and len(said) == 1
    sharing.shared(wanted, context, open_store(where), say=said.append)
    assert len(said) == 1
    assert Path(wanted.located(open_store(where), data=False).inputs["budget"]).read_text() == "{}"


@pytest.mark.parametrize("lack", ["rows", "provenance", "key"])
def test_what_is_not_whole_is_not_shared(where: str, study: tuple[Path, Spec, dict[str, Any]], lack: str) -> None:
    folder, spec, context = study
    match lack:
        case "rows":
            (folder / "packed" / "shards" / "00000" / "rows").unlink()
        case "provenance":
            (folder / "provenance" / "pack" / "pack.json").unlink()
        case "key":
            record = json.loads((folder / "packed" / artifact.NAME).read_text())
            (folder / "packed" / artifact.NAME).write_text(json.dumps(record | {"key": "00" * 32}))
    assert sharing.adopt(spec.key, context, open_store(where)) is None and open_store(where).keys() == []


def test_data_files_go_up_once_and_keep_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_CACHE", str(tmp_path / "cache"))
    where = f"memory://{tmp_path.name}/store"
    for name, text in {"b/part.jsonl": "second", "a/part.jsonl": "first", "other.jsonl": "third"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    sent: list[str] = []
    upload = Bucket.upload
    monkeypatch.setattr(Bucket, "upload", lambda self, file, name: (sent.append(name), upload(self, file, name)))
    given = [str(tmp_path / "*" / "part.jsonl"), str(tmp_path / "other.jsonl"), "memory://elsewhere/x.jsonl"]
    store = open_store(where)
    for _ in range(2):
        moved = sharing.shared(request(where, settings={"sources": given}), {}, store)
        files = moved.settings["sources"]
        assert len(files) == 4 and all("://" in file for file in files) and files[0] == "memory://elsewhere/x.jsonl"
        assert sources.pin(files[1:]) == sources.pin(given[:2])
    assert len(sent) == 3
    assert sharing.reads_here(request(where, settings={"sources": {"a": given}}), store)
    assert not sharing.reads_here(moved, store) and not sharing.reads_here(request(where), store)
    assert objects.at(where).list("sources")


def test_a_folder_for_a_store_leaves_data_where_they_are(tmp_path: Path) -> None:
    wanted = request(str(tmp_path), settings={"sources": [str(tmp_path / "x.jsonl")]})
    assert sharing.shared(wanted, {}, open_store(tmp_path)) == wanted
    assert workspace.BULK == ("tokenize", "pack", "train")
