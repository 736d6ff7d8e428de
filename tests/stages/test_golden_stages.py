"""The numbers of every stage stand still while its version does.

When they move on purpose, raise the version in stages/versions.yaml and write them anew:
STRATA_GOLDEN=write python -m pytest tests/stages/test_golden_stages.py
Numbers are written under a new version alone. Where it is a test's own input that changes, delete its file in golden/ first.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from stages import artifact, evaluate, schemas, tokenizer, train
from stages.report import tables
from stages.report.parameters import Parameters
from stages.report.study import Study
from stages.spec import fingerprint
from stages.tasks import results
from stages.tasks.entry import Generated, Scoring
from stages.tasks.generate import generate
from tests.stages import made_up_study, small_corpus
from tests.stages.small_study import GLA, context, evaluate_spec, make_packed, make_tokens, train_spec
from tests.stages.tasks import small_tasks

FOLDER = Path(__file__).parent / "golden"
VERSIONS = yaml.safe_load((Path(__file__).parents[2] / "stages" / "versions.yaml").read_text())
DIGITS = 6  # of the analysis' numbers, whose last ones differ between processors


def hold(name: str, versions: dict[str, int], found: dict[str, Any], *, rel: float | None = None) -> None:
    """Fail where what was found is not what golden/<name>.json holds for these versions. rel: found are numbers, and may differ by so much."""
    file = FOLDER / f"{name}.json"
    if os.environ.get("STRATA_GOLDEN") == "write" and not (file.exists() and json.loads(file.read_text())["versions"] == versions):
        file.write_text(json.dumps({"versions": versions} | found, indent=1) + "\n")
    golden = json.loads(file.read_text())
    assert golden["versions"] == versions, "a version was raised: write the golden numbers anew"
    for part, value in found.items():
        assert value == (pytest.approx(golden[part], rel=rel) if rel else golden[part]), f"{part} moved and no version did"


def of_stages(*names: str) -> dict[str, int]:
    return {name: VERSIONS["stages"][name] for name in names}


def test_numbers_that_move_under_the_same_version_fail(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "FOLDER", tmp_path)
    monkeypatch.setenv("STRATA_GOLDEN", "write")
    hold("made_up", {"made_up": 1}, {"digest": "a", "rows": 3})
    with pytest.raises(AssertionError, match="digest moved and no version did"):
        hold("made_up", {"made_up": 1}, {"digest": "b", "rows": 3})
    hold("made_up", {"made_up": 2}, {"digest": "b", "rows": 3})
    monkeypatch.delenv("STRATA_GOLDEN")
    with pytest.raises(AssertionError, match="a version was raised"):
        hold("made_up", {"made_up": 3}, {"digest": "b", "rows": 3})


def test_a_trained_vocabulary(tmp_path):
    lines = small_corpus.write_lines(tmp_path / "text.jsonl", [{"text": text} for text in small_corpus.texts(100)])
    out = small_corpus.make_vocabulary(tmp_path / "vocabulary", small_corpus.bpe_spec(), {"text": [str(lines)]})
    hold("vocabulary", of_stages("vocabulary"), {"bpe": artifact.file_digest(out / "bpe.json")})


def test_a_tokenized_file(tmp_path):
    """By the shipped vocabulary, so that this stands for tokenize alone."""
    folder = small_corpus.make_vocabulary(tmp_path / "vocabulary")
    documents = [{"text": text} for text in [*small_corpus.texts(60), "", "<|endoftext|>", "\ud55c\uae00 \U0001f642\n\n\tcode  "]]
    out = small_corpus.tokenized(tmp_path / "tokens", folder, [small_corpus.write_lines(tmp_path / "text.jsonl", documents)])
    digest = schemas.metadata(out / "00000" / "tokens.parquet", "tokens")["strata.digest"]
    hold("tokenize", of_stages("tokenize"), {"tokens": digest})


def test_packed_rows(tmp_path):
    """Of two sources, over two epochs, with validation documents that occur in training."""
    documents = {name: [[10 * seed + i % 90 + 1] * (1 + 7 * i % 40) for i in range(40)] for seed, name in enumerate(("a", "b"))}
    training = [small_corpus.make_tokens(tmp_path / name, those, vocab_size=128) for name, those in documents.items()]
    held = small_corpus.make_tokens(tmp_path / "held", [*documents["a"][3:6], *([[i, 1, i, 2] * 9 for i in range(3, 12)])], vocab_size=128)
    out = tmp_path / "packed"
    small_corpus.packed(out, training, [held], vocab_size=128, shard_rows=40, budgets={"s": 12, "l": 150}, epochs=2)
    budgets = {name: json.loads((out / "budgets" / f"{name}.json").read_text()) for name in ("s", "l")}
    assert json.loads((out / "validation" / "counts.json").read_text())["also_in_training"] == 3
    found = {
        "shards": [digest for _, digest, _ in budgets["l"]["shards"]],
        "budgets": {name: budget["digest"] for name, budget in budgets.items()},
        "validation": schemas.metadata(out / "validation" / "rows.parquet", "packed")["strata.digest"],
    }
    hold("pack", of_stages("pack"), found)


def test_losses_and_perplexities(tmp_path):
    versions = of_stages("train", "evaluate") | VERSIONS["model"] | {"gla": VERSIONS["layers"]["gla"]}
    budget = make_packed(tmp_path / "packed")
    training = train_spec(steps=20, model=GLA)
    evaluation = evaluate_spec(weights=training, sets=["books"], lengths=[8, 16])
    for name in ("weights", "evaluation"):
        (tmp_path / name).mkdir()
    train.run(training, tmp_path / "weights", {"budget": budget}, context()[0])
    inputs = {
        "weights": tmp_path / "weights",
        "validation": tmp_path / "packed" / "validation",
        "evaluation/books": make_tokens(tmp_path / "books", lengths=[5, 30, 17]),
    }
    evaluate.run(evaluation, tmp_path / "evaluation", inputs, context()[0])
    loss = schemas.read(tmp_path / "weights" / "history.parquet", "history")["loss"].to_pylist()
    perplexity = schemas.read(tmp_path / "evaluation" / "perplexity.parquet", "perplexity")["perplexity"].to_pylist()
    hold("train_evaluate", versions, {"loss": loss, "perplexity": perplexity}, rel=1e-4)


def test_an_analysis_tables(tmp_path):
    """All but throughput, and the ledger's hours and throughput, which are timings; under the names of cells, a set and a task that the paper prints figures of."""
    cell, score = made_up_study.cell, made_up_study.score
    cells = [cell(model, layer="attention" if model == "transformer" else model, learning_rate=1e-3) for model in ("transformer", "mesa")]
    cells += [cell(f"swa-{window}", layer="attention", window=window, group="references") for window in (4, 16, 64)]
    cells += [
        cell("gla", scale, entry="gla", learning_rate=1e-3, parameters=size) for scale, size in (("nano", 10), ("small", 20), ("large", 40))
    ]
    cells += [cell("gla-slow", entry="gla", learning_rate=1e-4), cell("mesa_cg5", group="sweep", steps=5, layer="mesa"), cell("palimpsa_d")]
    scores = {
        one["model"]: [
            score("piqa", 30.0 + place, "local"),
            score("lambada", 7.0 * place, "global", kind="greedy"),
            score("needle", 9.0 * place, "niah-noise-256", kind="recall"),
        ]
        for place, one in enumerate(cells)
    }
    sets = {"validation": [made_up_study.LENGTH], "wikitext2": [made_up_study.LENGTH, 2048]}
    made_up_study.write_study(tmp_path, cells, sets=sets, sweep_on="mesa", scores=scores, domains=["books", "code"])
    spec = made_up_study.spec_of(cells, bootstrap=20, paper_names={"nano": "145M", "1m": "15B"})
    study = Study.load(Parameters.model_validate(spec.parameters), spec, made_up_study.inputs_of(tmp_path, spec))
    made = {name: make(study).to_pylist() for name, make in tables.TABLES.items() if name != "throughput"}
    assert all(made.values()) and "run" in {row["status"] for row in made["ledger"]}, "an empty table holds nothing still"
    made["ledger"] = [
        {name: value for name, value in row.items() if name != "accelerator_hours"}
        for row in made["ledger"]
        if row["table"] != "throughput"
    ]
    hold("analyze", of_stages("analyze"), {name: fingerprint([shortened(row) for row in rows]) for name, rows in made.items()})


def shortened(row: dict[str, Any]) -> dict[str, Any]:
    return {name: tables.rounded(value, DIGITS) if isinstance(value, float) else value for name, value in row.items()}


def test_generated_items(tmp_path):
    encoder = tokenizer.load(small_tasks.vocabulary(tmp_path / "vocabulary"), 1)
    settings = {make: {"make": make, "length": 1024} for make in ("niah", "variable_tracing", "common_words", "frequent_words")}
    many = {"keys": 4, "values": 2, "queries": 2, "key_type": "uuids", "haystack": "needles", "length": 1500}
    settings["niah-many"] = settings["niah"] | many
    found = {name: fingerprint(generate(Generated(samples=3, **one), encoder, None).to_pylist()) for name, one in settings.items()}
    versions = of_stages("items") | {name: VERSIONS["tasks"][name] for name in settings if name in VERSIONS["tasks"]}
    hold("items", versions, found)


def test_scored_tasks(tmp_path):
    """Every kind, with and without examples, by a reader whose answers are known: what is asked, and what an answer is worth."""
    encoder = tokenizer.load(small_tasks.vocabulary(tmp_path / "vocabulary"), 1)
    says = {
        "multiple_choice": lambda text: " red", "greedy": lambda text: " " + text.rsplit("\n", 1)[-1].removesuffix(" =")[::-1],
        "recall": lambda text: " Paris\n", "generation": lambda text: " the casino",
    }  # fmt: skip
    rows = {"multiple_choice": small_tasks.COLOURS, "recall": small_tasks.CAPITALS}
    found = {}
    for kind, say in says.items():
        how, given = Scoring(kind=kind), rows.get(kind, small_tasks.WORDS)
        for shots in (0, 2):
            engine = small_tasks.engine(encoder, say)
            answers = [
                (place, results.result(how, given[shots + place], *one, engine.decode))
                for place, _, *one in engine.evaluate(how, given[shots:], given[:shots])
            ]
            asked = sorted(text for batch in engine.reader.rows for text in batch)
            found[f"{kind}, {shots} shots"] = fingerprint([asked, [row for _, row in sorted(answers, key=lambda one: one[0])]])
    hold("tasks", {kind: VERSIONS["tasks"][kind] for kind in says}, found)
