"""Tasks in an evaluation: units with keys of their own, and scores that are the model's, whatever the batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import models
from models import checkpoint
from models.backends.torch import to_numpy
from stages import artifact, evaluate, items, schemas, sources
from stages.evaluation.asked import task_units
from stages.evaluation.parameters import Parameters
from stages.evaluation.texts import texts
from stages.spec import Spec, Stopped
from stages.tokenizer import GPT2_BOS, GPT2_SIZE, Tokenizer
from tests.stages.small_study import context, key_of
from tests.stages.tasks.small_tasks import CAPITALS, COLOURS, WORDS, vocabulary

SCALE = {"layers": 2, "width": 16, "heads": 2, "key_size": 8, "mlp": 16}
SHAPE = {"vocab_size": GPT2_SIZE, "bos": GPT2_BOS, "sequence_length": 128}
MESA = {"layer": "mesa", "steps": 4}
TASKS = {
    "colours": {"kind": "multiple_choice", "group": "local"},
    "capitals": {"kind": "recall", "new_tokens": 5},
    "words": {"kind": "greedy", "shots": [0, 2], "draws": 2, "limit": 5, "separator": "\n"},
    "writing": {"kind": "generation", "new_tokens": 5},
}
ROWS = {
    "colours": ("multiple_choice", COLOURS),
    "capitals": ("recall", CAPITALS),
    "words": ("prompt_target", WORDS),
    "writing": ("prompt_target", WORDS),
}
FEW = {"cg-1": {"steps": 1, "eps": 0.0}}


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> dict[str, Path]:
    """The inputs of an evaluation: a vocabulary, items, weights of four models, as they are drawn."""
    folder = tmp_path_factory.mktemp("study")
    artifact.write(vocabulary(folder / "vocabulary"), key=key_of("vocabulary"), stage="vocabulary", files=["tokenizer.json"], inputs={})
    files, entries = {}, {}
    for name, (schema, rows) in ROWS.items():
        path = folder / f"{name}.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
        files[name], entries[name] = [str(path)], {"schema": schema, "files": {"pin": sources.pin([str(path)])}}
    spec = Spec(stage="items", versions={"items": 1}, parameters={"tasks": entries})
    items.run(spec, folder / "items", {}, context(settings={"sources": files})[0])
    for layer in ("attention", "gla", "mesa", "hawk"):
        entry = MESA if layer == "mesa" else {"layer": layer}
        model = models.build(entry, SCALE, vocab_size=GPT2_SIZE)
        (folder / layer).mkdir()
        # Larger embeddings than a model begins with: decided choices, no ties to break by rounding.
        weights = {name: to_numpy(value) * (8.0 if name == "embedding" else 1.0) for name, value in model.init(1).items()}
        checkpoint.save(folder / layer / "weights.safetensors", weights, {})
        artifact.write(folder / layer, key=key_of(layer), stage="train", files=["weights.safetensors"], inputs={})
    keys = {f"items/{name}": items.item_key(spec, name) for name in ROWS}
    return {"vocabulary": folder / "vocabulary", "keys": keys} | {
        name: folder / name for name in ("items", "attention", "gla", "mesa", "hawk")
    }


def spec_of(study, layer: str = "mesa", tasks: dict[str, Any] = TASKS, **changes: Any) -> Spec:
    model = MESA if layer == "mesa" else {"layer": layer}
    inputs = {"weights": key_of(layer), "vocabulary": key_of("vocabulary")} | {
        f"items/{name}": study["keys"][f"items/{name}"] for name in tasks
    }
    parameters = {"model": model, "scale": SCALE, **SHAPE, "lengths": [16], "settings": FEW if layer == "mesa" else {}, "tasks": tasks}
    return Spec(stage="evaluate", versions={"evaluate": 1}, inputs=inputs, parameters=parameters | changes)


def do(spec: Spec, out: Path, study, layer: str = "mesa", settings: dict[str, Any] | None = None, **changes: Any) -> list[str]:
    """Run; the units that were computed."""
    out.mkdir(exist_ok=True)
    inputs = {name: study["items"] / name.split("/")[1] if "/" in name else study.get(name) for name in spec.inputs} | {
        "weights": study[layer]
    }
    evaluate.run(spec, out, inputs, context(settings=settings or {}, **changes)[0])
    return json.loads((out / "provenance.json").read_text())["computed"]


def rows_of(out: Path, unit: str) -> list[dict[str, Any]]:
    return schemas.read(out / unit / "tasks.parquet", "tasks").to_pylist()


def test_units_and_tables(study, tmp_path):
    tasks = TASKS | {"colours": TASKS["colours"] | {"settings": ["cg-1"]}}
    made = do(spec_of(study, tasks=tasks), tmp_path / "out", study)
    assert made == ["capitals@0", "colours@0", "colours@0-cg-1", "words@0", "words@2", "writing@0"]
    scores = schemas.read(tmp_path / "out" / "scores.parquet", "scores").to_pylist()
    told = [(row["task"], row["setting"], row["shots"], row["draw"], row["items"], row["metric"], row["group"]) for row in scores]
    assert told == [
        ("capitals", "", 0, 0, 4, "contained", None), ("colours", "", 0, 0, 5, "accuracy", "local"), ("colours", "cg-1", 0, 0, 5, "accuracy", "local"),
        ("words", "", 0, 0, 5, "accuracy", None), ("words", "", 2, 0, 5, "accuracy", None), ("words", "", 2, 1, 5, "accuracy", None),
        ("writing", "", 0, 0, 8, "bleu", None),
    ]  # fmt: skip
    words = rows_of(tmp_path / "out", "words@2")
    assert [row["draw"] for row in words] == [0] * 5 + [1] * 5 and all(row["shots_used"] == 2 for row in words)
    assert words[0]["scores"] != words[5]["scores"] and words[0]["item"] == words[5]["item"]
    assert artifact.read(tmp_path / "out", content=True)


@pytest.mark.parametrize("layer", ["attention", "gla", "mesa", "hawk"])
def test_scores_are_the_forward_passs(study, tmp_path, layer):
    """Each option's loss by the whole text at once; an item's continuation by one whole forward pass a token."""
    do(spec_of(study, layer), tmp_path / "out", study, layer)
    model = models.build(MESA if layer == "mesa" else {"layer": layer}, SCALE, vocab_size=GPT2_SIZE)
    params = {name: torch.from_numpy(value) for name, value in checkpoint.load(study[layer] / "weights.safetensors")[0].items()}
    tokenizer = Tokenizer(study["vocabulary"], parallel=False)

    def logits(text: str) -> tuple[np.ndarray, torch.Tensor]:
        tokens = np.array([GPT2_BOS, *tokenizer._plain_tokens(text.encode())])
        return tokens, model.forward(params, torch.from_numpy(tokens[None]))[0]

    rows = rows_of(tmp_path / "out", "colours@0")
    for row, item in zip(rows, COLOURS, strict=True):
        for choice, score, count in zip(item["choices"], row["scores"], row["tokens"], strict=True):
            tokens, found = logits(f"{item['context']} {choice}")
            log = torch.log_softmax(found.double(), -1)
            wanted = -sum(float(log[place - 1, tokens[place]]) for place in range(len(tokens) - count, len(tokens)))
            assert score == pytest.approx(wanted, abs=1e-3)
        assert row["hit"] == (int(np.argmin(np.divide(row["scores"], row["tokens"]))) == item["answer_index"])
    row, item = rows_of(tmp_path / "out", "writing@0")[0], WORDS[0]
    text = item["context"]
    for _ in range(5):
        _, found = logits(text)
        text += tokenizer.decode([int(found[-1].argmax())])
    assert text.removeprefix(item["context"]).split("\n")[0].strip() == row["prediction"]


@pytest.mark.parametrize("layer", ["attention", "gla", "mesa", "hawk"])
def test_batches_and_padding_change_nothing(study, tmp_path, layer):
    spec = spec_of(study, layer)
    for size in (1, 64, 4096):
        do(spec, tmp_path / f"{size}", study, layer, settings={"batch_tokens": size})
    for unit in ("capitals@0", "colours@0", "words@2", "writing@0"):
        one, *others = (rows_of(tmp_path / f"{size}", unit) for size in (1, 64, 4096))
        for other in others:
            for a, b in zip(one, other, strict=True):
                assert a.pop("scores") == pytest.approx(b.pop("scores"), abs=1e-3)
                assert a == b
            one = rows_of(tmp_path / "1", unit)


def test_a_new_task_is_evaluated_alone(study, tmp_path):
    out = tmp_path / "out"
    few = {name: TASKS[name] for name in ("capitals", "words")}
    do(spec_of(study, tasks=few), out, study)
    assert do(spec_of(study), out, study) == ["colours@0", "writing@0"]
    assert do(spec_of(study, tasks=few), out, study) == [] and not (out / "colours@0").exists()


@pytest.mark.parametrize(
    "task, change, again",
    [
        ("words", {"shots": [0, 2, 1]}, ["words@1"]),
        ("colours", {"group": "global"}, []),
        ("colours", {"settings": ["cg-1"]}, ["colours@0-cg-1"]),
        ("colours", {"normalisation": "bytes"}, ["colours@0"]),
        ("colours", {"prompt": "{context} It is"}, ["colours@0"]),
        ("colours", {"version": 2}, ["colours@0"]),
        ("colours", {"code": 2}, ["colours@0"]),
        ("colours", {"window": 128}, []),
        ("capitals", {"truncate": 20}, ["capitals@0"]),
        ("words", {"seed": 1}, ["words@0", "words@2"]),
    ],
)
def test_a_change_evaluates_what_it_changes(study, tmp_path, task, change, again):
    before, after = (
        {unit.name: unit.key for unit in task_units(spec, Parameters.model_validate(spec.parameters), _model(spec))}
        for spec in (spec_of(study), spec_of(study, tasks=TASKS | {task: TASKS[task] | change}))
    )
    assert sorted(name for name, key in after.items() if before.get(name) != key) == again


def _model(spec: Spec) -> Any:
    return models.build(spec.parameters["model"], spec.parameters["scale"], vocab_size=GPT2_SIZE)


def test_tasks_leave_the_keys_of_text_sets(study):
    spec = spec_of(study)
    inputs = spec.inputs | {"validation": key_of("validation"), "evaluation/books": key_of("books")}
    with_tasks = spec.model_copy(update={"inputs": inputs})
    without = with_tasks.model_copy(update={"parameters": {name: value for name, value in spec.parameters.items() if name != "tasks"}})
    keys = [[unit.key for unit in texts(one, Parameters.model_validate(one.parameters), _model(one))] for one in (with_tasks, without)]
    assert keys[0] == keys[1] and len(keys[0]) == 4


def test_jax_scores_the_same(study, tmp_path):
    pytest.importorskip("jax")
    tasks = {name: TASKS[name] for name in ("colours", "capitals", "words")}
    spec = spec_of(study, tasks=tasks)
    do(spec, tmp_path / "torch", study)
    do(spec, tmp_path / "jax", study, settings={"backend": "jax"})
    for unit in ("capitals@0", "colours@0", "words@0", "words@2"):
        for a, b in zip(rows_of(tmp_path / "torch", unit), rows_of(tmp_path / "jax", unit), strict=True):
            assert a["scores"] == pytest.approx(b["scores"], abs=2e-3) and a["prediction"] == b["prediction"]


def test_stop_keeps_what_is_complete(study, tmp_path):
    out = tmp_path / "out"
    polls = iter([False] * 2 + [True] * 9)
    with pytest.raises(Stopped, match="run again to go on"):
        do(spec_of(study), out, study, stop_requested=lambda: next(polls))
    done = {path.parent.name for path in out.glob("*/artifact.json")}
    assert done and set(do(spec_of(study), out, study)) == {"capitals@0", "colours@0", "words@0", "words@2", "writing@0"} - done


def test_items_that_are_not_the_recorded_ones_are_refused(study, tmp_path):
    spec = spec_of(study)
    other = spec.model_copy(update={"inputs": spec.inputs | {"items/colours": key_of("other")}})
    with pytest.raises(ValueError, match="made under key"):
        do(other, tmp_path / "out", study)


def test_more_examples_than_there_are_is_one_sentence(study, tmp_path):
    tasks = {"words": TASKS["words"] | {"shots": [4]}}
    with pytest.raises(ValueError, match="tasks.words: 4 shots are wanted and 3 examples are there"):
        do(spec_of(study, tasks=tasks), tmp_path / "out", study)
