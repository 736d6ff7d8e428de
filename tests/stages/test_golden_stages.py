"""The numbers of train and evaluate stand still while their versions do.

When they move on purpose, raise the version in stages/versions.yaml and write them anew:
STRATA_GOLDEN=write python -m pytest tests/stages/test_golden_stages.py
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from stages import evaluate, schemas, train
from tests.stages.small_study import GLA, context, evaluate_spec, make_packed, make_tokens, train_spec

FILE = Path(__file__).parent / "golden" / "train_evaluate.json"
ROOT = Path(__file__).parents[2]


def test_numbers_move_only_with_their_versions(tmp_path):
    table = yaml.safe_load((ROOT / "stages" / "versions.yaml").read_text())
    versions = (
        {"train": table["stages"]["train"], "evaluate": table["stages"]["evaluate"]} | table["model"] | {"gla": table["layers"]["gla"]}
    )
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
    found = {"versions": versions, "loss": loss, "perplexity": perplexity}
    if os.environ.get("STRATA_GOLDEN") == "write":
        FILE.write_text(json.dumps(found, indent=1) + "\n")
    golden = json.loads(FILE.read_text())
    assert golden["versions"] == versions, "a version was raised: write the golden numbers anew"
    for name in ("loss", "perplexity"):
        assert found[name] == pytest.approx(golden[name], rel=1e-4), f"{name} moved and no version did"
