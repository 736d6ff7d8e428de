"""Evaluation: what is scored, unit by unit, and that nothing complete is computed again."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages import artifact, engine, evaluate, measures, schemas, train
from stages.evaluation import sequences as cut
from stages.evaluation.parameters import Evaluation, Parameters
from stages.evaluation.texts import texts
from stages.spec import LeaseLost, Spec, Stopped, canonical
from tests.stages.small_study import (
    BOS,
    GLA,
    LENGTH,
    MESA,
    VOCABULARY,
    context,
    evaluate_spec,
    key_of,
    make_packed,
    make_tokens,
    train_spec,
)

ROOT = Path(__file__).parents[2]
BOOKS = [5, 30, 1, 16, 8, 9, 17, 40]
LINES = [3, 7, 2]
FEW = {"cg-1": {"steps": 1, "eps": 0.0}}


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> dict[str, Path]:
    """The inputs of an evaluation: weights of a Mesa and of a GLA, validation rows, two text sets."""
    folder = tmp_path_factory.mktemp("study")
    budget = make_packed(folder / "packed")
    for name, model in (("mesa", MESA), ("gla", GLA)):
        (folder / name).mkdir()
        train.run(train_spec(model=model), folder / name, {"budget": budget}, context()[0])
    make_tokens(folder / "books", lengths=BOOKS, seed=1)
    make_tokens(folder / "lines", lengths=LINES, seed=2)
    return {
        "mesa": folder / "mesa", "gla": folder / "gla", "validation": folder / "packed" / "validation",
        "evaluation/books": folder / "books", "evaluation/lines": folder / "lines",
    }  # fmt: skip


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


def spec_of(model: dict[str, Any] = MESA, **changes: Any) -> Spec:
    return evaluate_spec(**{"weights": train_spec(model=model), "sets": ["books", "lines"], "lengths": [8, 16]} | changes)


def do(spec: Spec, out: Path, study: dict[str, Path], **changes: Any) -> list[str]:
    """Evaluate; the names of the units that were computed."""
    out.mkdir(exist_ok=True)
    given, _ = context(**changes)
    weights = study["mesa" if spec.parameters["model"]["layer"] == "mesa" else "gla"]
    evaluate.run(spec, out, {name: study.get(name, weights) for name in spec.inputs}, given)
    return json.loads((out / "provenance.json").read_text())["computed"]


def nlls(folder: Path) -> list[dict[str, Any]]:
    return schemas.read(folder / "nll.parquet", "nll").to_pylist()


# What is scored


def test_windows_by_hand():
    document = np.array([11, 12, 13, 14, 15])
    found = list(cut.windows([("a", document), ("b", document[:2]), ("c", document[:0])], length=2, bos=0))
    assert [(w.source, w.start, w.tokens.tolist()) for w in found] == [
        ("a", 0, [0, 11, 12]), ("a", 2, [12, 13, 14]), ("a", 4, [14, 15]), ("b", 0, [0, 11, 12]),
    ]  # fmt: skip


def test_every_token_of_every_document_is_scored_once(out, study):
    do(spec_of(GLA), out, study)
    for length in (8, 16):
        found = nlls(out / f"books-{length}")
        assert [len(row["nll"]) for row in found] == [min(length, n - start) for n in BOOKS for start in range(0, n, length)]
        assert [row["start"] for row in found] == [start for n in BOOKS for start in range(0, n, length)]
        assert [row["sequence"] for row in found] == list(range(len(found)))
        assert {row["source"] for row in found} == {"odd", "even"} and {(row["set"], row["length"]) for row in found} == {("books", length)}


def test_a_set_of_several_domains_has_losses_by_each(out, study):
    do(spec_of(settings=FEW), out, study)
    found = schemas.read(out / "domains.parquet", "domains").to_pylist()
    assert [(row["set"], row["length"], row["setting"], row["source"]) for row in found][:4] == [
        ("books", 8, "", "even"), ("books", 8, "", "odd"), ("books", 8, "cg-1", "even"), ("books", 8, "cg-1", "odd"),
    ]  # fmt: skip
    for row in found:
        unit = "-".join([row["set"], str(row["length"]), *([row["setting"]] if row["setting"] else [])])
        own = [np.array(one["nll"]) for one in nlls(out / unit) if one["source"] == row["source"]]
        assert row["perplexity"] == pytest.approx(measures.perplexity(own)) and row["sequences"] == len(own)
        assert row["tokens"] == sum(map(len, own)) and row["nll"] == pytest.approx(np.concatenate(own).astype(float).mean())
    assert not (out / f"validation-{LENGTH}" / "domains.parquet").exists()  # of one


def test_losses_are_the_models(out, study):
    import models
    from models import checkpoint
    from models.backends.torch import to_arrays

    do(spec_of(GLA), out, study)
    parameters = train_spec().parameters
    model = models.build(GLA, parameters["scale"], vocab_size=VOCABULARY)
    weights = to_arrays(checkpoint.load(study["gla"] / train.WEIGHTS)[0])
    documents = [
        row["tokens"]
        for n in (0, 1)
        for row in schemas.read(study["evaluation/books"] / f"{n:05d}" / "tokens.parquet", "tokens").to_pylist()
    ]
    window = [BOS, *documents[1]][16 : 16 + 15]  # the second window of a document of 30
    logits = model.forward(weights, np.array([window[:-1]])).detach().numpy().astype(np.float64)[0]
    expected = [np.log(np.exp(row).sum()) - row[target] for row, target in zip(logits, window[1:], strict=True)]
    (found,) = (row["nll"] for row in nlls(out / "books-16") if row["start"] == 16 and len(row["nll"]) == 14)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_bos_is_not_scored_in_the_validation_rows(out, study):
    do(spec_of(GLA), out, study)
    rows = schemas.read(study["validation"] / "rows.parquet", "packed")["tokens"].to_pylist()
    found = nlls(out / f"validation-{LENGTH}")
    assert len(found) == len(rows) == 9
    for row, tokens in zip(found, rows, strict=True):
        assert np.isnan(row["nll"]).tolist() == [token == BOS for token in tokens[1:]]
        assert (row["set"], row["source"], row["start"]) == ("validation", "validation", 0)


def test_validation_follows_reset(study, tmp_path):
    do(spec_of(GLA, sets=[]), tmp_path / "plain", study)
    do(spec_of(GLA, sets=[], reset=True), tmp_path / "reset", study)
    rows = schemas.read(study["validation"] / "rows.parquet", "packed")["segments"].to_pylist()
    for pieces, plain, reset in zip(
        rows, *(nlls(folder / f"validation-{LENGTH}") for folder in (tmp_path / "plain", tmp_path / "reset")), strict=True
    ):
        first = pieces[0]
        np.testing.assert_allclose(plain["nll"][: first - 1], reset["nll"][: first - 1], rtol=1e-5)
        assert not np.allclose(plain["nll"][first:], reset["nll"][first:], rtol=1e-5)


def test_perplexity_and_positions_follow_from_nll(out, study):
    do(spec_of(settings=FEW), out, study)
    table = {(row["set"], row["length"], row["setting"]): row for row in schemas.read(out / "perplexity.parquet", "perplexity").to_pylist()}
    sets = [("validation", LENGTH), ("books", 8), ("books", 16), ("lines", 8), ("lines", 16)]
    assert list(table) == [(*where, setting) for where in sets for setting in ("", "cg-1")]
    for (name, length, setting), row in table.items():
        found = nlls(out / "-".join(filter(None, (name, str(length), setting))))
        assert row["perplexity"] == pytest.approx(measures.perplexity([np.array(one["nll"]) for one in found]))
        assert row["nll"] == pytest.approx(np.log(row["perplexity"])) and row["sequences"] == len(found)
        assert row["tokens"] == sum(np.isfinite(one["nll"]).sum() for one in found)
    positions = schemas.read(out / "positions.parquet", "positions").to_pylist()
    nll_sum, count = measures.by_position([np.array(row["nll"]) for row in nlls(out / "books-16") if row["start"] == 0])
    mine = [row for row in positions if (row["set"], row["length"]) == ("books", 16)]
    assert [row["position"] for row in mine] == list(range(1, 17)) and [row["count"] for row in mine] == count.tolist()
    assert [row["nll_sum"] for row in mine] == pytest.approx(nll_sum.tolist())
    assert count.tolist() == [sum(n >= k for n in BOOKS) for k in range(1, 17)]


def test_solver_steps_and_residual_are_reported(out, study):
    do(spec_of(settings=FEW | {"none": {"solve": False}}), out, study)
    rows = {(row["set"], row["length"], row["setting"]): row for row in schemas.read(out / "perplexity.parquet", "perplexity").to_pylist()}
    trained, one = rows["books", 16, ""], rows["books", 16, "cg-1"]
    assert 1 < trained["steps_taken"] <= 4 and one["steps_taken"] == pytest.approx(1)
    assert 0 <= trained["residual"] < one["residual"]


def test_a_loss_that_is_no_number_counts_as_infinite(out, study, monkeypatch):
    make = engine.trainer

    class Failing:
        def __init__(self, trainer: Any) -> None:
            self.load_weights = trainer.load_weights

        def nll(self, tokens: np.ndarray, **_: Any) -> tuple[np.ndarray, dict[str, float]]:
            return np.full((len(tokens), tokens.shape[1] - 1), np.nan, np.float32), {}

    monkeypatch.setattr(engine, "trainer", lambda *given, **options: Failing(make(*given, **options)))
    do(spec_of(GLA), out, study)
    assert {row["perplexity"] for row in schemas.read(out / "perplexity.parquet", "perplexity").to_pylist()} == {np.inf}


# Batches


def test_batches_hold_one_length_class_and_every_sequence_once():
    lengths = [1, 2, 3, 5, 8, 9, 12, 12, 12, 4]
    sequences = [cut.Sequence(np.arange(n + 1, dtype=np.int32), "a") for n in lengths]
    found = list(cut.batches(sequences, longest=12, batch_tokens=24))
    assert sorted(index for _, batch in found for index in batch) == list(range(10))
    for length, batch in found:
        assert len(batch) * length <= 24 and all(length / 2 < lengths[index] <= length or length == 12 for index in batch)
    assert [len(batch) for _, batch in cut.batches(sequences, longest=12, batch_tokens=1)] == [1] * 10


def test_padding_is_marked_and_nothing_is_where_nothing_is_padded():
    whole, half = (cut.Sequence(np.arange(1, n + 2, dtype=np.int32), "a") for n in (4, 2))
    tokens, segments = cut.padded([whole, half], length=4, bos=0)
    assert tokens.tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, 0, 0]] and segments.tolist() == [[0, 0, 0, 0], [0, 0, -1, -1]]
    assert cut.padded([whole], length=4, bos=0)[1] is None


@pytest.mark.parametrize("model", [MESA, GLA, {"layer": "attention"}])
def test_results_do_not_depend_on_the_batch_size(tmp_path, study, model, monkeypatch):
    spec = evaluate_spec(weights=train_spec(model=model), sets=["books", "lines"], lengths=[16])
    if model["layer"] == "attention":
        (tmp_path / "weights").mkdir()
        train.run(
            train_spec(model=model, steps=3),
            tmp_path / "weights",
            {"budget": study["validation"].parent / "budgets" / "small.json"},
            context()[0],
        )
        study = study | {"gla": tmp_path / "weights"}
        spec = evaluate_spec(weights=train_spec(model=model, steps=3), sets=["books", "lines"], lengths=[16])
    do(spec, tmp_path / "large", study)
    monkeypatch.setattr(cut, "POOL_TOKENS", 40)
    do(spec, tmp_path / "small", study, settings={"batch_tokens": 1})
    for unit in ("books-16", "lines-16", f"validation-{LENGTH}"):
        for a, b in zip(nlls(tmp_path / "large" / unit), nlls(tmp_path / "small" / unit), strict=True):
            np.testing.assert_allclose(a.pop("nll"), b.pop("nll"), rtol=2e-4, atol=1e-5)
            assert a == b
    one, other = (schemas.read(tmp_path / name / "perplexity.parquet", "perplexity") for name in ("large", "small"))
    if model is MESA:
        assert one["steps_taken"].to_pylist() == pytest.approx(other["steps_taken"].to_pylist(), rel=0.02)


# Units


def test_only_what_is_missing_is_computed(out, study):
    assert len(do(spec_of(), out, study)) == 5
    kept = {path: path.stat().st_mtime_ns for path in out.glob("*/nll.parquet")}
    assert do(spec_of(settings=FEW), out, study) == [
        f"validation-{LENGTH}-cg-1",
        "books-8-cg-1",
        "books-16-cg-1",
        "lines-8-cg-1",
        "lines-16-cg-1",
    ]
    assert do(spec_of(settings=FEW, lengths=[8, 16, 32], sets=["books"]), out, study) == ["books-32", "books-32-cg-1"]
    assert not list(out.glob("lines-*"))
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items() if path.exists())
    assert artifact.read(out, key=spec_of(settings=FEW, lengths=[8, 16, 32], sets=["books"]).key, content=True)


def test_one_new_setting_at_one_length_is_one_unit(out, study):
    few = {"sets": [], "lengths": [8]}
    do(spec_of(**few), out, study)
    assert do(spec_of(**few, settings=FEW), out, study) == [f"validation-{LENGTH}-cg-1"]


def test_settings_are_asked_at_the_lengths_that_are_named(out, study):
    everywhere = do(spec_of(settings=FEW), out, study)
    fewer = spec_of(settings=FEW, settings_lengths=[16])
    assert do(fewer, out, study) == []  # what is there has the same keys
    left = {path.parent.name for path in out.glob("*/artifact.json")}
    assert left == set(everywhere) - {"books-8-cg-1", "lines-8-cg-1"} and f"validation-{LENGTH}-cg-1" in left
    with pytest.raises(ValueError, match="settings_lengths has 9"):
        Evaluation(lengths=[8], settings_lengths=[9])


def test_a_setting_renamed_is_not_computed_again_when_units_are_shared(tmp_path, study):
    keys = [
        {unit.name: unit.key for unit in texts(spec, Parameters.model_validate(spec.parameters), _model(spec))}
        for spec in (spec_of(settings={"a": {"steps": 1}}), spec_of(settings={"b": {"steps": 1, "eps": None}}))
    ]
    assert list(keys[0].values()) == list(keys[1].values()) and len(set(keys[0].values())) == 10


def _model(spec: Spec) -> Any:
    import models

    return models.build(spec.parameters["model"], spec.parameters["scale"], vocab_size=VOCABULARY)


def test_models_without_a_solver_take_no_settings(out, study):
    assert do(spec_of(GLA, settings=FEW), out, study) == [f"validation-{LENGTH}", "books-8", "books-16", "lines-8", "lines-16"]


def test_unit_keys_follow_what_they_depend_on():
    def keys(**changes: Any) -> list[str]:
        spec = spec_of(**{"sets": ["books"], "lengths": [8]} | changes)
        return [unit.key for unit in texts(spec, Parameters.model_validate(spec.parameters), _model(spec))]

    base = keys()
    assert keys(lengths=[8, 16])[:2] == base and keys(sets=["books", "lines"])[:2] == base
    other = keys(weights=train_spec(model=MESA, seed=1))
    assert not set(other) & set(base)


def test_stop_keeps_what_is_complete(out, study):
    polls = iter([False] * 6 + [True] * 9)
    with pytest.raises(Stopped, match="run again to go on"):
        do(spec_of(), out, study, stop_requested=lambda: next(polls))
    done = {path.parent.name for path in out.glob("*/artifact.json")}
    assert done and not (out / artifact.NAME).exists() and not list(out.glob(".partial-*"))
    assert set(do(spec_of(), out, study)) == {f"validation-{LENGTH}", "books-8", "books-16", "lines-8", "lines-16"} - done


def test_a_damaged_unit_is_made_again(out, study):
    do(spec_of(), out, study)
    path = out / "books-8" / "nll.parquet"
    path.write_bytes(path.read_bytes()[:100])
    assert do(spec_of(), out, study) == ["books-8"]


def test_a_full_disk_leaves_no_half_unit(out, study, monkeypatch):
    def full(path: Path, *_: Any, **options: Any) -> str:
        if "books-16" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, *_, **options)

    write = schemas.write
    with monkeypatch.context() as patch:
        patch.setattr(schemas, "write", full)
        with pytest.raises(ValueError, match="is full"):
            do(spec_of(), out, study)
    assert {path.name for path in out.iterdir()} == {f"validation-{LENGTH}", "books-8"}
    assert do(spec_of(), out, study) == ["books-16", "lines-8", "lines-16"]


def test_a_lost_lease_writes_no_more(out, study):
    fences = iter([False] * 3 + [True] * 9)

    def fence() -> None:
        if next(fences):
            raise LeaseLost("taken over")

    with pytest.raises(LeaseLost):
        do(spec_of(), out, study, fence=fence)
    assert {path.name for path in out.iterdir()} == {f"validation-{LENGTH}"}


# Inputs and parameters


@pytest.mark.parametrize("name", ["mesa", "validation", "evaluation/books"])
def test_an_input_that_is_not_the_recorded_one_is_refused(out, study, tmp_path, name):
    import shutil

    copy = shutil.copytree(study[name], tmp_path / "copy")
    file = next(path for path in sorted(copy.rglob("*")) if path.suffix in (".parquet", ".safetensors") and path.name != "history.parquet")
    data = bytearray(file.read_bytes())
    data[100:164] = bytes(64)
    file.write_bytes(data)
    with pytest.raises(ValueError, match="copy"):
        do(spec_of(), out, study | {name: copy})
    assert not list(out.glob("*/nll.parquet"))


def test_weights_of_another_key_are_refused(out, study):
    with pytest.raises(ValueError, match="made under key"):
        do(spec_of(weights=train_spec(model=MESA, seed=1)), out, study)


@pytest.mark.parametrize(
    "change", [{"lengths": [0]}, {"settings": {"a": {}}}, {"settings": {"a": {"step": 3}}}, {"settings": {"a/b": {"steps": 3}}}]
)
def test_parameters_that_make_no_sense_are_refused(out, study, change):
    with pytest.raises(ValueError, match="parameters are not valid"):
        do(spec_of(**change), out, study)


def test_batch_tokens_are_no_identity():
    assert Evaluation(lengths=[8], batch_tokens=5).model_dump() == {
        "lengths": [8], "settings": {}, "settings_lengths": None, "internals": 0,
    }  # fmt: skip


def test_alone_on_the_command_line(out, study, tmp_path):
    spec = spec_of(GLA, sets=["lines"], lengths=[8])
    (tmp_path / "spec.json").write_text(canonical(spec.model_dump()))
    paths = {"weights": study["gla"], "validation": study["validation"], "evaluation/lines": study["evaluation/lines"]}
    given = [part for name, path in paths.items() for part in ("--input", f"{name}={path}")]
    subprocess.run(
        [sys.executable, "-m", "stages.evaluate", tmp_path / "spec.json", out, *given, "--threads", "1"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    assert artifact.read(out, key=spec.key, content=True)
    do(spec, tmp_path / "here", study)
    assert artifact.read(out)["digest"] == artifact.read(tmp_path / "here")["digest"]


def test_keys_of_the_inputs_are_the_studys():
    assert spec_of().inputs["evaluation/books"] == key_of("books")
