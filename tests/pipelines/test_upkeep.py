"""fetch, verify and gc, of a store in a folder and in buckets."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from pipelines import objects, remote, upkeep
from pipelines.objects import Bucket
from pipelines.opening import open_store
from pipelines.store import Store
from stages import artifact, units

KEY, OTHER, UNIT = "ab" * 32, "cd" * 32, "ef" * 32
LATER = 10 * 86400.0


def publish(store: Store, key: str, text: str, *, unit: bool = False) -> None:
    lease = store.acquire(key, json.dumps({"stage": "pack"}))
    if unit:
        with units.shared(store), units.making(lease.folder / "shards" / "0", key=UNIT, stage="pack", inputs={}) as folder:
            (folder / "rows").write_text("rows")
    (lease.folder / "data.txt").write_text(text)
    artifact.write(lease.folder, key=key, stage="pack", files=["data.txt"], inputs={})
    assert lease.publish()
    lease.release({"status": "succeeded"})
    store.tidy(key, lease.number)


def later(monkeypatch: pytest.MonkeyPatch, seconds: float = LATER) -> None:
    """The store's clock is `seconds` ahead."""
    here = Store._now
    there = Bucket.now
    monkeypatch.setattr(Store, "_now", lambda self: here(self) + seconds)
    monkeypatch.setattr(Bucket, "now", lambda self: there(self) + seconds)


def blobs(url: str) -> list[str]:
    return sorted(objects.at(url).list("blobs"))


def test_what_is_whole_is_verified(where: str) -> None:
    publish(open_store(where), KEY, "made", unit=True)
    publish(open_store(where), OTHER, "other")
    for content in (True, False):
        found = list(upkeep.verify(open_store(where), [KEY, OTHER], content=content))
        assert [(one.key, one.problem) for one in found] == [(KEY, None), (OTHER, None)] and all(one.size > 0 for one in found)


@pytest.mark.parametrize("damage", ["changed", "shorter", "lost"])
def test_damage_is_named(where: str, damage: str) -> None:
    store = open_store(where)
    publish(store, KEY, "made")
    publish(store, OTHER, "whole")
    if objects.is_url(where):
        place = objects.at(where)
        name = next(name for name, entry in place.list("blobs").items() if entry.size == 4)
    else:
        place = objects.Folder(Path(where))
        name = f"artifacts/ab/{KEY}/attempts/1/data.txt"
        (Path(where) / name).chmod(0o644)
    place.remove([name]) if damage == "lost" else place.write(name, b"evil" if damage == "changed" else b"mad")
    problems = {one.key: one.problem for one in upkeep.verify(open_store(where), [KEY, OTHER])}
    assert problems[OTHER] is None and "data.txt" in str(problems[KEY])
    quick = {one.key: one.problem for one in upkeep.verify(open_store(where), [KEY], content=False)}
    assert (quick[KEY] is None) == (damage == "changed")
    assert upkeep.show_verified(open_store(where), [KEY, OTHER], content=True) == 1


def test_a_collection_takes_nothing_that_is_used(where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    publish(open_store(where), KEY, "made", unit=True)
    later(monkeypatch)
    assert upkeep.gc(open_store(where), dry_run=False) == []
    assert not [one for one in upkeep.verify(open_store(where), [KEY]) if one.problem]
    assert open_store(where).fetch(UNIT, tmp_path / "unit")


def test_unwanted_artifacts_go_when_they_are_old(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(open_store(where), KEY, "made")
    publish(open_store(where), OTHER, "other")
    assert upkeep.gc(open_store(where), dry_run=False, unwanted={OTHER}, older=1) == []
    later(monkeypatch)
    told = upkeep.gc(open_store(where), dry_run=True, unwanted={OTHER}, older=1)
    assert [item.what for item in told if OTHER[:12] in item.what] and open_store(where).keys() == [KEY, OTHER]
    upkeep.gc(open_store(where), dry_run=False, unwanted={OTHER}, older=1)
    assert open_store(where).keys() == [KEY]
    assert not [one for one in upkeep.verify(open_store(where), [KEY]) if one.problem]


def test_what_killed_processes_left_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    publish(store, KEY, "made")
    (tmp_path / "units" / "ef" / ".partial-x").mkdir(parents=True)
    (tmp_path / "units" / "ef" / ".partial-x" / "rows").write_text("half")
    (store.folder(KEY) / "attempts" / "2").mkdir()
    assert upkeep.gc(store, dry_run=False) == [], "young: somebody may be at it"
    later(monkeypatch)
    told = upkeep.gc(store, dry_run=True)
    assert len(told) == 2 and sum(item.size for item in told) == 4 and (tmp_path / "units" / "ef" / ".partial-x").exists()
    assert upkeep.gc(store, dry_run=False) == told and upkeep.gc(store, dry_run=False) == []
    assert store.find(KEY) is not None


# Blobs


def test_blobs_that_nothing_names_go_when_they_are_old(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(open_store(bucket), KEY, "made")
    publish(open_store(bucket), OTHER, "other")
    before = blobs(bucket)
    assert open_store(bucket).forget(OTHER)
    assert upkeep.gc(open_store(bucket), dry_run=False) == [] and blobs(bucket) == before, "young blobs stay"
    later(monkeypatch)
    assert upkeep.gc(open_store(bucket), dry_run=True) and blobs(bucket) == before
    (swept,) = upkeep.gc(open_store(bucket), dry_run=False)
    assert swept.what.startswith("2 objects") and len(blobs(bucket)) == len(before) - 2
    assert not [one for one in upkeep.verify(open_store(bucket), [KEY]) if one.problem]


def test_a_collection_during_a_publication_loses_nothing(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes were there, old and named by nothing; a collection takes them between the look and the manifest."""
    publish(open_store(bucket), OTHER, "the same")
    open_store(bucket).forget(OTHER)
    store = open_store(bucket)
    lease = store.acquire(KEY, "{}")
    (lease.folder / "data.txt").write_text("the same")
    artifact.write(lease.folder, key=KEY, stage="pack", files=["data.txt"], inputs={})
    put, collected = remote.RemoteStore._put_blob, []

    def then_collected(self: remote.RemoteStore, path: Path, file: dict) -> None:
        put(self, path, file)
        if path.name == "data.txt" and not collected:
            with monkeypatch.context() as patched:
                later(patched)
                collected.extend(upkeep.gc(open_store(bucket), dry_run=False))

    monkeypatch.setattr(remote.RemoteStore, "_put_blob", then_collected)
    assert lease.publish() and collected
    lease.release({"status": "succeeded"})
    (one,) = upkeep.verify(open_store(bucket), [KEY])
    assert one.problem is None


def test_two_collections_at_once_are_one(bucket: str) -> None:
    publish(open_store(bucket), KEY, "made")
    objects.at(bucket).write("gc", b'{"epoch": 3, "running": true}')
    with pytest.raises(ValueError, match="Another collection"):
        upkeep.gc(open_store(bucket), dry_run=False)


def test_a_collection_that_died_holds_nobody_up(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    objects.at(bucket).write("gc", b'{"epoch": 3, "running": true}')
    later(monkeypatch)
    publish(open_store(bucket), KEY, "made")
    assert upkeep.gc(open_store(bucket), dry_run=False) == []
    assert json.loads(objects.at(bucket).read("gc") or b"")["running"] is False


def test_the_cache_goes_unless_something_is_made_here(bucket: str) -> None:
    store = open_store(bucket)
    publish(store, KEY, "made")
    lease = store.acquire(OTHER, "{}")
    with pytest.raises(ValueError, match="in use"):
        upkeep.clear_cache(open_store(bucket), dry_run=False)
    lease.release({"status": "failed"})
    assert upkeep.clear_cache(open_store(bucket), dry_run=True) and store.root.exists()
    upkeep.clear_cache(open_store(bucket), dry_run=False)
    assert not store.root.exists() and open_store(bucket).find(KEY) is not None


def test_a_large_file_passes_in_blocks(bucket: str, tmp_path: Path) -> None:
    """What is verified is never in memory whole."""
    file = tmp_path / "large"
    file.write_bytes(os.urandom(5 << 20))
    place = objects.bucket(bucket)
    place.upload(file, "blobs/large")
    sizes = [len(block) for block in place.blocks("blobs/large", 1 << 20)]
    assert max(sizes) <= 1 << 20 and sum(sizes) == 5 << 20


def test_names_are_of_the_study(tmp_path: Path) -> None:
    from stages.spec import Spec

    study = {
        ("train", "mesa-tiny-1m"): Spec(stage="train", versions={}, parameters={}),
        ("pack", "pack"): Spec(stage="pack", versions={}, parameters={}),
    }
    assert upkeep.chosen(study, ["mesa-tiny-1m", "pack", "train"]) == [("train", "mesa-tiny-1m"), ("pack", "pack")]
    with pytest.raises(ValueError, match="mesa-tiny-1m"):
        upkeep.chosen(study, ["mesa-tiny-2m"])


def test_time_is_the_stores_own(bucket: str) -> None:
    assert abs(open_store(bucket)._now() - time.time()) < 5  # type: ignore[attr-defined]
