"""Tokenize: every token of every good document in order, unit by unit, whatever interrupts it."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from stages import artifact, schemas, sources, tokenize, tokenizer, units
from stages.spec import LeaseLost, Stopped, fingerprint
from tests.stages.small_corpus import contents, make_vocabulary, texts, tokenize_spec, tokenized, write_lines, write_parquet
from tests.stages.test_sources import server  # noqa: F401

MADE = ("artifact.json", "tokens.parquet")


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory) -> Path:
    return make_vocabulary(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture
def files(tmp_path) -> list[Path]:
    """Three files of different formats, in the order of their names."""
    folder = tmp_path / "source"
    write_parquet(folder / "a.parquet", [*texts(30, seed=1), "", None], 8)
    write_lines(folder / "b.jsonl.zst", [*({"text": text} for text in texts(30, seed=2)), {"text": ""}, b"{"])
    write_lines(folder / "c.jsonl.gz", [{"text": text} for text in texts(30, seed=3)])
    return sorted(folder.iterdir())


def rows(out: Path) -> list[dict]:
    return [row for path in sorted(out.glob("*/tokens.parquet")) for row in schemas.read(path, "tokens").to_pylist()]


def data(out: Path) -> dict[str, bytes]:
    """What must not depend on how it was made."""
    return {name: value for name, value in contents(out).items() if name.endswith(MADE)}


def test_every_token_of_every_document_in_order(tmp_path, files, vocabulary):
    out = tokenized(tmp_path / "out", vocabulary, files[::-1])
    encoder = tokenizer.load(vocabulary, 1)
    wanted = [text for seed in (1, 2, 3) for text in texts(30, seed=seed)]
    found = rows(out)
    assert [encoder.decode(row["tokens"]) for row in found] == wanted
    assert [row["tokens"] for row in found] == [encoder._plain_tokens(text.encode()).tolist() for text in wanted]
    assert {row["source"] for row in found} == {"text"} and len({row["id"] for row in found}) == len(found)
    counts = json.loads((out / "counts.json").read_text())
    assert counts["bad"] == {"broken_json": 1, "empty": 2, "null": 1} and counts["documents"] == 90 and counts["filtered"] == 0
    assert counts["tokens"] == sum(len(row["tokens"]) for row in found) and counts["bytes"] == sum(len(text.encode()) for text in wanted)
    assert counts["encoders"] == {encoder.encoder: 3} and counts["fallback"] is None
    record = artifact.read(out, key=tokenize_spec().key, content=True)
    assert list(record["files"]) == [f"{i:05}/tokens.parquet" for i in range(3)]
    assert record["inputs"] == {"vocabulary": artifact.read(vocabulary)["digest"]}
    assert json.loads((out / "provenance.json").read_text())["encoders"] == counts["encoders"]


def test_ids_come_from_their_column(tmp_path, files, vocabulary):
    out = tokenized(tmp_path / "out", vocabulary, files[:1], tokenize_spec(id="id"))
    assert [row["id"] for row in rows(out)] == [f"doc-{i}" for i in range(30)]
    prefix = fingerprint(sources.sha256(files[0]))[:12]
    out = tokenized(tmp_path / "made", vocabulary, files[:1])
    assert [row["id"] for row in rows(out)] == [f"{prefix}:{i}" for i in range(30)]


def test_sources_come_from_a_domains_column(tmp_path, vocabulary):
    """The source's own name stands where it is null; both formats, across batches and groups of rows."""
    kinds = ["wiki", "books", None] * 10
    documents = texts(30, seed=4)
    table = write_parquet(tmp_path / "a.parquet", documents, 7, kind=kinds)
    lines = write_lines(tmp_path / "b.jsonl", [{"text": text, "kind": kind} for text, kind in zip(documents, kinds, strict=True)])
    out = tokenized(tmp_path / "out", vocabulary, [table, lines], tokenize_spec(domain="kind"))
    assert [row["source"] for row in rows(out)] == [kind or "text" for kind in kinds] * 2
    plain = tokenized(tmp_path / "plain", vocabulary, [table, lines])
    assert [row["tokens"] for row in rows(out)] == [row["tokens"] for row in rows(plain)]
    (tmp_path / "c.txt").write_text("plain")
    with pytest.raises(ValueError, match="`domain` are for Parquet"):
        tokenized(tmp_path / "text", vocabulary, [tmp_path / "c.txt"], tokenize_spec(domain="kind"))


def test_the_same_bytes_wherever_and_however_often(tmp_path, files, vocabulary):
    one = tokenized(tmp_path / "one", vocabulary, files)
    moved = [shutil.copy(file, tmp_path / file.name) for file in files]
    other = tokenized(tmp_path / "deep" / "other", vocabulary, moved, threads=16)
    assert data(one) == data(other)


def test_a_second_run_makes_nothing(tmp_path, files, vocabulary, monkeypatch):
    out = tokenized(tmp_path / "out", vocabulary, files)
    before = data(out)
    monkeypatch.setattr(tokenizer.Tokenizer, "encode", lambda *_: pytest.fail("encoded again"))
    assert data(tokenized(out, vocabulary, files)) == before


@pytest.mark.parametrize("batch", [0, 2, 5])
def test_stopped_and_continued_is_the_same(tmp_path, files, vocabulary, monkeypatch, batch):
    monkeypatch.setattr("stages.documents.BATCH", 2000)  # several batches a file
    whole = data(tokenized(tmp_path / "whole", vocabulary, files))
    polls = iter(range(1000))
    with pytest.raises(Stopped, match="of 3 files are tokenized and kept"):
        tokenized(tmp_path / "out", vocabulary, files, stop_requested=lambda: next(polls) >= batch)
    assert not (tmp_path / "out" / "artifact.json").exists()
    kept = data(tmp_path / "out")
    assert all(whole[name] == value for name, value in kept.items())
    assert data(tokenized(tmp_path / "out", vocabulary, files)) == whole


def test_killed_and_continued_is_the_same(tmp_path, files, vocabulary):
    """Killed in the middle of the second file, by a signal that nothing can catch."""
    whole = data(tokenized(tmp_path / "whole", vocabulary, files))
    spec, out = tmp_path / "spec.json", tmp_path / "out"
    spec.write_text(json.dumps(tokenize_spec().model_dump()))
    code = f"""
import os, signal, sys
from stages import schemas, tokenize
from stages.command import main
write, calls = schemas.write, []
def killed(*arguments, **named):
    calls.append(1)
    if len(calls) == 2:
        arguments[0].write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    return write(*arguments, **named)
schemas.write = killed
main(tokenize.run, [{str(spec)!r}, {str(out)!r}, "--input", "vocabulary={vocabulary}", "--threads", "1", *(word for file in sys.argv[1:] for word in ("--source", file))])
"""
    done = subprocess.run([sys.executable, "-c", code, *map(str, files)], cwd=Path(__file__).parents[2], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert sorted(path.name for path in out.iterdir() if path.name[0].isdigit()) == ["00000"]
    (out / ".scratch-left").mkdir()
    assert data(tokenized(out, vocabulary, files)) == whole
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]


def test_alone_on_the_command_line(tmp_path, files, vocabulary):
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(tokenize_spec().model_dump()))
    command = [sys.executable, "-m", "stages.tokenize", str(spec), str(tmp_path / "out"), "--input", f"vocabulary={vocabulary}", "--source"]
    done = subprocess.run([*command, str(files[0])], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0 and "tokens_per_second" in done.stdout, done.stderr
    done = subprocess.run([*command, "nothing.parquet"], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("Error: ") and "Traceback" not in done.stderr


def test_a_lost_lease_writes_no_more(tmp_path, files, vocabulary):
    fences = iter([False, True])

    def fence() -> None:
        if next(fences, True):
            raise LeaseLost("taken over")

    with pytest.raises(LeaseLost):
        tokenized(tmp_path / "out", vocabulary, files, fence=fence)
    assert [path.name for path in (tmp_path / "out").iterdir() if path.name[0].isdigit()] == ["00000"]


def test_an_added_file_leaves_the_other_units(tmp_path, files, vocabulary):
    out = tokenized(tmp_path / "out", vocabulary, files[1:])
    before = {name[5:]: value for name, value in data(out).items() if name[0].isdigit()}
    keys = {artifact.read(out / f"{i:05}")["key"] for i in range(2)}

    class Shelf:
        fetched: list[str] = []

        def fetch(self, key, folder):
            if key not in keys:
                return False
            self.fetched.append(key)
            shutil.copytree(next(unit for unit in out.glob("0*") if artifact.read(unit)["key"] == key), folder)
            return True

        def keep(self, key, folder):
            pass

    with units.shared(Shelf()):
        more = tokenized(tmp_path / "more", vocabulary, files, threads=8)
    assert set(Shelf.fetched) == keys
    after = data(more)
    assert (
        all(after[f"{number:05}/tokens.parquet"] == (out / f"{number - 1:05}" / "tokens.parquet").read_bytes() for number in (1, 2))
        and before
    )


def test_fewer_files_or_other_parameters_leave_no_units_behind(tmp_path, files, vocabulary):
    out = tokenized(tmp_path / "out", vocabulary, files)
    tokenized(out, vocabulary, files[:2])
    assert sorted(path.name for path in out.glob("0*")) == ["00000", "00001"]
    other = tokenize_spec(column="id")
    tokenized(out, vocabulary, files[:1], other)
    assert artifact.read(out, key=other.key) and rows(out)[0]["tokens"] == tokenizer.load(vocabulary, 1)._plain_tokens(b"doc-0").tolist()


@pytest.mark.parametrize("name, damage", [
    ("tokens.parquet", lambda path: path.write_bytes(path.read_bytes()[:-10])),
    ("counts.json", lambda path: path.write_text(path.read_text().replace("2", "3"))),
    ("artifact.json", lambda path: path.unlink()),
])  # fmt: skip
def test_a_damaged_unit_is_made_again(tmp_path, files, vocabulary, name, damage):
    out = tokenized(tmp_path / "out", vocabulary, files)
    before = data(out)
    damage(out / "00001" / name)
    assert data(tokenized(out, vocabulary, files)) == before


def test_files_that_are_not_the_pinned_ones_are_refused(tmp_path, files, vocabulary):
    spec = tokenize_spec(pin=sources.pin(list(map(str, files))))
    tokenized(tmp_path / "out", vocabulary, files, spec)
    write_lines(files[2], [{"text": "changed"}])
    with pytest.raises(ValueError, match="the source 'text' are not the pinned ones.*strata lock-data"):
        tokenized(tmp_path / "other", vocabulary, files, spec)
    assert not (tmp_path / "other").exists()


def test_remote_files_are_checked_and_not_fetched_twice(tmp_path, files, vocabulary, server, monkeypatch):  # noqa: F811
    for file in files:
        shutil.copy(file, tmp_path / "web" / file.name)
    urls = [f"{server}/{file.name}" for file in files]
    spec = tokenize_spec(pin=sources.pin(list(map(str, files))))
    fetched, fetch = [], sources.fetched
    monkeypatch.setattr(sources, "fetched", lambda file, folder: fetched.append(file.name) or fetch(file, folder))
    out = tokenized(tmp_path / "out", vocabulary, urls, spec)
    assert data(out) == data(tokenized(tmp_path / "local", vocabulary, files, spec)) and set(fetched) >= {file.name for file in files}
    fetched.clear()
    tokenized(out, vocabulary, urls, spec)
    assert not fetched
    write_lines(tmp_path / "web" / "c.jsonl.gz", [{"text": "changed"}])
    with pytest.raises(ValueError, match="not the pinned ones"):
        tokenized(tmp_path / "other", vocabulary, urls, spec)
    assert not list((tmp_path / "other").glob("0*")) and not (tmp_path / "other" / "artifact.json").exists()


def test_an_encoder_that_is_wrong_is_left_for_the_file_and_all_after(tmp_path, files, vocabulary, monkeypatch):
    right = tokenized(tmp_path / "right", vocabulary, files)
    load = tokenizer._gigatoken

    def wrong(*arguments):
        encode, batches = load(*arguments), iter(range(1000))

        def encoder(offsets, text):
            ends, tokens = encode(offsets, text)
            return ends, tokens if next(batches) < 1 else tokens[::-1].copy()

        return encoder

    monkeypatch.setattr(tokenizer, "_gigatoken", wrong)
    with pytest.warns(UserWarning, match="gigatoken differs from tiktoken in document 0 of a batch of .*b.jsonl.zst"):
        out = tokenized(tmp_path / "out", vocabulary, files)
    assert rows(out) == rows(right)
    counts = json.loads((out / "counts.json").read_text())
    assert counts["encoders"] == {"gigatoken": 1, "tiktoken": 2} and "b.jsonl.zst" in counts["fallback"]
    assert json.loads((out / "provenance.json").read_text())["fallback"] == counts["fallback"]
    assert artifact.read(out)["digest"] == artifact.read(right)["digest"]


def test_a_source_without_documents_is_refused_with_what_was_met(tmp_path, vocabulary):
    file = write_lines(tmp_path / "x.jsonl", [{"words": "a"}, {"text": ""}, b"{"])
    with pytest.raises(ValueError, match="holds no document: 1 broken_json, 1 empty, 1 null; is 'text' the column"):
        tokenized(tmp_path / "out", vocabulary, [file])
    with pytest.raises(ValueError, match="3 not selected by where|no document: 1 broken_json, 2 not selected by where"):
        tokenized(tmp_path / "out", vocabulary, [file], tokenize_spec(where={"set": "x"}))


def test_a_vocabulary_that_is_not_the_recorded_one_is_refused(tmp_path, files, vocabulary):
    copy = shutil.copytree(vocabulary, tmp_path / "v")
    record = copy / "tokenizer.json"
    record.write_text(record.read_text().replace("50256", "50255"))
    with pytest.raises(ValueError, match="does not hold the data that was recorded"):
        tokenized(tmp_path / "out", copy, files)
    with pytest.raises(ValueError, match="other parameters"):
        tokenized(tmp_path / "out", vocabulary, files, tokenize_spec(vocabulary=tokenize_spec()))


def test_a_full_disk_is_one_sentence(tmp_path, files, vocabulary, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(schemas, "write", full)
    with pytest.raises(ValueError, match="is full.*run again"):
        tokenized(tmp_path / "out", vocabulary, files)
    monkeypatch.undo()
    assert len(rows(tokenized(tmp_path / "out", vocabulary, files))) == 90


def test_progress_says_how_far_it_is(tmp_path, files, vocabulary, monkeypatch):
    monkeypatch.setattr(tokenize, "PROGRESS_SECONDS", 0.0)
    lines = []
    out = tokenized(tmp_path / "out", vocabulary, files, on_progress=lines.append, progress_file=tmp_path / "progress.jsonl")
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines) and {line["of"] for line in lines} == {3}
    assert lines[-1]["step"] == 3 and lines[-1]["documents"] == 90 and lines[-1]["tokens"] == sum(len(row["tokens"]) for row in rows(out))
    assert all(line["tokens_per_second"] >= 0 for line in lines)


def test_things_are_made_ahead_in_order_and_errors_come_in_their_place():
    assert list(tokenize.ahead(iter(range(50)))) == list(range(50))

    def failing():
        yield 1
        raise KeyError("here")

    found = tokenize.ahead(failing())
    assert next(found) == 1
    with pytest.raises(KeyError):
        next(found)
    left = []

    def endless():
        try:
            while True:
                yield 1
        finally:
            left.append(True)

    source = endless()
    found = tokenize.ahead(source)
    next(found)
    found.close()
    for _ in range(100):
        try:
            source.close()
            break
        except ValueError:  # its thread is in it yet
            time.sleep(0.02)
    assert left == [True]


def test_no_warning_where_all_is_well(tmp_path, files, vocabulary):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokenized(tmp_path / "out", vocabulary, files)
