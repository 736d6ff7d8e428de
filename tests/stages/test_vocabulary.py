"""Vocabularies and tokenizers: GPT-2's, trained ones, and that what encodes fast encodes right."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from stages import artifact, documents, sources, tokenizer, vocabulary
from stages.spec import Spec
from stages.vocabulary import Vocabulary
from tests.stages.small_corpus import GPT2, WORDS, bpe_spec, context, make_vocabulary, texts, write_lines

WIKITEXT = os.environ.get("STRATA_WIKITEXT")  # the Parquet file of WikiText-2's raw test split, which is not the repository's
KINDS = ("gpt2", "bpe")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("vocabularies")
    lines = write_lines(folder / "text.jsonl", [{"text": text} for text in texts(200)])
    return {"gpt2": make_vocabulary(folder / "gpt2"), "bpe": make_vocabulary(folder / "bpe", bpe_spec(), {"text": [str(lines)]})}


@pytest.fixture(scope="module")
def loaded(folders) -> dict[str, tokenizer.Tokenizer]:
    return {kind: tokenizer.load(folder, 1) for kind, folder in folders.items()}


def binary(*given: str | bytes) -> pa.Array:
    return pa.array([text.encode() if isinstance(text, str) else text for text in given], pa.large_binary())


def reference(encoder: tokenizer.Tokenizer, text: str) -> list[int]:
    return encoder._plain_tokens(text.encode()).tolist()


# Vocabularies


def test_gpt2_is_shipped_and_known(folders):
    record = json.loads((folders["gpt2"] / "tokenizer.json").read_text())
    assert record == {"kind": "gpt2", "size": 50257, "bos": 50256, "digest": tokenizer.GPT2_SHA256}
    assert artifact.read(folders["gpt2"], key=GPT2.key, content=True)["inputs"] == {}
    assert (tokenizer.gpt2_file().parent / "gpt2.LICENSE").read_text().startswith("MIT License")
    assert Vocabulary(kind="gpt2").bos == 50256 and Vocabulary(kind="gpt2").size == 50257 and Vocabulary(kind="bpe", size=300).bos == 0


def test_a_shipped_file_that_is_not_openais_is_refused(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "gpt2.tiktoken").write_bytes(tokenizer.gpt2_file().read_bytes()[:-1])
    monkeypatch.setattr(tokenizer.resources, "files", lambda _: tmp_path)
    with pytest.raises(ValueError, match="not OpenAI's vocabulary"):
        tokenizer.gpt2_file()


def test_a_trained_vocabulary_is_the_same_each_time(tmp_path, folders):
    lines = write_lines(tmp_path / "text.jsonl.zst", [{"text": text} for text in texts(200)])
    again = make_vocabulary(tmp_path / "again", bpe_spec(), [str(lines)])
    assert (again / "bpe.json").read_bytes() == (folders["bpe"] / "bpe.json").read_bytes()
    assert artifact.read(again, content=True)["digest"] == artifact.read(folders["bpe"])["digest"]
    record = json.loads((again / "tokenizer.json").read_text())
    assert (record["kind"], record["size"], record["bos"]) == ("bpe", 300, 0)
    assert json.loads((again / "bpe.json").read_text())["model"]["vocab"]["<|endoftext|>"] == 0


def test_a_vocabulary_is_trained_on_the_first_text_of_every_source(tmp_path):
    files = {name: [str(write_lines(tmp_path / f"{name}.jsonl", [{"text": word * 3} for word in words]))] for name, words in
             {"b": [" zebra zebra"] * 50, "a": [" apple apple"] * 50 + [" never"] * 5000}.items()}  # fmt: skip
    spec = bpe_spec(267, megabytes=0.003, sources={"a": {}, "b": {}})
    lines: list[dict] = []
    out = tmp_path / "v"
    vocabulary.run(spec, out, {}, context(files, on_progress=lines.append))
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines) and {line["of"] for line in lines} == {3000}
    assert lines[0]["source"] == "a" and lines[-1]["source"] == "b" and lines[-1]["step"] == 3000
    words = set(json.loads((out / "bpe.json").read_text())["model"]["vocab"])
    assert {"Ġapple", "Ġzebra"} <= words and not any("ev" in word for word in words)


@pytest.mark.parametrize("spec, message", [
    (bpe_spec(5000), "give .* entries, wanted 5000"),
    (bpe_spec(sources={}), "this spec has none"),
    (bpe_spec(sources={"text": {"pin": "sha256:" + "0" * 64}}), "strata lock-data"),
    (bpe_spec(sources={"text": {"colum": "x"}}), "not vocabulary's"),
])  # fmt: skip
def test_what_cannot_be_trained_on_is_refused(tmp_path, spec, message):
    lines = write_lines(tmp_path / "x.jsonl", [{"text": text} for text in texts(20)])
    with pytest.raises(ValueError, match=message):
        vocabulary.run(spec, tmp_path / "v", {}, context({"text": [str(lines)]}))
    assert not (tmp_path / "v" / "artifact.json").exists()


def test_a_remote_source_changed_under_its_pin_is_refused_before_anything_is_made(tmp_path):
    memory = fsspec.filesystem("memory")
    remote = "memory://vocabulary/text.jsonl"
    given = write_lines(tmp_path / "text.jsonl", [{"text": text} for text in texts(200)])
    local = str(write_lines(tmp_path / "local.jsonl", [{"text": text} for text in texts(200, seed=1)]))
    pins = {"local": sources.pin([local]), "remote": sources.pin([str(given)])}
    spec = bpe_spec(sources={name: {"pin": pin} for name, pin in pins.items()})
    files = {"local": [local], "remote": [remote]}
    try:
        memory.pipe(remote, given.read_bytes())
        assert (make_vocabulary(tmp_path / "kept", spec, files) / "bpe.json").exists()
        memory.pipe(remote, given.read_bytes() + b'{"text": "one more"}\n')
        lines: list[dict] = []
        with pytest.raises(ValueError, match="'remote' are not the pinned ones"):
            vocabulary.run(spec, tmp_path / "v", {}, context(files, on_progress=lines.append))
    finally:
        memory.rm("/vocabulary", recursive=True)
    assert not lines and not list((tmp_path / "v").iterdir())


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "gpt2", "size": 50000},
        {"kind": "gpt2", "megabytes": 8.0},
        {"kind": "bpe", "size": 256},
        {"kind": "word"},
        {"kind": "bpe", "size": 300, "megabytes": 0},
    ],
)
def test_a_wrong_vocabulary_is_refused(wrong):
    with pytest.raises(ValidationError):
        Vocabulary.model_validate(wrong)


def test_megabytes_are_part_of_a_trained_vocabulary_alone():
    assert Vocabulary(kind="gpt2").model_dump() == {"kind": "gpt2", "size": 50257}
    assert Vocabulary(kind="bpe", size=300).model_dump() == {"kind": "bpe", "size": 300, "megabytes": 8.0}
    for one in (Vocabulary(kind="gpt2"), Vocabulary(kind="bpe", size=300, megabytes=2.0)):
        assert Vocabulary.model_validate(one.model_dump()) == one


# Tokenizers


@pytest.mark.parametrize("kind", KINDS)
def test_the_fast_encoder_is_there(loaded, kind):
    pytest.importorskip("gigatoken")
    assert loaded[kind].encoder == "gigatoken" and loaded[kind].fallback is None


characters = st.characters(exclude_categories=["Cs"])
words = st.lists(
    st.sampled_from([*WORDS, " ", "\n", "\t", "\u00a0", "\u3000", "'s", "'LL", "<|endoftext|>", "\x1c", "a" * 50, "🙂"])
    | st.text(characters, max_size=3),
    max_size=12,
)


@settings(max_examples=120, deadline=None)
@given(given=st.lists(words.map("".join), min_size=1, max_size=4))
def test_every_token_is_the_references_and_the_text_comes_back(loaded, given):
    for encoder in loaded.values():
        found = encoder.encode(binary(*given))
        assert found.to_pylist() == [reference(encoder, text) for text in given]
        assert [encoder.decode(tokens) for tokens in found.to_pylist()] == given
        assert all(0 <= token < encoder.size for tokens in found.to_pylist() for token in tokens)


@settings(max_examples=80, deadline=None)
@given(text=words.map("".join), part=st.integers(8, 30))
def test_a_text_cut_at_safe_places_has_the_same_tokens(loaded, text, part):
    data = np.frombuffer(text.encode(), np.uint8)
    ends = list(tokenizer.cuts(data, 0, len(data), part))
    starts = [0, *ends[:-1]]
    assert ends[-1] == len(data) and all(b - a <= part for a, b in zip(starts, ends, strict=True))
    pieces = [data[a:b].tobytes().decode() for a, b in zip(starts, ends, strict=True)]  # whole characters
    safe = all(
        tokenizer.safe_cut(data, a, b) == b or data[a:b].tobytes().decode()[-1:].strip() and chr(data[b]) in " \n"
        for a, b in zip(starts, ends[:-1], strict=False)
    )
    if safe:
        for encoder in loaded.values():
            assert [token for piece in pieces for token in reference(encoder, piece)] == reference(encoder, text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_huge_document_is_one_document_with_the_tokens_of_the_whole(loaded, kind, monkeypatch):
    monkeypatch.setattr(tokenizer.cuts, "__defaults__", (1 << 12,))
    monkeypatch.setattr(tokenizer, "HUGE", 1 << 12)
    calls = []
    encoder = tokenizer.Tokenizer.__new__(tokenizer.Tokenizer)
    encoder.__dict__ |= loaded[kind].__dict__
    encoder._encode = lambda offsets, data: calls.append(np.diff(offsets).max()) or loaded[kind]._encode(offsets, data)
    given = ["short", " ".join(texts(400, longest=60)), "", "x" * 9000, "after"]
    found = encoder.encode(binary(*given)).to_pylist()
    assert calls and max(calls) <= 1 << 12
    assert found[:3] + found[4:] == [reference(encoder, text) for text in given[:3] + given[4:]]
    assert encoder.decode(found[3]) == given[3]


def test_slices_of_a_batch_are_read_where_they_are(loaded):
    whole = binary(*texts(10))
    for encoder in loaded.values():
        assert encoder.encode(whole.slice(3, 4)).to_pylist() == encoder.encode(whole).to_pylist()[3:7]
        assert len(encoder.encode(whole.slice(3, 0))) == 0
    assert loaded["gpt2"].encode(whole).type.value_type == pa.uint16()


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_encoder_is_found_and_left(folders, kind):
    encoder = tokenizer.load(folders[kind], 1)
    text = binary(*texts(10), " ".join(texts(500)))
    right = encoder.encode(text)
    assert all(encoder.difference(text, right, seed) is None for seed in range(11))
    wrong = pa.array([[*tokens[:-1], (tokens[-1] + 1) % encoder.size] for tokens in right.to_pylist()], right.type)
    found = [encoder.difference(text, wrong, seed) for seed in range(11)]
    assert sum(one is not None for one in found) == 10  # all but the long one, of which only the beginning is compared
    wrong = pa.array([[1, *tokens[1:]] for tokens in right.to_pylist()], right.type)
    assert all("gigatoken differs" in encoder.difference(text, wrong, seed) for seed in range(11))
    with pytest.warns(UserWarning, match="it is wrong.*slower, is used instead"):
        encoder.fall_back("it is wrong")
    assert encoder.encoder == encoder.reference and encoder.fallback == "it is wrong"
    assert encoder.encode(text).to_pylist() == right.to_pylist()


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_wheel_the_reference_is_used_and_says_so(folders, kind, monkeypatch):
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    with pytest.warns(UserWarning, match="gigatoken cannot be used here"):
        encoder = tokenizer.load(folders[kind])
    assert encoder.encoder == encoder.reference in ("tiktoken", "tokenizers")
    assert encoder.encode(binary("a <|endoftext|> b", "x")).to_pylist() == [
        reference(encoder, "a <|endoftext|> b"),
        reference(encoder, "x"),
    ]


@pytest.mark.parametrize("name", ["tokenizer.json", "bpe.json"])
def test_a_damaged_vocabulary_is_refused(tmp_path, folders, name):
    copy = shutil.copytree(folders["bpe"], tmp_path / "v")
    (copy / name).write_text((copy / name).read_text()[:-20])
    with pytest.raises(ValueError, match=f"{name} is not .*make the vocabulary again"):
        tokenizer.load(copy)
    (copy / name).unlink()
    with pytest.raises(ValueError, match="make the vocabulary again"):
        tokenizer.load(copy)


def test_the_text_of_the_special_token_is_ordinary_text(loaded):
    for encoder in loaded.values():
        [tokens] = encoder.encode(binary(f"a{documents.SPECIAL.decode()}b")).to_pylist()
        assert encoder.bos not in tokens and encoder.decode([encoder.bos]) == "<|endoftext|>"


@pytest.mark.skipif(not WIKITEXT, reason="STRATA_WIKITEXT names no Parquet file of WikiText-2")
def test_wikitext_has_the_known_number_of_gpt2_tokens(loaded):
    lines = "".join(pq.read_table(WIKITEXT)["text"].to_pylist()).split("\n")
    text = "\n\n".join(line + "\n" if line.strip() else "" for line in lines)  # the rows of the data set, joined by blank lines as is usual
    assert len(loaded["gpt2"].encode(binary(text)).values) == 287_644


def test_specs_of_other_kinds_have_other_keys():
    assert (
        len(
            {
                GPT2.key,
                bpe_spec().key,
                bpe_spec(301).key,
                Spec(stage="vocabulary", versions={"vocabulary": 2}, parameters={"kind": "gpt2"}).key,
            }
        )
        == 4
    )
