"""Fine-tuning in a study: keys follow the source's, others stand, and a source is trained by whoever needs it first."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from pipelines import run, tuning
from pipelines.cells import model_of, specs, version_table
from pipelines.params import cells
from pipelines.reading import parse, read
from pipelines.resolve import context, resolve
from stages import artifact
from tests.pipelines.clone import small

ROOT = Path(__file__).parents[2]
SURGERY = {"model": "gla", "replace": {"count": 1, "layer": {"layer": "mesa", "steps": 3}}}


@pytest.fixture
def study() -> dict[str, Any]:
    """The nano study, made small, with two more cells: `tuned` stands before the cell that it starts from."""
    params = small(read(ROOT / "pipelines" / "nano"))
    params["models"] |= {
        "tuned": {"layer": "gla", "init_from": {"model": "gla"}, "training": {"warmup_steps": 1}},
        "surgery": {"layer": "gla", "init_from": SURGERY},
    }
    params["grid"]["models"] = ["tuned", "gla", "surgery"]
    params["sweep"] = {"models": [], "scales": [], "budgets": []}
    params["analysis"]["baseline"] = "gla"
    params["learning_rates"] |= {name: {"tiny": {"1m": 1e-3}} for name in ("tuned", "surgery")}
    return params


def specs_of(params: dict[str, Any]) -> Any:
    return specs(parse(params), version_table())


def test_the_spec_of_a_tuned_cell(study):
    made = specs_of(study)
    spec, source = made["train", "tuned-tiny-1m"], made["train", "gla-tiny-1m"]
    assert spec.parameters["model"] == {"layer": "gla"} and spec.parameters["init"] == {"drop": [], "replace": None}
    assert spec.inputs["initial"] == source.key and spec.parameters["warmup_steps"] == 1
    assert "init" not in source.parameters and "initial" not in source.inputs and source.parameters["warmup_steps"] == 2
    assert list(made).index(("train", "gla-tiny-1m")) < list(made).index(("train", "tuned-tiny-1m"))
    assert context(parse(study))["initial"] == {"tuned-tiny-1m": "gla-tiny-1m", "surgery-tiny-1m": "gla-tiny-1m"}
    surgery = made["train", "surgery-tiny-1m"]
    assert {"layers.gla", "layers.mesa"} <= set(surgery.versions) and surgery.parameters["model"] == {"layer": "gla"}


def test_a_key_follows_the_sources_and_nothing_else_moves(study):
    before, edited = specs_of(study), copy.deepcopy(study)
    edited["learning_rates"]["gla"]["tiny"]["1m"] *= 0.5
    after = specs_of(edited)
    moved = {cell for stage, cell in after if stage == "train" and before[stage, cell].key != after[stage, cell].key}
    assert moved == {"gla-tiny-1m", "tuned-tiny-1m", "surgery-tiny-1m"}
    alone = copy.deepcopy(study)
    alone["grid"]["models"] = ["gla"]
    assert specs_of(alone)["train", "gla-tiny-1m"].key == before["train", "gla-tiny-1m"].key


def test_the_plan_counts_any_layers_replaced(study):
    params = parse(study)
    plain, surgery = (model_of(params, cell) for cell in cells(params) if cell.model in ("gla", "surgery"))
    assert surgery.parameters - plain.parameters == 2 * 8  # Mesa's lambda, of one layer
    assert sorted(layer.name for layer in surgery.layers) == ["gla", "mesa"]


def test_a_warm_up_of_its_own_may_be_the_only_one_that_fits(study):
    study["budgets"]["short"] = {"tokens": 4 * 32 * 2}
    study["models"]["tuned"]["init_from"]["budget"] = "1m"
    study["grid"]["models"] = ["gla"]
    study["sweep"] = {"models": ["tuned"], "scales": ["tiny"], "budgets": ["short"]}
    study["learning_rates"]["tuned"]["tiny"]["short"] = 1e-3
    params = parse(study)
    assert [tuning.source_of(params, cell) for cell in cells(params)] == [None, "gla-tiny-1m"]


@pytest.mark.slow
def test_a_source_is_trained_first(study, tmp_path, monkeypatch):
    study["tracking"], study["tasks"], remembered = None, {}, []
    for source in study["data"]["sources"].values():
        source["files"] = [str(ROOT / name) for name in source["files"]]
    with (tmp_path / "params.yaml").open("w") as file:
        YAML().dump(study, file)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "_remember", lambda stage, cell, *_: remembered.append((stage, cell)))
    resolve()
    for stage, cells_ in (("vocabulary", ["vocabulary"]), ("tokenize", list(study["data"]["sources"])), ("pack", ["pack"])):
        for cell in cells_:
            run.run(stage, cell, ray=False)
    remembered.clear()
    run.run("train", "tuned-tiny-1m", ray=False)
    assert remembered == [("train", "gla-tiny-1m"), ("train", "tuned-tiny-1m")]
    run.run("train", "surgery-tiny-1m", ray=False)
    run.run("evaluate", "surgery-tiny-1m", ray=False)
    source, *tuned = (artifact.read(Path("weights") / f"{name}-tiny-1m") for name in ("gla", "tuned", "surgery"))
    assert [record["inputs"]["initial"] for record in tuned] == [source["digest"]] * 2
    assert json.loads(Path("weights/surgery-tiny-1m/model.json").read_text())["replaced"] in ([0], [1])
    assert run.run("train", "tuned-tiny-1m", ray=False).status == "present"


def test_the_example_of_the_manual_is_true():
    text = (ROOT / "docs" / "fine-tuning.md").read_text()
    params, example = read(ROOT / "pipelines" / "nano"), YAML(typ="safe").load(text.split("```yaml\n")[1].split("```")[0])
    for table, entries in example.items():
        params[table] |= entries
    made = specs_of(params)
    plain, *others = (made["train", f"{name}-tiny-1m"] for name in ("plain", "tuned", "surgery"))
    assert all(spec.inputs["initial"] == plain.key for spec in others)
    assert [spec.parameters["warmup_steps"] for spec in (plain, *others)] == [20, 10, 20]
    surgery = model_of(parse(params), cells(parse(params))[2])
    assert [layer.metaplasticity for layer in surgery.layers] == [True, False]
