"""Secrets stay in the environment, and paths from params and specs stay in their folders."""

from __future__ import annotations

import copy
import functools
import json
import os
import sys
import types
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pipelines import files, secrets, status, work, workspace
from pipelines.reading import parse, read
from pipelines.store import Store
from pipelines.work import Request, execute
from stages import artifact, provenance, rows
from stages.sources import expand, fetched
from stages.spec import Context, Spec

ROOT = Path(__file__).parents[2]
TOKEN = "tok-4f9Qx81ZpLw0"
ABROAD = ["../outside", "/tmp/outside", "a/../../outside", "..", "a/b", "a\\b", "."]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUDY_SERVICE_TOKEN", TOKEN)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    monkeypatch.setenv("DATABASE", "postgres://me:Pa55word!x@host/db")


@functools.cache
def nano_study() -> dict[str, Any]:
    return read(ROOT / "pipelines" / "nano")


@pytest.fixture
def nano() -> dict[str, Any]:
    return copy.deepcopy(nano_study())


def test_what_counts_as_a_secret() -> None:
    found = secrets.known(
        {
            "HF_TOKEN": "hf-abc123XYZ", "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG", "MY_PASSWORD": "correct horse 1", "A": "redis://:s3cretpass@h/0",
            "RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN_PATH": "/home/me/token", "TOKENIZERS_PARALLELISM": "false-but-long-1", "HOME": "/home/me-12345",
            "PIN_TOKEN": "1234", "MAX_TOKENS": "100000000",
        }
    )  # fmt: skip
    assert sorted(found.values()) == ["A", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "MY_PASSWORD"]


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("tracking", f"http://server/?key={TOKEN}", ["tracking", "STUDY_SERVICE_TOKEN"]),
        ("tracking", "http://me:hunter22@server", ["tracking", "password"]),
        ("study", "AKIAIOSFODNN7EXAMPLE", ["study", "secret"]),
        ("files", "hf://datasets/a/b?token=hf_" + "a1" * 17, ["files[0]", "secret"]),
        ("files", "s3://bucket/" + TOKEN, ["files[0]", "STUDY_SERVICE_TOKEN"]),
    ],
)
def test_a_secret_in_params_is_refused_and_not_repeated(nano: dict[str, Any], place: str, value: str, words: list[str]) -> None:
    if place == "files":
        next(iter(nano["data"]["sources"].values()))["files"] = [value]
    else:
        nano[place] = value
    with pytest.raises(ValueError) as refused:
        parse(nano)
    assert [word for word in words if word not in str(refused.value)] == [], str(refused.value)
    assert TOKEN not in str(refused.value) and "hunter22" not in str(refused.value) and "AKIA" not in str(refused.value)


def test_the_shipped_studies_hold_none() -> None:
    for folder in (ROOT, *(path.parent for path in (ROOT / "pipelines").glob("*/params.yaml"))):
        secrets.refuse(read(folder))


def test_what_a_file_says_of_a_secret_is_covered_in_place(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_bytes(b"before " + TOKEN.encode() + b" \xff after\n" + b"x" * secrets.BLOCK + TOKEN.encode() + b"end")
    size = path.stat().st_size
    with path.open("ab") as appended:
        secrets.cover(path)
        appended.write(b" more")
    text = path.read_bytes()
    assert (
        TOKEN.encode() not in text
        and len(text) == size + 5
        and text.startswith(b"before ****")
        and b"\xff after" in text
        and text.endswith(b"end more")
    )
    straddling = tmp_path / "straddling"
    straddling.write_bytes(b"y" * (secrets.BLOCK - 5) + TOKEN.encode() + b"z" * 10)
    secrets.cover(straddling)
    assert TOKEN.encode() not in straddling.read_bytes()


@pytest.mark.parametrize("ends", ["well", "by a mistake", "by an error"])
def test_a_run_leaves_no_secret_behind(ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that prints its environment, records it, and fails with it."""

    def run(spec: Spec, out: Path, inputs: dict[str, Path], context: Context) -> None:
        (out / work.LOG).write_text(f"connecting with {TOKEN} to {os.environ['DATABASE']}\n")
        (out / "data.txt").write_text("data")
        provenance.write(out, spec, context, started=0.0, command=f"tool --token {TOKEN}")
        if ends == "by a mistake":
            raise ValueError(f"{TOKEN} was refused.")
        if ends == "by an error":
            raise RuntimeError(f"{TOKEN} was refused at {os.environ['DATABASE']}")
        artifact.write(out, key=spec.key, stage="probe", files=["data.txt"], inputs={})

    probe = types.ModuleType("stages.probe")
    probe.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "stages.probe", probe)
    spec = {"stage": "probe", "versions": {"probe": 1}, "inputs": {}, "parameters": {}}
    outcome = execute(Request("probe", "probe", spec, {}, str(tmp_path / "store"), "study"))
    assert outcome.done == (ends == "well") and TOKEN not in str(outcome.error) and "Pa55word!x" not in str(outcome.error)
    texts = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(texts) >= 4 and not [path for path, text in texts.items() if TOKEN.encode() in text or b"Pa55word!x" in text]
    assert [path for path, text in texts.items() if b"connecting with ****" in text]


def test_logs_cover_what_a_killed_worker_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    lease = store.acquire("ab" * 32, "{}")
    (lease.folder / work.LOG).write_text(f"connecting with {TOKEN}")
    monkeypatch.setattr(status, "_stages", lambda folder, cell: ([("train", "ab" * 32)], store))
    assert TOKEN not in status.logs(tmp_path, "cell") and "connecting with ****" in status.logs(tmp_path, "cell")


# Paths


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "a/b"])
@pytest.mark.parametrize("table", ["models", "scales", "budgets", "data.sources", "tasks", "evaluation.settings", "study"])
def test_names_that_lead_elsewhere_are_refused(nano: dict[str, Any], table: str, name: str) -> None:
    if table == "study":
        nano["study"] = name
    else:
        place = nano
        for part in table.split("."):
            place = place[part]
        place[name] = copy.deepcopy(next(iter(place.values())))
    with pytest.raises(ValueError, match="params.yaml"):
        parse(nano)


def test_a_root_that_is_not_above_the_study_is_refused(tmp_path: Path) -> None:
    from pipelines.run import root_of

    (tmp_path / "study").mkdir()
    assert root_of({"root": ".."}, tmp_path / "study") == tmp_path.resolve()
    for root in ("/etc", "../other", "inside"):
        with pytest.raises(ValueError, match="root"):
            root_of({"root": root}, tmp_path / "study")


@pytest.mark.parametrize("name", [name for name in ABROAD if name != "a/b"])
def test_names_in_records_are_held_to_their_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="leads elsewhere"):
        artifact.inside(tmp_path, name)
    with pytest.raises(ValueError, match="leads elsewhere"):
        Spec(stage="evaluate", versions={}, inputs={f"evaluation/{name}" if not name.startswith("/") else name: "key"}, parameters={})
    (tmp_path / "inner").mkdir()
    (tmp_path / "outside").write_text("secret")
    record = artifact.write(tmp_path / "inner", key="k", stage="pack", files=[], inputs={})
    files_of = {name: {"size": 6, "digest": "sha256:0"}}
    record |= {"files": files_of, "digest": artifact.fingerprint({name: "sha256:0"})}
    (tmp_path / "inner" / artifact.NAME).write_text(json.dumps(record))
    with pytest.raises(ValueError, match="leads elsewhere"):
        artifact.read(tmp_path / "inner")
    budget = tmp_path / "budgets" / "b.json"
    budget.parent.mkdir()
    budget.write_text(json.dumps({"shards": [[name, "sha256:0", 1]], "sequence_length": 4, "rows": 1}))
    with pytest.raises(ValueError):
        rows.Rows(budget)


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside-unit"])
def test_units_of_a_strange_spec_stay_inside(tmp_path: Path, name: str) -> None:
    from stages import items

    spec = Spec(stage="items", versions={"items": 1}, parameters={"tasks": {name: {"schema": "choice", "files": {"files": ["x.jsonl"]}}}})
    with pytest.raises(ValueError):
        items.run(spec, tmp_path / "out", {}, Context(settings={"sources": {name: ["x.jsonl"]}}))
    assert not (tmp_path / "outside").exists() and not Path("/tmp/outside-unit").exists()


def test_a_symbolic_link_is_no_file_of_an_artifact(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "data.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match="symbolic link"):
        files.link_tree(tmp_path / "made", tmp_path / "placed")
    assert not (tmp_path / "placed" / "data.txt").exists()


def test_what_an_archive_calls_its_members_writes_nowhere(tmp_path: Path) -> None:
    """Members are read, never unpacked: neither "..", an absolute name nor a link leads out of the scratch folder."""
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("../outside.jsonl", '{"text": "one"}\n')
        archive.writestr("/tmp/outside-member.jsonl", '{"text": "two"}\n')
        link = zipfile.ZipInfo("link.jsonl")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    before = set(tmp_path.rglob("*"))
    for file in expand([f"zip://**/*.jsonl::{tmp_path / 'all.zip'}"]):
        with suppress(ValueError), fetched(file, scratch) as path:  # fsspec does not find an absolute name again
            assert path.parent == scratch and not path.is_symlink() and b"root:" not in path.read_bytes()
    assert set(tmp_path.rglob("*")) == before and not Path("/tmp/outside-member.jsonl").exists()


def test_outputs_are_inside_the_study() -> None:
    for stage in workspace.STAGES:
        place = workspace.output(stage, "mesa-tiny-1m", "training")
        assert not place.is_absolute() and ".." not in place.parts
