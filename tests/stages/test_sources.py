"""Sources: what names stand for, documents out of every format, bad ones counted, pins."""

from __future__ import annotations

import hashlib
import json
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from stages import documents as reader
from stages import sources
from stages.documents import Tally
from stages.sources import Reading, Source
from tests.stages.small_corpus import context, texts, write_lines, write_parquet

DOCUMENTS = texts(40)


def read(path: Path, tally: Tally | None = None, **reading) -> list[tuple[str, str]]:
    """(id, text) of every good document."""
    found = []
    for batch in reader.documents(path, Reading(**reading), prefix="p", tally=tally if tally is not None else Tally()):
        found += [(one["id"], one["text"].decode()) for one in batch.to_pylist()]
    return found


def names(files: list[sources.File]) -> list[str]:
    return [file.name for file in files]


@pytest.fixture
def server(tmp_path) -> Iterator[str]:
    """A web server over tmp_path/web. It knows no ranges, as the simplest ones do not."""
    (tmp_path / "web").mkdir()
    handler = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(tmp_path / "web"))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


# Names


def test_paths_globs_and_folders_are_sorted_by_name_and_taken_once(tmp_path):
    for name in ("b/x-1.jsonl", "a/x-2.jsonl", "a/notes.pdf", "c/deep/x-0.jsonl.gz"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert names(sources.expand([f"{tmp_path}/*/x-*.jsonl", str(tmp_path / "a" / "x-2.jsonl")])) == ["x-1.jsonl", "x-2.jsonl"]
    assert names(sources.expand([str(tmp_path)])) == ["x-0.jsonl.gz", "x-1.jsonl", "x-2.jsonl"]
    assert names(sources.expand([f"{tmp_path}/**/*.jsonl*"])) == ["x-0.jsonl.gz", "x-1.jsonl", "x-2.jsonl"]
    assert names(sources.expand(["a/*.jsonl"], folder=tmp_path)) == ["x-2.jsonl"]
    assert names(sources.expand([f"file://{tmp_path}/a/x-2.jsonl"])) == ["x-2.jsonl"]
    assert all(file.local for file in sources.expand([str(tmp_path)]))


@pytest.mark.parametrize("url, message", [
    ("nothing-here/*.parquet", "stands for no file"),
    ("nothing-here.parquet", "stands for no file"),
    ("strange://x/y", "no file, glob or URL"),
    ("oss://bucket/x.parquet", "pip install ossfs"),
    ("gs://bucket/*.jsonl", "pip install gcsfs"),
])  # fmt: skip
def test_a_name_that_stands_for_nothing_is_refused(tmp_path, url, message, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)
    with pytest.raises(ValueError, match=message):
        sources.expand([url], folder=tmp_path)
    assert message in sources.reachable(Source(role="training", files=[url]), tmp_path)


def test_reachable_says_nothing_or_one_sentence(tmp_path):
    (tmp_path / "x.bin").touch()
    assert "tells no format" in sources.reachable(Source(role="training", files=["x.bin"]), tmp_path)
    assert sources.reachable(Source(role="training", files=["x.bin"], format="text"), tmp_path) is None


def test_a_zip_is_a_folder_of_files(tmp_path):
    lines = write_lines(tmp_path / "x.jsonl", [{"text": text} for text in DOCUMENTS])
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.write(lines, "data/x.jsonl")
        archive.writestr("data/y.txt", "alone")
    files = sources.expand([f"zip://data/*::{tmp_path}/all.zip"])
    assert names(files) == ["x.jsonl", "y.txt"] and not any(file.local for file in files)
    with sources.scratch(tmp_path) as folder, sources.fetched(files[0], folder) as path:
        assert [text for _, text in read(path)] == DOCUMENTS
        assert path.is_relative_to(tmp_path)
    assert not path.exists() and not list(tmp_path.glob(".scratch-*"))


def test_a_web_server_without_ranges_will_do(tmp_path, server):
    write_parquet(tmp_path / "web" / "x.parquet", DOCUMENTS, row_group_size=7)
    [file] = sources.expand([f"{server}/x.parquet?download=true"])
    with sources.fetched(file, tmp_path) as path:
        assert [text for _, text in read(path)] == DOCUMENTS
    assert sources.pin([f"{server}/x.parquet"]) == sources.pin([str(tmp_path / "web" / "x.parquet")])
    with pytest.raises(ValueError, match="stands for no file"):
        sources.expand([f"{server}/y.parquet"])


def test_a_network_that_fails_is_tried_again_and_then_named(tmp_path, monkeypatch):
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.pipe("/x.txt", b"some text")
    [file] = sources.expand(["memory://x.txt"])
    fetch, failures = fs.get_file, iter([OSError("reset"), OSError("reset"), None] + [OSError("reset")] * 3)

    def flaky(*arguments):
        if (error := next(failures)) is not None:
            raise error
        return fetch(*arguments)

    monkeypatch.setattr(type(fs), "get_file", staticmethod(flaky))
    monkeypatch.setattr(sources.time, "sleep", lambda _: None)
    with sources.fetched(file, tmp_path) as path:
        assert path.read_bytes() == b"some text"
    with pytest.raises(ValueError, match="x.txt cannot be fetched .*reset.*run again"), sources.fetched(file, tmp_path):
        pass
    fs.rm("/x.txt")


def test_files_come_by_source_or_as_a_list_for_one():
    assert sources.listed(context(["a", "b"]), ["one"]) == {"one": ["a", "b"]}
    assert sources.listed(context({"one": ["a"], "two": ["b"]}), ["two"]) == {"two": ["b"]}
    for files, wanted in ((["a"], ["one", "two"]), ({"one": ["a"]}, ["two"]), (None, ["one"])):
        with pytest.raises(ValueError, match="No files were given for the source"):
            sources.listed(context(files), wanted)


# Pins


def test_a_pin_is_of_the_contents_in_the_names_order(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    lines = "".join(hashlib.sha256(text).hexdigest() + "\n" for text in (b"first", b"second"))
    pin = "sha256:" + hashlib.sha256(lines.encode()).hexdigest()
    source = Source(role="training", files=["*.txt"])
    assert (
        sources.pin([str(tmp_path / "b.txt"), str(tmp_path / "a.txt")])
        == sources.pin([str(tmp_path)])
        == sources.lock(source, tmp_path)
        == pin
    )
    found = sources.digests(sources.expand([str(tmp_path)]))
    sources.check(found, pin, "it")
    sources.check(found, None, "it")
    (tmp_path / "a.txt").write_text("other")
    with pytest.raises(ValueError, match="not the pinned ones.*strata lock-data"):
        sources.check(sources.digests(sources.expand([str(tmp_path)])), pin, "it")


def test_a_hub_repository_is_pinned_by_its_commit(monkeypatch):
    import huggingface_hub

    asked = []

    class Api:
        def repo_info(self, name, repo_type):
            asked.append((name, repo_type))
            return type("Info", (), {"sha": "c" * 40})

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    files = ["hf://datasets/org/corpus/data/*.parquet", "hf://datasets/org/corpus@main/more.parquet"]
    assert sources.lock(Source(role="training", files=files)) == f"revision:{'c' * 40}" and asked == [("org/corpus", "dataset")]
    opened = []
    monkeypatch.setattr(sources, "opened", lambda url: opened.append(url) or (_Listing(), url.removeprefix("hf://")))
    found = sources.expand(files, f"revision:{'c' * 40}")
    assert opened == [f"hf://datasets/org/corpus@{'c' * 40}/data/*.parquet", f"hf://datasets/org/corpus@{'c' * 40}/more.parquet"]
    assert all(file.pinned.startswith(f"revision:{'c' * 40}:") for file in found) and len({file.pinned for file in found}) == 2
    with pytest.raises(ValueError, match="only hf:// files have"):
        sources.expand(["x.parquet"], f"revision:{'c' * 40}")


class _Listing:
    """A file system in which everything exists."""

    protocol = "hf"
    exists = staticmethod(lambda path: True)
    isdir = staticmethod(lambda path: False)
    unstrip_protocol = staticmethod(lambda path: f"hf://{path}")
    glob = staticmethod(lambda path, detail: {path.replace("*", "one"): {"type": "file"}})


@pytest.mark.parametrize("wrong", [{"pin": "sha256:12"}, {"pin": "main"}, {"files": []}, {"role": "test"}, {"more": 1}, {"format": "csv"}])
def test_a_wrong_source_is_refused(wrong):
    with pytest.raises(ValidationError):
        Source.model_validate({"role": "training", "files": ["x"]} | wrong)


# Documents


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.jsonl.zst", "x.ndjson"])
def test_json_lines_plain_and_compressed(tmp_path, name):
    path = write_lines(tmp_path / name, [{"text": text, "id": i, "meta": {"set": "ab"[i % 2]}} for i, text in enumerate(DOCUMENTS)])
    assert read(path) == [(f"p:{i}", text) for i, text in enumerate(DOCUMENTS)]
    tally = Tally()
    assert read(path, tally, id="id", where={"meta.set": "b"}) == [(str(i), text) for i, text in enumerate(DOCUMENTS) if i % 2]
    assert (tally.documents, tally.filtered) == (20, 20) and tally.bytes == sum(len(text.encode()) for text in DOCUMENTS[1::2])


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string()), pa.string_view()])
def test_parquet_whatever_text_is_stored_as(tmp_path, kind):
    write_parquet(tmp_path / "x.parquet", [])
    values = pa.array([*DOCUMENTS, None], pa.binary() if kind == pa.binary() else pa.string()).cast(kind)
    pq.write_table(pa.table({"text": values}), tmp_path / "x.parquet", row_group_size=9)
    tally = Tally()
    assert read(tmp_path / "x.parquet", tally) == [(f"p:{i}", text) for i, text in enumerate(DOCUMENTS)]
    assert tally.bad == {"null": 1}


def test_parquet_columns_ids_and_filters(tmp_path):
    count = len(DOCUMENTS)
    numbers, flags = list(range(count)), [None if i == 3 else i % 2 == 0 for i in range(count)]
    meta = [{"set": "ab"[i % 2], "deep": {"x": i // 10}} for i in range(count)]
    path = write_parquet(tmp_path / "x.parquet", DOCUMENTS, 10, number=numbers, flag=flags, meta=meta, other=["unread"] * count)
    picked = lambda **reading: [int(i) for i, _ in read(path, id="number", **reading)]  # noqa: E731
    assert picked(where={"meta.set": "b"}) == [i for i in range(count) if i % 2]
    assert picked(where={"meta.deep.x": 2, "flag": True}) == [i for i in range(20, 30) if i % 2 == 0]
    assert picked(where={"number": 17}) == [17] and picked(where={"flag": None}) == [3] and picked(where={"id": "nobody"}) == []
    assert read(path, column="other")[0] == ("p:0", "unread")
    tally = Tally()
    read(path, tally, where={"number": 17})
    assert (tally.documents, tally.filtered) == (1, count - 1)
    assert read(path, where={"number": 17}) == [("p:17", DOCUMENTS[17])]  # an id is of the row, read or not


def test_row_groups_that_cannot_match_are_not_read(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "x.parquet", DOCUMENTS, 10, number=list(range(len(DOCUMENTS))))
    groups = []
    batches = pq.ParquetFile.iter_batches
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda self, **how: groups.extend(how["row_groups"]) or batches(self, **how))
    assert len(read(path, where={"number": 25})) == 1 and groups == [2]


@pytest.mark.parametrize("reading, message", [
    ({"column": "txt"}, "no column 'txt'; it has id, text"),
    ({"id": "name"}, "no column 'name'"),
    ({"where": {"license": "mit"}}, "no column 'license'"),
    ({"where": {"text": 3}}, "cannot be compared"),
    ({"column": "number"}, "holds int64, not text"),
])  # fmt: skip
def test_a_column_that_will_not_do_is_named(tmp_path, reading, message):
    path = write_parquet(tmp_path / "x.parquet", DOCUMENTS, number=list(range(len(DOCUMENTS))))
    with pytest.raises(ValueError, match=message):
        read(path, **reading)


def test_a_text_file_is_one_document(tmp_path):
    (tmp_path / "x.txt").write_text("line\n\nline — end")
    assert read(tmp_path / "x.txt") == [("p:0", "line\n\nline — end")]
    (tmp_path / "x.md.zst").write_bytes(pa.compress(b"packed", "zstd", asbytes=True))
    assert read(tmp_path / "x.md.zst") == [("p:0", "packed")]
    with pytest.raises(ValueError, match="plain text, which has no columns"):
        read(tmp_path / "x.txt", where={"a": 1})
    with pytest.raises(ValueError, match="tells no format"):
        read(tmp_path / "x.bin")


def test_bad_json_lines_are_counted_by_kind(tmp_path):
    lines = [{"text": "good"}, {"text": ""}, {"text": None}, {"words": "x"}, {"text": 7}, b'{"text": "torn', b"[1]", b'{"text": "\xff\xfe"}', b'{"text": "\\ud800"}',
             b"", {"text": "the <|endoftext|> inside"}, b"[" * 100_000, {"text": " "}]  # fmt: skip
    tally = Tally()
    found = read(write_lines(tmp_path / "x.jsonl", lines), tally)
    assert found == [("p:0", "good"), ("p:10", "the <|endoftext|> inside"), ("p:12", " ")]
    assert tally.bad == {"empty": 1, "null": 2, "not_text": 1, "broken_json": 3, "not_utf8": 2}
    assert tally.noted == {"special_token": 1} and tally.documents == 3


def test_bad_parquet_documents_are_counted_by_kind(tmp_path):
    values = [b"good", b"", None, b"\xff\xfe", "东京".encode()[:-1], b"a<|endoftext|>b", b"<|endof", b"text|>", b"x" * (reader.HUGE + 1)]
    write_parquet(tmp_path / "x.parquet", [])
    pq.write_table(pa.table({"text": pa.array(values, pa.binary())}), tmp_path / "x.parquet")
    tally = Tally()
    assert [len(text) for _, text in read(tmp_path / "x.parquet", tally)] == [4, 15, 7, 6, reader.HUGE + 1]
    assert tally.bad == {"empty": 1, "null": 1, "not_utf8": 2} and tally.noted == {"special_token": 1, "huge": 1}
    more = Tally()
    more.add(tally.record())
    assert json.loads(json.dumps(more.record())) == tally.record()


def test_a_document_that_is_too_long_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "LIMIT", 1000)
    lines = [{"text": "short"}, {"text": "x" * 5000}, {"text": "after"}]
    for path in (write_lines(tmp_path / "x.jsonl", lines), write_parquet(tmp_path / "x.parquet", [line["text"] for line in lines])):
        tally = Tally()
        assert [text for _, text in read(path, tally)] == ["short", "after"] and tally.bad == {"too_long": 1}
    (tmp_path / "x.txt").write_text("x" * 1001)
    tally = Tally()
    assert read(tmp_path / "x.txt", tally) == [] and tally.bad == {"too_long": 1}


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.jsonl.zst", "x.parquet"])
def test_a_damaged_file_is_named(tmp_path, name):
    lines = [{"text": text} for text in DOCUMENTS * 20]
    path = write_parquet(tmp_path / name, DOCUMENTS) if name == "x.parquet" else write_lines(tmp_path / name, lines)
    whole = path.read_bytes()
    for damaged in (whole[:-30], whole[: len(whole) // 2], b"junk" * 9):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{name} is not a whole"):
            read(path)


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=40), group=st.integers(1, 40))
def test_batches_are_cut_by_the_documents_alone(tmp_path_factory, sizes, group):
    folder = tmp_path_factory.mktemp("cuts")
    values = [chr(97 + i % 26) * size for i, size in enumerate(sizes)]
    paths = [write_parquet(folder / "x.parquet", values, group), write_lines(folder / "x.jsonl", [{"text": value} for value in values])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "BATCH", 50)
        found = [[batch.to_pylist() for batch in reader.documents(path, Reading(), prefix="p", tally=Tally())] for path in paths]
    assert found[0] == found[1]
    assert [one["text"].decode() for batch in found[0] for one in batch] == values
    for batch in found[0]:
        assert sum(len(one["text"]) for one in batch[:-1]) < 50
    for batch in found[0][:-1]:
        assert sum(len(one["text"]) for one in batch) >= 50


def test_memory_does_not_grow_with_the_file(tmp_path):
    import tracemalloc

    path = tmp_path / "x.jsonl.zst"
    write_lines(path, [{"text": "word " * 20_000}] * 800)  # 80 MB of text
    tracemalloc.start()
    held = pa.total_allocated_bytes()
    most = 0
    for batch in reader.documents(path, Reading(), prefix="p", tally=Tally()):
        most = max(most, pa.total_allocated_bytes() - held)
        del batch
    assert tracemalloc.get_traced_memory()[1] + most < 6 * reader.BATCH
    tracemalloc.stop()


def test_a_file_can_be_one_document(tmp_path):
    path = tmp_path / "lines.parquet"
    pq.write_table(pa.table({"text": ["one", "", None, "two"]}), path)
    tally = Tally()
    assert read(path, tally, document="file") == [("p", "one\n\n\n\n\n\ntwo")]
    assert tally.documents == 1 and not tally.bad
