"""Artifacts and units: complete or not there, what they say true, nothing in them of where or when."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages import artifact, schemas, units
from stages.spec import Spec, canonical, fingerprint

KEY = "k" * 64


def make(folder: Path, text: str = "some text") -> dict:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.txt").write_text(text)
    (folder / "facts.json").write_text('{"x": 1}')
    schemas.write(folder / "t.parquet", pa.table({"x": [1, 2, 3]}), name=schemas.FREE, key=KEY)
    return artifact.write(folder, key=KEY, stage="made-up", files=["a.txt", "t.parquet", "facts.json"], inputs={"from": "d"})


def test_what_is_written_is_read_and_is_the_same_anywhere(tmp_path):
    one, other = make(tmp_path / "one"), make(tmp_path / "deep" / "other")
    assert one == other == artifact.read(tmp_path / "one", key=KEY, content=True)
    assert (tmp_path / "one" / artifact.NAME).read_bytes() == (tmp_path / "deep" / "other" / artifact.NAME).read_bytes()
    assert make(tmp_path / "third", "other text")["digest"] != one["digest"]
    assert one["inputs"] == {"from": "d"} and one["files"]["t.parquet"]["digest"].startswith("data:")


def test_the_digest_is_of_the_data_not_of_the_bytes(tmp_path):
    import pyarrow.parquet as pq

    make(tmp_path)
    before = artifact.file_digest(tmp_path / "t.parquet")
    pq.write_table(pq.read_table(tmp_path / "t.parquet"), tmp_path / "t.parquet", compression="gzip")
    assert artifact.file_digest(tmp_path / "t.parquet") == before


@pytest.mark.parametrize("damage, message", [
    (lambda folder: (folder / "artifact.json").unlink(), "never completed"),
    (lambda folder: (folder / "artifact.json").write_bytes((folder / "artifact.json").read_bytes()[:-30]), "is damaged"),
    (lambda folder: (folder / "artifact.json").write_text("[]"), "is damaged"),
    (lambda folder: (folder / "artifact.json").write_text((folder / "artifact.json").read_text().replace("sha256:", "sha256:0")), "agree with itself"),
    (lambda folder: (folder / "artifact.json").write_text((folder / "artifact.json").read_text().replace('"from": "d"', '"from": "e"')), "another record's"),
    (lambda folder: (folder / "a.txt").unlink(), "found nothing"),
    (lambda folder: (folder / "a.txt").write_text("some"), "should have 9 bytes, found 4"),
    (lambda folder: (folder / "t.parquet").write_bytes(b"PAR1"), "should have"),
    (lambda folder: (folder / "facts.json").write_text('{"x": 2}'), "does not hold the data"),
])  # fmt: skip
def test_what_is_torn_is_refused_and_named(tmp_path, damage, message):
    make(tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        artifact.read(tmp_path)
    assert str(tmp_path) in str(error.value) and "run again" in str(error.value)
    assert not units.complete(tmp_path, KEY)


def test_content_of_the_same_size_is_seen_when_asked_for(tmp_path):
    make(tmp_path)
    (tmp_path / "a.txt").write_text("some tEXt")
    artifact.read(tmp_path)
    with pytest.raises(ValueError, match="does not hold the data that was recorded"):
        artifact.read(tmp_path, content=True)


def test_another_key_is_refused(tmp_path):
    make(tmp_path)
    with pytest.raises(ValueError, match="other parameters"):
        artifact.read(tmp_path, key="z" * 64)
    assert units.complete(tmp_path, KEY) and not units.complete(tmp_path, "z" * 64)


def test_an_atomic_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    artifact.write_atomically(path, "old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError):
        artifact.write_atomically(path, "new")
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_a_unit_is_whole_or_not_there(tmp_path):
    unit = tmp_path / "00000"
    with pytest.raises(RuntimeError), units.making(unit, key=KEY, stage="s", inputs={}) as folder:
        (folder / "a.txt").write_text("half")
        raise RuntimeError("killed")
    assert list(tmp_path.iterdir()) == []
    with units.making(unit, key=KEY, stage="s", inputs={"from": "d"}) as folder:
        assert list(folder.iterdir()) == []
        (folder / "sub").mkdir()
        (folder / "sub" / "a.txt").write_text("whole")
    assert units.complete(unit, KEY) and set(artifact.read(unit)["files"]) == {"sub/a.txt"}
    with pytest.raises(RuntimeError), units.making(unit, key="z" * 64, stage="s", inputs={}):
        raise RuntimeError("killed")
    assert units.complete(unit, KEY)


def test_a_unit_killed_at_its_making_is_made_again(tmp_path):
    code = f"""
import os, signal
from pathlib import Path
from stages import units
with units.making(Path({str(tmp_path / "u")!r}), key={KEY!r}, stage="s", inputs={{}}) as folder:
    (folder / "a.txt").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == -signal.SIGKILL
    assert not units.complete(tmp_path / "u", KEY)
    assert [path.name for path in tmp_path.iterdir()] == [".partial-u"]
    with units.making(tmp_path / "u", key=KEY, stage="s", inputs={}) as folder:
        (folder / "b.txt").write_text("whole")
    assert units.complete(tmp_path / "u", KEY) and set(artifact.read(tmp_path / "u")["files"]) == {"b.txt"}


def test_only_the_named_units_are_kept(tmp_path):
    for name in ("a", "b"):
        make(tmp_path / name)
    (tmp_path / ".partial-c").mkdir()
    (tmp_path / "notes").mkdir()
    units.keep_only(tmp_path, {"a"})
    assert {path.name for path in tmp_path.iterdir()} == {"a", "notes"}
    units.keep_only(tmp_path / "nothing", set())


def test_units_come_from_a_shelf_and_go_to_it(tmp_path):
    class Shelf:
        kept: list[str] = []

        def fetch(self, key, folder):
            if key != KEY:
                return False
            make(folder)
            return True

        def keep(self, key, folder):
            self.kept.append(key)

    with units.shared(Shelf()):
        assert units.complete(tmp_path / "a", KEY) and not units.complete(tmp_path / "b", "z" * 64)
        with units.making(tmp_path / "b", key="z" * 64, stage="s", inputs={}):
            pass
    assert Shelf.kept == ["z" * 64] and not units.complete(tmp_path / "c", KEY)


values = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(st.characters(exclude_categories=["Cs"])),
                      lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3), max_leaves=8)  # fmt: skip


@given(values)
def test_canonical_text_says_everything_and_nothing_of_the_order(value):
    def turned(value):
        if isinstance(value, dict):
            return {key: turned(value[key]) for key in reversed(value)}
        return [turned(one) for one in value] if isinstance(value, list) else value

    assert json.loads(canonical(value)) == value
    assert fingerprint(value) == fingerprint(turned(value)) == fingerprint(json.loads(json.dumps(value)))


def test_a_specs_key_is_of_its_content_alone(tmp_path):
    spec = Spec(stage="s", versions={"s": 1}, inputs={"b": "2", "a": "1"}, parameters={"x": 1.0})
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(spec.model_dump(), indent=4))
    assert Spec.load(path).key == spec.key
    assert Spec(**spec.model_dump() | {"parameters": {"x": 2.0}}).key != spec.key
    assert spec.unit_key(part=1) != spec.unit_key(part=2) != spec.key
    for text in ("", "{}", '{"stage": "s"}', json.dumps(spec.model_dump() | {"more": 1})):
        path.write_text(text)
        with pytest.raises(ValueError, match="spec.json is not a readable spec"):
            Spec.load(path)
