"""lm-eval over our checkpoints: what it is given is what the model says, and its scores are ours, item by item, where the rules are one."""

from __future__ import annotations

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
from stages import artifact, evaluate, harness, items, schemas, sources
from stages.spec import Spec, canonical
from stages.tokenizer import GPT2_BOS, GPT2_SIZE
from tests.stages.small_study import context, key_of
from tests.stages.tasks.small_tasks import CAPITALS, COLOURS, WORDS, vocabulary

SCALE = {"layers": 2, "width": 16, "heads": 2, "key_size": 8, "mlp": 16}
GLA = {"layer": "gla"}
SETS = {"colours": ("multiple_choice", COLOURS), "words": ("prompt_target", WORDS), "capitals": ("recall", CAPITALS)}
TASKS = {
    "colours": {"kind": "multiple_choice", "normalisation": "bytes"},
    "words": {"kind": "greedy"},
    "capitals": {"kind": "recall", "new_tokens": 5},
}
LM_EVAL = {
    "colours": """
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer_index}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}, {metric: acc_norm, aggregation: mean, higher_is_better: true}]
""",
    "words": """
output_type: loglikelihood
doc_to_text: "{{context}}"
doc_to_target: " {{target}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "capitals": """
output_type: generate_until
doc_to_text: "{{context}}\\n{{question}}"
doc_to_target: "{{answers[0]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 5, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> dict[str, Any]:
    """Weights as drawn, a vocabulary, three sets, and the evaluation's spec as a file."""
    folder = tmp_path_factory.mktemp("study")
    artifact.write(vocabulary(folder / "vocabulary"), key=key_of("vocabulary"), stage="vocabulary", files=["tokenizer.json"], inputs={})
    files, entries = {}, {}
    for name, (schema, rows) in SETS.items():
        path = folder / f"{name}.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
        files[name], entries[name] = [str(path)], {"schema": schema, "files": {"pin": sources.pin([str(path)])}}
    of_items = Spec(stage="items", versions={"items": 1}, parameters={"tasks": entries})
    items.run(of_items, folder / "items", {}, context(settings={"sources": files})[0])
    model = models.build(GLA, SCALE, vocab_size=GPT2_SIZE)
    weights = {name: to_numpy(value) * (8.0 if name == "embedding" else 1.0) for name, value in model.init(1).items()}
    (folder / "weights").mkdir()
    checkpoint.save(folder / "weights" / "weights.safetensors", weights, {})
    artifact.write(folder / "weights", key=key_of("weights"), stage="train", files=["weights.safetensors"], inputs={})
    keys = {f"items/{name}": items.item_key(of_items, name) for name in SETS}
    shape = {"vocab_size": GPT2_SIZE, "bos": GPT2_BOS, "sequence_length": 64}
    spec = Spec(
        stage="evaluate",
        versions={"evaluate": 1},
        inputs={"weights": key_of("weights"), "vocabulary": key_of("vocabulary")} | keys,
        parameters={"model": GLA, "scale": SCALE, **shape, "lengths": [16], "tasks": TASKS},
    )
    (folder / "spec.json").write_text(canonical(spec.model_dump()))
    (folder / "out").mkdir()
    inputs = {name: folder / "items" / name.split("/")[1] for name in keys} | {name: folder / name for name in ("weights", "vocabulary")}
    evaluate.run(spec, folder / "out", inputs, context()[0])
    return {"folder": folder, "model": model, "weights": {name: torch.from_numpy(value) for name, value in weights.items()}}


@pytest.fixture(scope="module")
def asked(study) -> harness.Checkpoint:
    folder = study["folder"]
    return harness.Checkpoint(folder / "spec.json", folder / "weights", folder / "vocabulary", device="cpu", threads=1)


def log_probabilities(study, tokens: list[int]) -> np.ndarray:
    logits = study["model"].forward(study["weights"], torch.tensor([tokens]))[0]
    return torch.log_softmax(logits.double(), -1).detach().numpy()


def test_continuations_are_scored_behind_bos_and_their_context(study, asked):
    one, two = asked.encode("The capital of France is"), asked.encode(" Paris, I think")
    (score, greedy), (alone, _) = asked.score([(one, two), ([], two)])
    log = log_probabilities(study, [GPT2_BOS, *one, *two])
    assert score == pytest.approx(sum(log[len(one) + i, token] for i, token in enumerate(two)), abs=1e-3) and not greedy
    log = log_probabilities(study, [GPT2_BOS, *two])
    assert alone == pytest.approx(sum(log[i, token] for i, token in enumerate(two)), abs=1e-3)
    best = int(log_probabilities(study, [GPT2_BOS, *one])[-1].argmax())
    assert asked.score([(one, [best])])[0][1]


def test_a_context_that_is_too_long_loses_its_start(asked):
    long, option = asked.encode("one two three four " * 40), asked.encode(" five six")
    kept = long[len(long) - (asked.window - len(option)) :]
    assert asked.score([(long, option)])[0][0] == pytest.approx(asked.score([(kept, option)])[0][0], abs=1e-4)


def test_a_whole_text_is_scored_in_windows(study, asked):
    tokens = [GPT2_BOS, *asked.encode("a b c d e f g " * 20)]
    wanted = 0.0
    for start in range(0, len(tokens) - 1, asked.window):
        window = tokens[start : start + asked.window + 1]
        log = log_probabilities(study, window[:-1])
        wanted += sum(log[i, token] for i, token in enumerate(window[1:]))
    assert len(tokens) > 2 * asked.window and asked.score_whole("a b c d e f g " * 20) == pytest.approx(wanted, rel=1e-4)


def test_going_on_is_greedy_and_ends_before_what_ends_it(study, asked):
    tokens = [GPT2_BOS, *asked.encode("Hello there")]
    for _ in range(6):
        tokens.append(int(log_probabilities(study, tokens)[-1].argmax()))
    whole = asked.tokenizer.decode(tokens[-6:])
    assert asked.go_on(["Hello there"], until=[], new_tokens=6) == [whole]
    end = whole[4:7]
    assert asked.go_on(["Hello there"], until=[end, "nothing"], new_tokens=6) == [whole[: whole.index(end)]]


def test_another_stages_spec_is_refused(study, tmp_path):
    (tmp_path / "spec.json").write_text(canonical(Spec(stage="train", versions={}, parameters={}).model_dump()))
    with pytest.raises(ValueError, match="is a spec of train"):
        harness.Checkpoint(tmp_path / "spec.json", study["folder"] / "weights", study["folder"] / "vocabulary")


def test_without_lm_eval_is_one_sentence(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(ValueError, match="lm-eval is not installed"):
        harness.language_model()


def test_lm_eval_agrees_item_by_item(study, tmp_path, monkeypatch):
    """Options' likelihoods, hits under acc and acc_norm, greedy matches, and what is gone on with."""
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    folder = study["folder"]
    for name, text in LM_EVAL.items():
        data = f"task: strata_{name}\ndataset_path: parquet\ndataset_kwargs: {{data_files: {{test: {folder / name}.parquet}}}}\ntest_split: test"
        (tmp_path / f"{name}.yaml").write_text(data + text)
    paths = {"spec": str(folder / "spec.json"), "weights": str(folder / "weights"), "vocabulary": str(folder / "vocabulary"), "threads": 1}
    found = simple_evaluate(
        model=harness.language_model()(**paths, device="cpu"),
        tasks=[f"strata_{name}" for name in SETS],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    samples = {name: sorted(found["samples"][f"strata_{name}"], key=lambda one: one["doc_id"]) for name in SETS}
    ours = {name: schemas.read(folder / "out" / f"{name}@0" / "tasks.parquet", "tasks").to_pylist() for name in SETS}
    assert {name: len(rows) for name, rows in samples.items()} == {name: len(rows) for name, (_, rows) in SETS.items()}
    for theirs, mine in zip(samples["colours"], ours["colours"], strict=True):
        assert [-float(one[0][0]) for one in theirs["resps"]] == pytest.approx(mine["scores"], abs=1e-3)
        assert theirs["acc_norm"] == mine["hit"]  # the choices are ASCII: as many bytes as characters
    for theirs, mine in zip(samples["words"], ours["words"], strict=True):
        assert -float(theirs["resps"][0][0][0]) == pytest.approx(mine["scores"][0], abs=1e-3) and theirs["acc"] == mine["hit"]
    for theirs, mine in zip(samples["capitals"], ours["capitals"], strict=True):
        assert theirs["resps"][0][0].split("\n")[0].strip() == mine["prediction"]
    scores = {row["task"]: row for row in schemas.read(Path(folder / "out" / "scores.parquet"), "scores").to_pylist()}
    acc = found["results"]["strata_colours"]["acc,none"]
    assert 100 * acc == pytest.approx(scores["colours"]["accuracy_none"])
