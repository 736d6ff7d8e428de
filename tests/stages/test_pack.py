"""Pack: every token in order, BOS where it should be, and rows that no larger budget changes."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from stages import artifact, pack, pieces, schemas
from stages.pieces import Cursor, Pieces
from stages.spec import Context, Stopped
from tests.stages.small_corpus import contents, key_of, make_tokens, pack_spec, packed

BOS, LENGTH = 0, 16


def numbered(count: int, *, seed: int = 0, longest: int = 60, first: int = 1) -> list[list[int]]:
    """Documents of tokens that count on: no two tokens of a set are the same (uint32)."""
    random = np.random.default_rng(seed)
    documents = []
    for _ in range(count):
        size = int(random.integers(1, longest))
        documents.append(list(range(first, first + size)))
        first += size
    return documents


BIG = 1 << 20  # a vocabulary for `numbered`


def shard_rows(out: Path) -> tuple[np.ndarray, list[list[int]]]:
    """Every row of every shard, in order."""
    tables = [schemas.read(path, "packed") for path in sorted((out / "shards").glob("*/rows.parquet"))]
    return np.concatenate([np.array(table["tokens"].to_pylist()) for table in tables]), [
        row for table in tables for row in table["segments"].to_pylist()
    ]


def text(rows: np.ndarray) -> list[int]:
    return [int(token) for token in rows.reshape(-1) if token != BOS]


def shards(out: Path) -> dict[str, bytes]:
    return {name: value for name, value in contents(out).items() if name.startswith("shards/")}


def rows_apart(rows: np.ndarray, segments: list[list[int]]) -> list[list[list[int]]]:
    return [[piece.tolist() for piece in np.split(row, np.cumsum(lengths)[:-1])] for row, lengths in zip(rows, segments, strict=True)]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> tuple[list[Path], list[Path]]:
    """Two training sources and a validation source."""
    folder = tmp_path_factory.mktemp("tokens")
    training = [
        make_tokens(folder / "a", numbered(60), vocab_size=BIG),
        make_tokens(folder / "b", numbered(30, seed=1, first=10_000), vocab_size=BIG),
    ]
    return training, [make_tokens(folder / "held", numbered(20, seed=2, first=50_000), vocab_size=BIG)]


# Filling


def test_rows_by_hand(tmp_path):
    folder = make_tokens(tmp_path / "t", [list(range(10, 18)), [20, 21, 22], [30] * 5, [40]], vocab_size=100)

    class InOrder(Pieces):
        def _window(self, epoch, block):
            documents = [document.values.to_numpy() for document in self.blocks[0].read()]
            lengths = [len(document) for document in documents]
            return pieces.Window(epoch, 0, documents, list(range(4)), [0] * 4, lengths, Cursor(epoch + 1))

    stream = InOrder([folder], sequence_length=8, seed=0, window=9)
    found = pack.fill(stream, Cursor(), rows=4, bos=BOS)
    assert found.tokens.tolist() == [
        [0, 10, 11, 12, 13, 14, 15, 16, 17],  # a piece of sequence_length fills a row
        [0, 20, 21, 22, 0, 30, 30, 30, 30],  # one that does not fit is cut
        [0, 30, 0, 40, 0, 10, 11, 12, 13],  # and goes on behind another BOS; the next epoch follows
        [0, 14, 15, 16, 17, 0, 20, 21, 22],
    ]
    assert found.segments.tolist() == [9, 4, 5, 2, 2, 5, 5, 4]
    assert found.cursor == Cursor(1, 0, 2, 0) and found.ends == [[1, 2]]
    found = pack.fill(stream, Cursor(0, 0, 1, 0), rows=1, bos=BOS)
    assert found.cursor == Cursor(0, 0, 2, 4)
    short = make_tokens(tmp_path / "s", [[1, 2, 3, 4, 5, 6, 7]] * 4, vocab_size=100)
    found = pack.fill(Pieces([short], sequence_length=8, seed=0, window=9), Cursor(), rows=2, bos=BOS)
    assert found.tokens.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 0]] * 2 and found.segments.tolist() == [8, 1] * 2  # one place left


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=25), length=st.integers(8, 20), window=st.integers(1, 40),
    group=st.integers(1, 9), seed=st.integers(0, 5), rows=st.integers(1, 12), step=st.integers(1, 5),
)  # fmt: skip
def test_no_token_is_lost_repeated_or_out_of_order(tmp_path_factory, lengths, length, window, group, seed, rows, step):
    folder = tmp_path_factory.mktemp("fill")
    starts = np.cumsum([1, *lengths])
    documents = [list(range(a, b)) for a, b in zip(starts[:-1], starts[1:], strict=True)]
    stream = Pieces([make_tokens(folder / "t", documents, vocab_size=BIG, group=group)], sequence_length=length, seed=seed, window=window)
    found = pack.fill(stream, Cursor(), rows=rows, bos=BOS)
    split = rows_apart(
        found.tokens,
        [list(map(int, part)) for part in np.split(found.segments, np.flatnonzero(np.cumsum(found.segments) % (length + 1) == 0)[:-1] + 1)],
    )
    epoch, wanted = [], set(range(1, int(starts[-1])))
    for row in split:
        assert sum(map(len, row)) == length + 1
        for number, piece in enumerate(row):
            assert piece[0] == BOS and BOS not in piece[1:]
            assert len(piece) > 1 or number == len(row) - 1  # a BOS alone only at a row's end
            assert piece[1:] == list(range(piece[1], piece[1] + len(piece) - 1)) if len(piece) > 1 else True
    tokens = text(found.tokens)
    for a in range(0, len(tokens), len(wanted)):  # each epoch: every token once
        epoch = tokens[a : a + len(wanted)]
        assert len(set(epoch)) == len(epoch) and set(epoch) <= wanted
    pieces_of = [[]]
    for token in tokens[: len(wanted)]:  # within a piece the tokens follow one another, also across rows
        if pieces_of[-1] and token == pieces_of[-1][-1] + 1 and (token - 1) in wanted:
            pieces_of[-1].append(token)
        else:
            pieces_of.append([token])
    assert len(pieces_of) <= 2 + sum(-(-n // length) for n in lengths)
    cursor, parts = Cursor(), []  # the same in steps, each from the last one's cursor, and as another process would
    while sum(map(len, parts)) < rows:
        fresh = Pieces([folder / "t"], sequence_length=length, seed=seed, window=window)
        part = pack.fill(fresh, cursor, rows=min(step, rows - sum(map(len, parts))), bos=BOS)
        parts.append(part.tokens)
        cursor = part.cursor
    assert np.array_equal(np.concatenate(parts), found.tokens) and cursor == found.cursor


def test_the_order_depends_on_the_seed_and_the_epoch(tokens):
    def order(seed: int, epoch: int) -> list[int]:
        stream = Pieces(tokens[0], sequence_length=LENGTH, seed=seed, window=20)
        found = []
        for window in stream.windows(Cursor(epoch)):
            if window.epoch != epoch:
                return found
            found += [int(window.blocks[of][start]) for of, start in zip(window.of, window.start, strict=True)]

    base = order(0, 0)
    assert order(0, 0) == base
    others = [order(1, 0), order(0, 1), order(2, 5)]
    assert all(other != base and sorted(other) == sorted(base) for other in others)
    # Sources mix: neither stands alone at the beginning.
    assert {token < 10_000 for token in base[:40]} == {True, False}


def test_a_piece_stays_within_its_window(tokens):
    """The pieces of a window are those of its blocks: what is shuffled is bounded, and nothing behind it matters."""
    stream = Pieces(tokens[0], sequence_length=LENGTH, seed=0, window=20)
    order = pieces.permutation(len(stream.blocks), 0, 0)
    windows = []
    for window in stream.windows(Cursor()):
        if window.epoch:
            break
        windows.append(window)
    assert len(windows) > 3
    for window, after in zip(windows, [*windows[1:], None], strict=True):
        mine = [stream.blocks[number] for number in order[window.block : after.block if after else None]]
        assert {
            int(block[start]) for block, start in ((window.blocks[of], start) for of, start in zip(window.of, window.start, strict=True))
        } == {
            int(document.values[place].as_py()) for block in mine for document in block.read() for place in range(0, len(document), LENGTH)
        }
        assert len(window) >= 20 or after is None
        assert len(window) < 20 + max(len(stream._pieces(block)[1]) for block in mine)


def test_a_permutation_is_one_and_is_fixed():
    assert sorted(pieces.permutation(100, 1, 2).tolist()) == list(range(100))
    assert pieces.permutation(8, 0, 0).tolist() == pieces.permutation(8, 0, 0).tolist() != pieces.permutation(8, 0, 1).tolist()
    assert pieces.permutation(8, 7, 3).tolist() == GOLDEN  # numbers of every study hang on it


GOLDEN = [2, 4, 7, 3, 5, 1, 0, 6]


# The stage


def test_what_pack_makes(tmp_path, tokens):
    training, held = tokens
    spec = packed(tmp_path / "p", training, held, vocab_size=BIG, budgets={"s": 12, "m": 20})
    out = tmp_path / "p"
    record = artifact.read(out, key=spec.key, content=True)
    assert list(record["files"]) == [
        "budgets/m.json",
        "budgets/s.json",
        *(f"shards/{i:05}/rows.parquet" for i in range(3)),
        "validation/rows.parquet",
    ]
    assert record["inputs"] == {
        name: artifact.read(folder)["digest"] for name, folder in zip(sorted(spec.inputs), [*training, *held], strict=True)
    }
    small, large = (json.loads((out / "budgets" / f"{name}.json").read_text()) for name in "sm")
    assert small["rows"] == 12 and small["sequence_length"] == LENGTH and small["tokens"] == 12 * LENGTH
    assert [(name, rows) for name, _, rows in small["shards"]] == [("00000", 8), ("00001", 4)] and [
        rows for _, _, rows in large["shards"]
    ] == [8, 8, 4]
    for name, digest, _ in large["shards"]:
        assert artifact.file_digest(out / "shards" / name / "rows.parquet") == digest
    assert small["key"] == pack.budget_key(spec, 12) != large["key"] and small["digest"] != large["digest"]
    assert artifact.read(out / "validation")["key"] == pack.validation_key(spec)
    rows, segments = shard_rows(out)
    assert rows.shape == (24, LENGTH + 1) and all(sum(row) == LENGTH + 1 for row in segments)
    assert set(text(rows)) <= {token for document in [*numbered(60), *numbered(30, seed=1, first=10_000)] for token in document}
    for row, lengths in zip(rows, segments, strict=True):
        assert np.flatnonzero(row == BOS).tolist() == np.cumsum([0, *lengths[:-1]]).tolist()
    validation = schemas.read(out / "validation" / "rows.parquet", "packed")
    assert len(validation) == 4 and set(text(np.array(validation["tokens"].to_pylist()))) <= {
        token for document in numbered(20, seed=2, first=50_000) for token in document
    }


@settings(max_examples=15, deadline=None)
@given(small=st.integers(1, 40), more=st.integers(0, 60), epochs=st.integers(1, 3))
def test_a_larger_budget_or_more_epochs_change_no_shard(tmp_path_factory, tokens, small, more, epochs):
    folder = tmp_path_factory.mktemp("prefix")
    packed(folder / "small", *tokens, vocab_size=BIG, budgets={"s": small}, epochs=2)
    packed(folder / "large", *tokens, vocab_size=BIG, budgets={"s": small, "l": small + more}, epochs=2 + epochs)
    one, other = shards(folder / "small"), shards(folder / "large")
    assert one and all(other[name] == value for name, value in one.items())
    assert (folder / "small/budgets/s.json").read_bytes() == (folder / "large/budgets/s.json").read_bytes()
    assert (folder / "small/validation/rows.parquet").read_bytes() == (folder / "large/validation/rows.parquet").read_bytes()
    large = json.loads((folder / "large/budgets/l.json").read_text())
    for mine, its in zip(json.loads((folder / "small/budgets/s.json").read_text())["shards"], large["shards"], strict=False):
        assert mine[:2] == its[:2] and mine[2] <= its[2]


def test_a_larger_budget_makes_only_what_is_new(tmp_path, tokens, monkeypatch):
    out, filled, fill = tmp_path / "p", [], pack.fill
    monkeypatch.setattr(pack, "fill", lambda stream, cursor, **how: filled.append(how["rows"]) or fill(stream, cursor, **how))
    packed(out, *tokens, vocab_size=BIG, budgets={"s": 12})
    assert filled == [4, 8, 8]
    before = shards(out)
    packed(out, *tokens, vocab_size=BIG, budgets={"s": 12, "m": 30})
    assert filled == [4, 8, 8, 8, 8] and all(shards(out)[name] == value for name, value in before.items())
    packed(out, *tokens, vocab_size=BIG, budgets={"m": 12})
    assert len(filled) == 5 and shards(out) == before and [path.name for path in (out / "budgets").iterdir()] == ["m.json"]
    whole = tmp_path / "whole"
    packed(whole, *tokens, vocab_size=BIG, budgets={"m": 12})
    drop = {"provenance.json"}
    assert {name: value for name, value in contents(out).items() if name not in drop} == {
        name: value for name, value in contents(whole).items() if name not in drop
    }


def test_keys_are_of_what_the_rows_depend_on(tokens):
    base = pack_spec(*tokens)
    same = pack_spec(*tokens, budgets={"other": 5}, epochs=7)
    assert pack.budget_key(base, 12) == pack.budget_key(same, 12) != pack.budget_key(base, 13)
    assert pack.shard_key(base, 0) == pack.shard_key(same, 0) and pack.validation_key(base) == pack.validation_key(same)
    for name, value in {
        "sequence_length": 17,
        "seed": 1,
        "window": 21,
        "shard_rows": 9,
        "vocab_size": 101,
        "bos": 1,
        "validation_rows": 5,
    }.items():
        other = pack_spec(*tokens, **{name: value})
        assert (pack.budget_key(other, 12) != pack.budget_key(base, 12)) == (name != "validation_rows")
        assert (pack.validation_key(other) != pack.validation_key(base)) == (name != "shard_rows")
    fewer = pack_spec(tokens[0][:1], tokens[1])
    assert pack.budget_key(fewer, 12) != pack.budget_key(base, 12) and pack.validation_key(fewer) != pack.validation_key(base)
    assert pack.budget_key(pack_spec(tokens[0], []), 12) == pack.budget_key(base, 12)


def test_an_epoch_holds_every_token_once_and_the_next_one_otherwise(tmp_path, tokens):
    packed(tmp_path / "p", *tokens, vocab_size=BIG, epochs=3, budgets={"s": 400})
    found = text(shard_rows(tmp_path / "p")[0])
    wanted = sorted(token for document in [*numbered(60), *numbered(30, seed=1, first=10_000)] for token in document)
    epochs = [found[start : start + len(wanted)] for start in range(0, len(found) - len(wanted), len(wanted))]
    assert len(epochs) >= 2 and all(sorted(epoch) == wanted for epoch in epochs) and epochs[0] != epochs[1]


# Too little


@pytest.mark.parametrize("budget, epochs, message", [
    (10_000, 1, r"Budget s wants 10,000 rows of 16 tokens; the training sources give .* in 1 epoch: .* tokens are missing"),
    (260, 1, r"260 rows of 16 tokens; .* packing.epochs to 2"),
    (1000, 5, r"in 5 epochs: .* packing.epochs to 6"),
])  # fmt: skip
def test_too_few_tokens_are_told_with_what_is_missing(tmp_path, tokens, budget, epochs, message):
    with pytest.raises(ValueError, match=message):
        packed(tmp_path / "p", *tokens, vocab_size=BIG, budgets={"s": budget}, epochs=epochs)
    assert not (tmp_path / "p" / "artifact.json").exists()


def test_the_limit_is_exact(tmp_path, tokens):
    """The largest budget that one epoch gives is packed, one row more is refused; also when the shards stand already."""
    packed(tmp_path / "two", *tokens, vocab_size=BIG, budgets={"s": 300}, epochs=2)
    count = sum(len(document) for document in [*numbered(60), *numbered(30, seed=1, first=10_000)])
    rows = shard_rows(tmp_path / "two")[0]
    most = next(row for row in range(len(rows)) if len(text(rows[: row + 1])) > count)
    for out in (tmp_path / "one", tmp_path / "two"):
        packed(out, *tokens, vocab_size=BIG, budgets={"s": most})
        with pytest.raises(ValueError, match=f"give {most:,} in 1 epoch: {LENGTH} tokens are missing"):
            packed(out, *tokens, vocab_size=BIG, budgets={"s": most + 1})


def test_no_training_tokens_and_too_few_for_validation(tmp_path, tokens):
    empty = make_tokens(tmp_path / "empty", [])
    with pytest.raises(ValueError, match="hold no tokens"):
        packed(tmp_path / "p", [empty], tokens[1])
    short = make_tokens(tmp_path / "short", [[1, 2, 3]], vocab_size=BIG)
    with pytest.raises(ValueError, match="hold 3 tokens, less than one row of 16"):
        packed(tmp_path / "p", tokens[0], [short], vocab_size=BIG)
    with pytest.raises(ValueError, match="hold no document of their own"):
        packed(tmp_path / "p", tokens[0], [], vocab_size=BIG)
    with pytest.raises(ValueError, match="there is no budget"):
        packed(tmp_path / "p", *tokens, vocab_size=BIG, budgets={})
    for wrong in ({"budgets": {"s": 0}}, {"sequence_length": 4}, {"more": 1}, {"epochs": 0}):
        with pytest.raises(ValueError, match="not pack's"):
            packed(tmp_path / "p", *tokens, vocab_size=BIG, **wrong)
    with pytest.raises(ValidationError):
        pack.Packing(sequence_length=16, shard_rows=0)


# Validation


def test_progress_says_how_far_it_is(tmp_path, tokens):
    lines: list[dict] = []
    packed(tmp_path / "p", *tokens, vocab_size=BIG, budgets={"s": 40}, context=Context(on_progress=lines.append))
    shards = [line for line in lines if "looking_for" not in line]
    assert [(line["step"], line["of"]) for line in shards] == [(step, 5) for step in range(1, 6)]
    assert shards[-1]["tokens"] == 40 * LENGTH and lines[0]["looking_for"] and lines[0]["step"] < lines[0]["of"]


def test_validation_leaves_out_what_is_in_training(tmp_path, tokens):
    own, shared = numbered(9, seed=4, first=70_000), [numbered(60)[5], numbered(30, seed=1, first=10_000)[7]]
    held = make_tokens(tmp_path / "held", [*own[:4], shared[0], *own[4:], shared[1], shared[0]], vocab_size=BIG, group=3)
    packed(tmp_path / "p", tokens[0], [held], vocab_size=BIG, validation_rows=1000)
    rows = np.array(schemas.read(tmp_path / "p" / "validation" / "rows.parquet", "packed")["tokens"].to_pylist())
    found = Counter(text(rows))
    assert set(found) <= {token for document in own for token in document} and set(found.values()) == {1}
    assert sum(found.values()) > sum(map(len, own)) - LENGTH  # all but what does not fill a row
    assert json.loads((tmp_path / "p" / "validation" / "counts.json").read_text()) == {"rows": len(rows), "also_in_training": 2}
    twice = make_tokens(tmp_path / "twice", [shared[0], shared[0]], vocab_size=BIG)
    with pytest.raises(ValueError, match="no document of their own .1 also occur"):
        packed(tmp_path / "q", tokens[0], [twice], vocab_size=BIG)


# Faults


@pytest.mark.parametrize("polls", [0, 1, 2])
def test_stopped_and_continued_is_the_same(tmp_path, tokens, polls):
    packed(tmp_path / "whole", *tokens, vocab_size=BIG, budgets={"s": 40})
    asked = iter(range(1000))
    blocks = len(Pieces(tokens[0], sequence_length=LENGTH, seed=0, window=20).blocks)
    with pytest.raises(Stopped):
        packed(
            tmp_path / "p",
            *tokens,
            vocab_size=BIG,
            budgets={"s": 40},
            context=Context(stop_requested=lambda: next(asked) > polls * blocks // 2 + polls),
        )
    assert not (tmp_path / "p" / "artifact.json").exists()
    packed(tmp_path / "p", *tokens, vocab_size=BIG, budgets={"s": 40})
    assert shards(tmp_path / "p") == shards(tmp_path / "whole")


def test_killed_and_continued_is_the_same(tmp_path, tokens):
    packed(tmp_path / "whole", *tokens, vocab_size=BIG, budgets={"s": 40})
    spec, out = pack_spec(*tokens, vocab_size=BIG, budgets={"s": 40}), tmp_path / "p"
    (tmp_path / "spec.json").write_text(json.dumps(spec.model_dump()))
    inputs = [f"{name}={folder}" for name, folder in zip(sorted(spec.inputs), [*tokens[0], *tokens[1]], strict=True)]
    code = f"""
import os, signal, sys
from stages import pack
from stages.command import main
write, calls = pack._write, []
def killed(path, *arguments):
    calls.append(1)
    if len(calls) == 4:
        path.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, *arguments)
pack._write = killed
main(pack.run, [{str(tmp_path / "spec.json")!r}, {str(out)!r}, *(word for one in sys.argv[1:] for word in ("--input", one))])
"""
    done = subprocess.run([sys.executable, "-c", code, *inputs], cwd=Path(__file__).parents[2], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert {path.name for path in (out / "shards").iterdir() if path.name[0] != "."} == {"00000", "00001"}
    packed(out, *tokens, vocab_size=BIG, budgets={"s": 40})
    assert {name: value for name, value in contents(out).items() if "prov" not in name and "progress" not in name} == {
        name: value for name, value in contents(tmp_path / "whole").items() if "prov" not in name
    }


@pytest.mark.parametrize(
    "name", ["shards/00001/rows.parquet", "shards/00001/cursor.json", "validation/rows.parquet", "budgets/s.json", "artifact.json"]
)
def test_what_is_damaged_is_made_again(tmp_path, tokens, name):
    out = tmp_path / "p"
    packed(out, *tokens, vocab_size=BIG, budgets={"s": 20})
    before = contents(out)
    (out / name).write_bytes((out / name).read_bytes()[:-5])
    packed(out, *tokens, vocab_size=BIG, budgets={"s": 20})
    after = contents(out)
    assert all(after[one] == value for one, value in before.items() if one != "provenance.json")


def test_shards_of_other_tokens_under_the_same_key_are_made_again(tmp_path, tokens):
    out = tmp_path / "p"
    packed(out, *tokens, vocab_size=BIG)
    before = shards(out)
    shutil.copytree(tokens[0][0], tmp_path / "other" / "a")
    other = make_tokens(tmp_path / "other" / "a", numbered(60, seed=9), vocab_size=BIG)
    packed(out, [other, tokens[0][1]], tokens[1], vocab_size=BIG)
    assert shards(out).keys() == before.keys() and shards(out) != before


def test_inputs_that_are_not_the_recorded_ones_are_refused(tmp_path, tokens):
    copy = shutil.copytree(tokens[0][0], tmp_path / "a")
    path = copy / "00000" / "tokens.parquet"
    whole = path.read_bytes()
    inputs = lambda: packed(tmp_path / "p", [copy, tokens[0][1]], tokens[1], vocab_size=BIG)  # noqa: E731
    path.write_bytes(whole[:-9])
    with pytest.raises(ValueError, match="tokens.parquet should have"):
        inputs()
    start = len(whole) // 3
    path.write_bytes(whole[:start] + bytes(40) + whole[start + 40 :])
    with pytest.raises(ValueError, match="tokens.parquet"):
        inputs()
    make_tokens(tmp_path / "b", numbered(60, seed=9), vocab_size=BIG)
    record = json.loads((copy / "artifact.json").read_text())
    shutil.copy(tmp_path / "b" / "00000" / "tokens.parquet", path)
    record["files"]["00000/tokens.parquet"]["size"] = path.stat().st_size
    del record[artifact.SEAL]
    (copy / "artifact.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="does not hold the data that was recorded"):
        inputs()
    (copy / "artifact.json").write_text(json.dumps(record | {"key": key_of("else")}))
    with pytest.raises(ValueError, match="other parameters"):
        inputs()


def test_memory_is_a_window_and_not_the_corpus(tmp_path):
    """Ten times the tokens take no more memory (numpy's and Arrow's)."""
    import tracemalloc

    peaks = []
    for documents in (300, 3000):
        folder = make_tokens(tmp_path / str(documents), [[1 + i % 90] * 800 for i in range(documents)], group=20)
        stream = Pieces([folder], sequence_length=256, seed=0, window=200)
        tracemalloc.start()
        cursor = Cursor()
        while cursor.epoch == 0:
            cursor = pack.fill(stream, cursor, rows=64, bos=BOS).cursor
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]
