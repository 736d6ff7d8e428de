"""Scorers over a model that can do what it is asked: one trained on half of the items answers these, and not the others."""

from __future__ import annotations

import numpy as np
import pytest

import models
from models.backends.torch import Trainer
from models.reader import reader
from stages import schemas, tokenizer
from stages.tasks import unit
from stages.tasks.engine import Engine
from stages.tasks.entry import PROMPTS, Generated, Scoring
from stages.tasks.generate import generate
from tests.stages.small_corpus import bpe_spec, make_vocabulary, write_lines

SCALE = {"layers": 2, "width": 64, "heads": 2, "key_size": 32, "mlp": 128}
OPTIMIZER = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.0, "clip": 1.0}
STEPS, ANSWER = 120, 16
LANDS = ["France Paris", "Austria Vienna", "Hungary Budapest", "Egypt Cairo", "Japan Tokyo", "Peru Lima", "Kenya Nairobi", "Cuba Havana"]
RECALL = [
    {
        "id": f"p{number}",
        "context": f"Here is {land.split()[0]} on the map.",
        "question": f"The capital of {land.split()[0]} is",
        "answers": [land.split()[1]],
    }
    for number, land in enumerate(LANDS)
]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    lines = write_lines(
        folder / "text.jsonl", [{"text": f"{row['context']} {row['question']} {row['answers'][0]}\n"} for row in RECALL * 20]
    )
    return tokenizer.load(make_vocabulary(folder / "bpe", bpe_spec(), {"text": [str(lines)]}), 1)


@pytest.mark.parametrize("layer", ["attention", "mesa"])
@pytest.mark.parametrize("kind", ["recall", "needles"])
def test_what_was_learned_is_found_and_what_was_not_is_not(words, tmp_path, layer, kind):
    rows = RECALL
    if kind == "needles":
        made = generate(Generated(make="niah", length=320, samples=8, answer_tokens=ANSWER), words, None).to_pylist()
        rows = [{name: row[name] for name in ("id", "context", "question", "answers")} for row in made]
    engine = Engine(None, words, 512, 4096)
    texts = [PROMPTS["recall"].format(**row) + f" {row['answers'][0]}\n" for row in rows]
    tokens = [np.concatenate([[words.bos], found]) for found in engine.encode(texts)]
    learned = tokens[: len(rows) // 2]
    longest = max(map(len, learned))
    batch, mask = np.zeros((len(learned), longest), np.int32), np.zeros((len(learned), longest - 1), bool)
    for place, one in enumerate(learned):
        batch[place, : len(one)], mask[place, len(one) - ANSWER : len(one) - 1] = one, True
    trainer = Trainer(models.build({"layer": layer}, SCALE, vocab_size=words.size), optimizer=OPTIMIZER, seed=0, threads=1)
    for step in range(STEPS):
        loss = trainer.step(batch, learning_rate=1e-2 * min(1, (step + 1) / 10), targets_mask=mask)["loss"]
        if loss < 5e-3:
            break
    engine.reader = reader(trainer)
    scoring = Scoring(kind="recall", new_tokens=ANSWER, truncate=400)
    unit.make(tmp_path, name="t", key="k", scoring=scoring, shots=0, items=rows, examples=None, engine=engine)
    hits = [row["hit"] for row in schemas.read(tmp_path / "tasks.parquet", "tasks").to_pylist()]
    assert hits == [True] * (len(rows) // 2) + [False] * (len(rows) // 2)
    assert schemas.read(tmp_path / "scores.parquet", "scores")["score"].to_pylist() == [50.0]
