"""The store: leases with fencing, one winner, shared units, damage named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines import store as stores
from pipelines.store import Busy, Lease, Store
from stages import artifact, units
from stages.spec import LeaseLost

KEY = "ab" * 32


def finish(lease: Lease, text: str = "made") -> None:
    (lease.folder / "data.txt").write_text(text)
    artifact.write(lease.folder, key=KEY, stage="pack", files=["data.txt"], inputs={})


def expire(folder: Path) -> None:
    """Make a heartbeat look old, as a worker elsewhere that has stopped leaves it."""
    heartbeat = folder / "heartbeat"
    heartbeat.write_text(json.dumps({"host": "elsewhere", "pid": 1, "started": 0}))
    old = time.time() - 2 * stores.STALE_SECONDS
    os.utime(heartbeat, (old, old))


def test_an_artifact_is_found_once_it_is_published(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.find(KEY) is None
    lease = store.acquire(KEY, "{}")
    finish(lease)
    assert store.find(KEY) is None
    assert lease.publish()
    lease.release({"status": "succeeded"})
    found = store.find(KEY)
    assert found == lease.folder and (found / "data.txt").read_text() == "made"
    assert not os.access(found / "data.txt", os.W_OK) or os.geteuid() == 0


def test_a_live_attempt_keeps_others_out(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.acquire(KEY, "{}")
    with pytest.raises(Busy, match=str(os.getpid())):
        Store(tmp_path).acquire(KEY, "{}")


def test_a_killed_attempt_is_taken_over_at_once(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from pipelines.store import Store;"
        f"Store(Path(sys.argv[1])).acquire('{KEY}', '{{}}'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parents[2])
    assert Store(tmp_path).acquire(KEY, "{}").number == 2


def test_a_silent_attempt_elsewhere_is_taken_over_and_can_write_no_more(tmp_path: Path) -> None:
    store = Store(tmp_path)
    stopped = store.acquire(KEY, "{}")
    stopped.fence()
    expire(stopped.folder)
    later = store.acquire(KEY, "{}")
    assert later.number == stopped.number + 1
    with pytest.raises(LeaseLost, match=str(later.number)):
        stopped.fence()
    finish(stopped, "stale")
    with pytest.raises(LeaseLost):
        stopped.publish()
    finish(later, "fresh")
    assert later.publish()
    found = store.find(KEY)
    assert found is not None and (found / "data.txt").read_text() == "fresh"


def test_the_first_to_publish_wins(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = store.acquire(KEY, "{}")
    finish(first, "first")
    assert first.publish()
    second = Lease(first.folder.parent / "2", store)
    second.folder.mkdir()
    finish(second, "second")
    assert not second.publish()
    found = store.find(KEY)
    assert found is not None and (found / "data.txt").read_text() == "first"


@pytest.mark.parametrize("damage", ["truncate", "remove", "swap"])
def test_a_damaged_artifact_is_named_and_refused(tmp_path: Path, damage: str) -> None:
    store = Store(tmp_path)
    lease = store.acquire(KEY, "{}")
    finish(lease)
    lease.publish()
    record = lease.folder / artifact.NAME
    record.chmod(0o644)
    if damage == "truncate":
        record.write_text(record.read_text()[:40])
    elif damage == "remove":
        (lease.folder / "data.txt").unlink()
    else:
        record.write_text(record.read_text().replace(KEY, "cd" * 32))
    with pytest.raises(ValueError, match="strata forget"):
        store.find(KEY)
    lease.release({})
    assert store.forget(KEY)
    assert store.find(KEY) is None
    assert store.acquire(KEY, "{}").number == 1


def test_what_is_being_made_is_not_forgotten(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.acquire(KEY, "{}")
    with pytest.raises(Busy):
        store.forget(KEY)
    assert not Store(tmp_path / "other").forget(KEY)


def test_a_heartbeat_shows_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "BEAT_SECONDS", 0.05)
    lease = Store(tmp_path).acquire(KEY, "{}")
    old = time.time() - 1000
    os.utime(lease.folder / "heartbeat", (old, old))
    with lease.beating():
        deadline = time.time() + 5
        while (lease.folder / "heartbeat").stat().st_mtime < old + 500:
            assert time.time() < deadline
            time.sleep(0.02)


def test_units_are_shared_between_artifacts(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    with units.shared(store):
        assert not units.complete(tmp_path / "a" / "unit", KEY)
        with units.making(tmp_path / "a" / "unit", key=KEY, stage="pack", inputs={}) as folder:
            (folder / "rows").write_text("rows")
        assert units.complete(tmp_path / "b" / "unit", KEY)
    assert (tmp_path / "b" / "unit" / "rows").stat().st_ino == (tmp_path / "a" / "unit" / "rows").stat().st_ino


def test_a_damaged_shared_unit_is_not_handed_out(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    with units.shared(store):
        with units.making(tmp_path / "a", key=KEY, stage="pack", inputs={}) as folder:
            (folder / "rows").write_text("rows")
        shared = next((tmp_path / "store" / "units").rglob("rows"))
        shared.unlink()
        assert not units.complete(tmp_path / "b", KEY)
        with units.making(tmp_path / "b", key=KEY, stage="pack", inputs={}) as folder:
            (folder / "rows").write_text("rows")
        assert units.complete(tmp_path / "c", KEY)


def test_what_is_forgotten_takes_its_units_along(tmp_path: Path) -> None:
    store = Store(tmp_path)
    lease = store.acquire(KEY, "{}")
    unit = "cd" * 32
    with units.shared(store), units.making(lease.folder / "shards" / "0", key=unit, stage="pack", inputs={}) as folder:
        (folder / "rows").write_text("rows")
    finish(lease)
    lease.publish()
    lease.release({})
    assert store.forget(KEY)
    assert not store.fetch(unit, tmp_path / "again")


def test_a_failed_unit_leaves_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    with units.shared(store), pytest.raises(RuntimeError):
        with units.making(tmp_path / "unit", key=KEY, stage="pack", inputs={}) as folder:
            (folder / "rows").write_text("rows")
            raise RuntimeError
    assert not (tmp_path / "unit").exists() and not list(tmp_path.glob(".partial*")) and not (tmp_path / "store").exists()


def test_a_record_with_any_bit_flipped_never_breaks_the_store(tmp_path: Path) -> None:
    """The pointer: refused, named, with the remedy. The heartbeat: whoever comes waits or takes over."""
    store = Store(tmp_path)
    lease = store.acquire(KEY, "{}")
    heartbeat = lease.folder / "heartbeat"
    whole = heartbeat.read_bytes()
    for bit in range(8 * len(whole)):
        heartbeat.write_bytes(flip(whole, bit))
        store.alive(KEY)
    finish(lease)
    lease.publish()
    lease.release({"status": "succeeded"})
    pointer = store.folder(KEY) / "published"
    whole = pointer.read_bytes()
    for damaged in [b"", *(flip(whole, bit) for bit in range(8 * len(whole)))]:
        pointer.unlink()
        pointer.write_bytes(damaged)
        with pytest.raises(ValueError, match="strata forget"):
            store.find(KEY)


def flip(data: bytes, bit: int) -> bytes:
    made = bytearray(data)
    made[bit // 8] ^= 1 << bit % 8
    return bytes(made)
