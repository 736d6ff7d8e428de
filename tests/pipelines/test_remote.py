"""One store, three places: what holds in a folder holds in a bucket, in memory and on an S3 server; and what only a bucket has."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from pipelines import objects, remote
from pipelines.objects import Bucket
from pipelines.opening import open_store
from pipelines.remote import RemoteLease, RemoteStore
from pipelines.store import Busy, Lease, Store
from stages import artifact, units
from stages.spec import LeaseLost

KEY, OTHER = "ab" * 32, "cd" * 32


def finish(lease: Lease, text: str = "made", key: str = KEY) -> None:
    (lease.folder / "data.txt").write_text(text)
    artifact.write(lease.folder, key=key, stage="pack", files=["data.txt"], inputs={})


def publish(store: Store, text: str = "made", key: str = KEY) -> Lease:
    lease = store.acquire(key, '{"the": "spec"}')
    finish(lease, text, key)
    assert lease.publish()
    lease.release({"status": "succeeded"})
    store.tidy(key, lease.number)
    return lease


def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """From here on this is another machine: a cache and a host of its own."""
    monkeypatch.setenv("STRATA_CACHE", str(tmp_path / f"cache-{name}"))
    monkeypatch.setattr("socket.gethostname", lambda: name)


def text_of(store: Store, key: str = KEY) -> str:
    found = store.find(key)
    assert found is not None
    return (found / "data.txt").read_text()


# One interface


def test_an_artifact_is_found_once_it_is_published(where: str) -> None:
    store = open_store(where)
    assert store.find(KEY) is None and not store.published(KEY) and store.keys() == []
    lease = store.acquire(KEY, '{"the": "spec"}')
    finish(lease)
    assert store.find(KEY) is None
    assert lease.publish()
    lease.release({"status": "succeeded"})
    assert store.published(KEY) and store.keys() == [KEY] and text_of(store) == "made"
    assert store.spec(KEY) == '{"the": "spec"}'
    store.tidy(KEY, lease.number)
    assert text_of(open_store(where)) == "made" and open_store(where).alive(KEY) is None


def test_a_live_attempt_keeps_others_out(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = open_store(where).acquire(KEY, "{}")
    with pytest.raises(Busy):
        open_store(where).acquire(KEY, "{}")
    elsewhere(monkeypatch, tmp_path, "another")
    with pytest.raises(Busy, match="is making it"):
        open_store(where).acquire(KEY, "{}")
    with pytest.raises(Busy):
        open_store(where).forget(KEY)
    attempt = open_store(where).alive(KEY)
    assert attempt is not None and int(attempt.name) == lease.number


def test_one_of_many_at_once_gets_the_lease(where: str) -> None:
    won: list[Lease] = []

    def attempt() -> None:
        try:
            won.append(open_store(where).acquire(KEY, "{}"))
        except Busy:
            pass

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1


def test_a_silent_attempt_elsewhere_is_taken_over_and_can_publish_no_more(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = open_store(where).acquire(KEY, "{}")
    stopped.fence()
    elsewhere(monkeypatch, tmp_path, "another")
    monkeypatch.setattr(remote, "STALE_SECONDS", -10.0)
    monkeypatch.setattr("pipelines.store.STALE_SECONDS", -10.0)
    later = open_store(where).acquire(KEY, "{}")
    assert later.number == stopped.number + 1
    with pytest.raises(LeaseLost, match=str(later.number)):
        stopped.fence()
    finish(stopped, "stale")
    with pytest.raises(LeaseLost):
        stopped.publish()
    finish(later, "fresh")
    assert later.publish() and text_of(open_store(where)) == "fresh"


def test_the_first_to_publish_wins(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(where)
    first = store.acquire(KEY, "{}")
    finish(first, "first")
    monkeypatch.setattr(Lease, "fence", lambda self: None)  # both were at it when the later one began
    monkeypatch.setattr(RemoteLease, "fence", lambda self: None)
    first.release({"status": "lost"})
    second = open_store(where).acquire(KEY, "{}")
    finish(second, "second")
    assert first.publish() and not second.publish()
    assert text_of(store) == "first"


def test_a_number_given_again_after_forgetting_is_no_lease(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    zombie = open_store(where).acquire(KEY, "{}")
    with monkeypatch.context() as patched:
        patched.setattr(remote, "STALE_SECONDS", -10.0)
        patched.setattr("pipelines.store.STALE_SECONDS", -10.0)
        assert open_store(where).forget(KEY)
    again = open_store(where).acquire(KEY, "{}")
    assert again.number == zombie.number == 1
    with pytest.raises(LeaseLost):
        zombie.fence()
    again.fence()


def test_what_is_forgotten_is_gone_with_its_units(where: str, tmp_path: Path) -> None:
    store = open_store(where)
    lease = store.acquire(KEY, "{}")
    with units.shared(store), units.making(lease.folder / "shards" / "0", key=OTHER, stage="pack", inputs={}) as folder:
        (folder / "rows").write_text("rows")
    assert open_store(where).fetch(OTHER, tmp_path / "elsewhere") and (tmp_path / "elsewhere" / "rows").read_text() == "rows"
    finish(lease)
    lease.publish()
    lease.release({"status": "succeeded"})
    assert open_store(where).forget(KEY)
    again = open_store(where)
    assert again.find(KEY) is None and not again.fetch(OTHER, tmp_path / "again") and again.keys() == []
    assert not again.forget(KEY) and again.acquire(KEY, "{}").number == 1


def test_units_are_shared(where: str, tmp_path: Path) -> None:
    with units.shared(open_store(where)):
        assert not units.complete(tmp_path / "a" / "unit", KEY)
        with units.making(tmp_path / "a" / "unit", key=KEY, stage="pack", inputs={}) as folder:
            (folder / "rows").write_text("rows")
    with units.shared(open_store(where)):
        assert units.complete(tmp_path / "b" / "unit", KEY)
    assert (tmp_path / "b" / "unit" / "rows").read_text() == "rows"


def test_an_attempt_is_asked_to_stop_and_shows_its_progress(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "BEAT_SECONDS", 0.05)
    lease = open_store(where).acquire(KEY, "{}")
    assert not open_store(where).ask_to_stop(OTHER)
    with lease.beating():
        (lease.folder / "progress.jsonl").write_text('{"step": 1, "of": 2}\n')
        assert not lease.stop_requested()
        elsewhere(monkeypatch, tmp_path, "desk")
        desk = open_store(where)
        assert desk.ask_to_stop(KEY)
        _until(lease.stop_requested)
        _until(lambda: (desk.attempts(KEY)[0] / "progress.jsonl").exists())
        with (lease.folder / "progress.jsonl").open("a") as file:
            file.write('{"step": 2, "of": 2}\n')
        _until(lambda: (desk.attempts(KEY)[0] / "progress.jsonl").read_text().count("\n") == 2)
    lease.release({"status": "stopped"})
    assert json.loads((desk.attempts(KEY)[0] / "outcome.json").read_text()) == {"status": "stopped"} and desk.alive(KEY) is None


def test_a_later_attempt_on_another_machine_finds_what_was_saved(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = open_store(where).acquire(KEY, "{}")
    (lease.folder / "checkpoints").mkdir()
    with lease.beating():
        for step in (1, 2, 3):
            (lease.folder / "checkpoints" / f"{step:08d}.safetensors").write_text(f"state {step}")
            (lease.folder / "checkpoints" / f"{step - 2:08d}.safetensors").unlink(missing_ok=True)
            with (lease.folder / "history.jsonl").open("a") as file:
                file.write(f'{{"step": {step}}}\n')
            lease.kept()
    lease.release({"status": "stopped"})
    elsewhere(monkeypatch, tmp_path, "another")
    (folder,) = open_store(where).resumable(KEY)
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == ["00000002.safetensors", "00000003.safetensors"]
    assert (folder / "checkpoints" / "00000003.safetensors").read_text() == "state 3" and (folder / "history.jsonl").read_text().count(
        "\n"
    ) == 3
    assert open_store(where).acquire(KEY, "{}").number == 2


def test_objects_are_created_once(where: str) -> None:
    one, other = objects.at(where), objects.at(where)
    assert one.create("a/b", b"1") and not other.create("a/b", b"2") and other.read("a/b") == b"1"
    one.write("a/c", b"hello")
    assert other.read("a/c", 2) == b"llo" and other.read("a/c", 5) == b"" and other.read("a/none") is None
    assert sorted(one.list("a")) == ["a/b", "a/c"] and one.list("none") == {}
    before = one.list("a")["a/c"].mark
    time.sleep(0.01)
    one.write("a/c", b"other")
    assert one.list("a")["a/c"].mark != before and one.list("a")["a/c"].size == 5
    one.remove(["a/b", "a/c", "a/none"])
    assert one.list("a") == {} and one.create("a/b", b"3")


# What a bucket has beside


def test_what_is_fetched_is_checked_and_fetched_once(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(open_store(bucket))
    elsewhere(monkeypatch, tmp_path, "another")
    fetched: list[str] = []
    download = Bucket.download
    monkeypatch.setattr(Bucket, "download", lambda self, name, file: (fetched.append(name), download(self, name, file)))
    assert text_of(open_store(bucket)) == "made" and len(fetched) == 2
    assert text_of(open_store(bucket)) == "made" and len(fetched) == 2
    record = open_store(bucket).find(KEY, lambda name: False)
    assert record is not None and (record / "data.txt").stat().st_nlink == 2  # the blob and its place


def test_the_same_bytes_go_up_once(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    upload = Bucket.upload
    monkeypatch.setattr(Bucket, "upload", lambda self, file, name: (sent.append(name), upload(self, file, name)))
    publish(open_store(bucket), "the same", KEY)
    publish(open_store(bucket), "the same", OTHER)
    assert len(sent) == len(set(sent)) == 3  # the data, and two records


def test_only_what_is_wanted_is_fetched(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(bucket)
    lease = store.acquire(KEY, "{}")
    for number in range(4):
        (lease.folder / "shards" / f"{number:05d}").mkdir(parents=True)
        (lease.folder / "shards" / f"{number:05d}" / "rows.parquet").write_text(f"rows {number}")
    (lease.folder / "budgets").mkdir()
    (lease.folder / "budgets" / "small.json").write_text(json.dumps({"shards": [["00000", "", 1], ["00001", "", 1]]}))
    (lease.folder / "validation").mkdir()
    (lease.folder / "validation" / "rows.parquet").write_text("validation")
    (lease.folder / "provenance.json").write_text("{}")
    names = [path.relative_to(lease.folder).as_posix() for path in lease.folder.glob("*/**/*") if path.is_file()]
    artifact.write(lease.folder, key=KEY, stage="pack", files=[name for name in names if name.endswith(".json")], inputs={})
    assert lease.publish()
    elsewhere(monkeypatch, tmp_path, "another")
    budget = open_store(bucket).locate(KEY, "budgets/small.json")
    assert budget is not None and budget.is_file()
    folder = budget.parent.parent
    assert sorted(path.name for path in (folder / "shards").iterdir()) == ["00000", "00001"] and not (folder / "validation").exists()
    validation = open_store(bucket).locate(KEY, "validation")
    assert (
        validation is not None and (validation / "rows.parquet").read_text() == "validation" and not (folder / "provenance.json").exists()
    )


@pytest.mark.parametrize("damage", ["lost", "changed", "manifest", "record"])
def test_a_damaged_artifact_is_named_and_refused(bucket: str, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(bucket)
    publish(store)
    elsewhere(monkeypatch, tmp_path, "another")
    inside = objects.at(bucket)
    blob = next(name for name, entry in inside.list("blobs").items() if entry.size == 4)
    match damage:
        case "lost":
            inside.remove([blob])
        case "changed":
            inside.write(blob, b"evil")
        case "manifest":
            inside.write(f"attempts/{KEY}/1/files", b'{"files"')
        case "record":
            inside.write(f"published/{KEY}", b"{")
    with pytest.raises(ValueError, match="strata forget"):
        open_store(bucket).find(KEY)
    assert open_store(bucket).forget(KEY) and open_store(bucket).find(KEY) is None


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "a/../../outside", ".", "a//b", "a\\b"])
def test_a_manifest_cannot_write_outside(bucket: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(open_store(bucket))
    elsewhere(monkeypatch, tmp_path, "another")
    inside = objects.at(bucket)
    files = json.loads(inside.read(f"attempts/{KEY}/1/files") or b"")["files"]
    inside.write(f"attempts/{KEY}/1/files", json.dumps({"files": files | {name: files["data.txt"]}}).encode())
    with pytest.raises(ValueError, match="leads elsewhere"):
        open_store(bucket).find(KEY)


def test_a_bucket_without_conditional_writes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    pipe = MemoryFileSystem.pipe_file
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", lambda self, path, value, mode="overwrite": pipe(self, path, value))
    with pytest.raises(ValueError, match="no conditional writes"):
        Bucket("memory://careless").probe()


def test_a_bucket_that_is_away_for_a_while_is_waited_for(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = objects.bucket(bucket)
    calls = iter([ConnectionError("away"), TimeoutError("still away")])
    pipe = place.fs.pipe_file

    def unsteady(*given: object, **named: object) -> object:
        for error in calls:
            raise error
        return pipe(*given, **named)

    monkeypatch.setattr(place.fs, "pipe_file", unsteady)
    monkeypatch.setattr(objects.time, "sleep", lambda seconds: None)
    place.write("a", b"1")
    assert place.read("a") == b"1"
    monkeypatch.setattr(objects, "PATIENCE_SECONDS", -1.0)
    calls = iter([ConnectionError("away")])
    with pytest.raises(OSError, match="away"):
        place.write("a", b"2")


def test_a_create_whose_answer_was_lost_is_still_ours(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = objects.bucket(bucket)
    create, lost = Bucket._create, iter([True])

    def unsteady(self: Bucket, name: str, data: bytes) -> bool:
        made = create(self, name, data)
        for _ in lost:
            raise ConnectionError("the answer was lost")
        return made

    monkeypatch.setattr(Bucket, "_create", unsteady)
    monkeypatch.setattr(objects.time, "sleep", lambda seconds: None)
    assert place.create("published/x", b"my token")
    assert not place.create("published/x", b"another's token")


def test_many_keys_are_looked_at_by_two_listings(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(open_store(bucket))
    store = open_store(bucket)
    listed: list[str] = []
    real = Bucket.list
    monkeypatch.setattr(Bucket, "list", lambda self, prefix: (listed.append(prefix), real(self, prefix))[1])
    with store.looking():
        keys = [f"{number:064x}" for number in range(50)]
        assert not any(store.published(key) or store.alive(key) or store.find(key) for key in keys) and store.published(KEY)
    assert sorted(listed) == ["attempts", "published"]


def test_a_missing_package_is_named() -> None:
    with pytest.raises(ValueError, match="pip install"):
        open_store("oss://bucket/store").keys()


def test_stores_of_one_url_are_one_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_CACHE", str(tmp_path))
    first, second = RemoteStore("memory://one/store/"), RemoteStore("memory://one/store")
    assert first.where == second.where and first.root == second.root


def _until(what: object) -> None:
    deadline = time.monotonic() + 10
    while not what():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_requests_and_outcomes_go_over_a_board_in_any_place(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipelines import board as boards
    from pipelines.work import Outcome, Request

    monkeypatch.setattr(boards, "LISTING_SECONDS", 0.0)
    desk, driver = boards.Board(where, "study"), boards.Board(where, "study")
    wanted = Request("train", "cell", {"stage": "train", "versions": {}, "parameters": {}}, {}, where, "study")
    first = desk.put(wanted, "session")
    assert desk.has("session", wanted.key) and [(item.id, item.request) for item in driver.wanted("session")] == [(first, wanted)]
    second = desk.put(wanted, "session", ahead=2)
    assert [(item.id, item.ahead) for item in driver.wanted("session")] == [(second, 2)]
    driver.beat("session", {"pid": 1})
    assert [record["pid"] for record in desk.drivers()] == [1]
    driver.answer("session", wanted.key, Outcome("succeeded"), {first, second})
    outcome = desk.outcome("session", wanted.key, second)
    assert outcome is not None and outcome.done and driver.wanted("session") == [] and not desk.withdraw("session", wanted.key)
    driver.forget("session")
    assert desk.drivers() == [] and desk.outcome("session", wanted.key) is None


def test_a_plan_asks_no_bucket_unless_told(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(open_store(bucket))
    with open_store(bucket).looking():
        pass
    seen = open_store(bucket)
    with seen.looking():
        assert seen.find(KEY, lambda name: False) is not None
    store = open_store(bucket)
    store.offline = True
    monkeypatch.setattr(Bucket, "_patiently", lambda self, action: pytest.fail("the bucket was asked"))
    with store.looking():
        assert store.published(KEY) and not store.published(OTHER)
        assert store.find(KEY, lambda name: False) is not None and store.find(OTHER) is None and store.alive(KEY) is None


def test_two_on_one_machine_fetch_the_same(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(open_store(bucket))
    elsewhere(monkeypatch, tmp_path, "another")
    failed: list[BaseException] = []

    def fetch() -> None:
        try:
            for _ in range(20):
                assert text_of(open_store(bucket)) == "made"
                found = open_store(bucket).find(KEY)
                assert found is not None
                (found / "data.txt").unlink(missing_ok=True)  # so that it is linked again, by both
        except FileNotFoundError:
            pass  # the other took it away just before it was read
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=fetch) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == [] and text_of(open_store(bucket)) == "made"
