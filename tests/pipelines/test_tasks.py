"""`tasks:` of params.yaml: which keys a change reaches, what each cell is asked, and mistakes as one sentence."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelines import check, pins, resolve
from pipelines.cells import ITEMS, makers, model_of, specs, version_table
from pipelines.params import Params, cells
from pipelines.reading import load, parse, read
from stages import items
from stages.evaluate import wanted
from stages.evaluation.parameters import Parameters
from stages.tasks.entry import Task

NANO = Path(__file__).parents[2] / "pipelines" / "nano"
PIN = "sha256:" + "1" * 64
NEW = {"kind": "multiple_choice", "items": {"files": ["x.parquet"], "pin": PIN}}
FEW_SHOT = NEW | {"shots": [0, 2], "examples": {"files": ["y.jsonl"], "pin": PIN}}


def study(tasks: dict[str, Any] | None = None, **more: Any) -> Params:
    """The nano study with `more` tasks, or with others instead."""
    params = copy.deepcopy(read(NANO))
    params["tasks"] = params["tasks"] | {name.replace("_", "-"): entry for name, entry in more.items()} if tasks is None else tasks
    return parse(params)


def keys(params: Params) -> dict[tuple[str, str], str]:
    return {name: spec.key for name, spec in specs(params, version_table()).items()}


def unit_keys(params: Params, versions: dict[str, dict[str, int]] | None = None) -> dict[str, str]:
    """cell/unit -> key, of every evaluation's units, text sets too."""
    study, found = specs(params, versions or version_table()), {}
    for cell in cells(params):
        spec = study["evaluate", cell.name]
        parameters, model = Parameters.model_validate(spec.parameters), model_of(params, cell)
        for unit in wanted(spec, parameters, model):
            found[f"{cell.name}/{unit.name}"] = unit.key
    return found


def changed(before: dict[Any, str], after: dict[Any, str]) -> set[Any]:
    return {name for name, key in after.items() if before.get(name) != key}


def test_a_new_task_runs_its_own_units_and_nothing_else():
    before, after = study(), study(new=NEW)
    names = {cell.name for cell in cells(after)}
    assert changed(keys(before), keys(after)) == {("items", "items"), ("analyze", "analyze"), *(("evaluate", name) for name in names)}
    assert changed(unit_keys(before), unit_keys(after)) == {f"{name}/new@0" for name in names}
    assert set(unit_keys(before)) < set(unit_keys(after))


def test_a_study_without_tasks_is_as_if_there_were_none():
    found = specs(study({}), version_table())
    assert found[ITEMS].parameters == {"tasks": {}} and not found[ITEMS].inputs
    for (stage, _), spec in found.items():
        assert stage != "evaluate" or ("tasks" not in spec.parameters and "vocabulary" not in spec.inputs)


@pytest.mark.parametrize(
    "change, again",
    [
        ({"group": "other"}, set()),
        ({"version": 2}, {"new@0", "new@2"}),
        ({"shots": [0, 2, 3]}, {"new@3"}),
        ({"settings": ["cg-2"]}, {"new@0-cg-2", "new@2-cg-2"}),
        ({"examples": {"files": ["z.jsonl"], "pin": PIN}}, set()),  # the same content elsewhere
        ({"examples": {"files": ["y.jsonl"], "pin": "sha256:" + "2" * 64}}, {"new@0", "new@2"}),
    ],
)
def test_a_change_reaches_what_depends_on_it(change, again):
    before, after = unit_keys(study(new=FEW_SHOT)), unit_keys(study(new=FEW_SHOT | change))
    assert {name.split("/")[1] for name in changed(before, after)} == again
    if "settings" in change:
        assert {name.split("/")[0] for name in changed(before, after)} == {"mesa-tiny-1m", "mesa-cg-2-tiny-1m"}


@pytest.mark.parametrize(
    "name, again",
    [
        ("recall", {"factbook-recall@0", "needle@0"}),
        ("multiple_choice", {"factbook-choice@0"}),
        ("niah", {"needle@0"}),
        ("common_words", set()),
    ],
)
def test_a_kinds_version_reaches_its_tasks(name, again):
    table = version_table()
    table["tasks"][name] += 1
    assert {one.split("/")[1] for one in changed(unit_keys(study()), unit_keys(study(), table))} == again


def test_only_the_cells_that_are_listed_are_asked():
    found = specs(study(new=NEW | {"only": {"models": ["mesa"]}}), version_table())
    asked = {cell for (stage, cell), spec in found.items() if stage == "evaluate" and "new" in spec.parameters["tasks"]}
    assert asked == {"mesa-tiny-1m"}
    assert "items/new" not in found["evaluate", "gla-tiny-1m"].inputs and "items/new" in found["evaluate", "mesa-tiny-1m"].inputs


def test_settings_are_for_the_cells_that_are_listed():
    found = unit_keys(study(new=NEW | {"settings": ["cg-2"], "settings_only": {"models": ["mesa", "gla"]}}))
    assert {name for name in found if "new@0-" in name} == {"mesa-tiny-1m/new@0-cg-2"}  # gla has no solver


def test_every_input_has_a_maker():
    params = study(new=FEW_SHOT)
    found = specs(params, version_table())
    made_by = makers(found)
    assert made_by[found["evaluate", "mesa-tiny-1m"].inputs["items/new.examples"]] == (found[ITEMS].key, "new.examples")
    assert made_by[items.item_key(found[ITEMS], "needle")] == (found[ITEMS].key, "needle")


def test_the_context_has_every_units_files():
    text = {"files": ["essay.txt"], "pin": PIN}
    needle = {"kind": "recall", "generate": {"make": "niah", "length": 512, "haystack": "text", "text": text}}
    found = resolve.context(study(new=FEW_SHOT, essay=needle))["items"]
    assert found["new"] == ["x.parquet"] and found["new.examples"] == ["y.jsonl"] and found["essay.text"] == ["essay.txt"]
    assert "needle" not in found and found["factbook-recall"] == ["data/factbook_recall.parquet"]


MISTAKES = {
    "kind": ({"new": NEW | {"kind": "choice"}}, ["tasks.new.kind", "'choice'", "multiple_choice", "recall"]),
    "option of another kind": ({"new": NEW | {"truncate": 9}}, ["tasks.new", "truncate is an option of recall tasks"]),
    "unknown option": ({"new": NEW | {"shot": [0]}}, ["tasks.new.shot", "not a parameter", "'shots'"]),
    "unknown option of items": ({"new": NEW | {"items": NEW["items"] | {"colums": {}}}}, ["tasks.new.items.colums", "not a parameter", "'columns'"]),
    "no items": ({"new": {"kind": "greedy"}}, ["tasks.new", "either items (files) or generate"]),
    "no pin": ({"new": NEW | {"items": {"files": ["x.parquet"]}}}, ["tasks.new.items.pin", "strata lock-data"]),
    "no pin of a haystack": (
        {"new": {"kind": "recall", "generate": {"make": "niah", "length": 512, "haystack": "text", "text": {"files": ["x.txt"]}}}},
        ["tasks.new.generate.text.pin", "strata lock-data"],
    ),
    "setting": ({"new": NEW | {"settings": ["cg-3"]}}, ["tasks.new.settings", "'cg-3'", "'cg-2'"]),
    "cell": ({"new": NEW | {"only": {"scales": ["tinny"]}}}, ["tasks.new.only.scales", "'tinny'", "'tiny'"]),
    "name": ({"New.task": NEW}, ["tasks.New.task", "small letters"]),
    "shots": ({"new": NEW | {"shots": [5]}}, ["tasks.new", "examples of their own"]),
    "generator": ({"new": {"kind": "recall", "generate": {"make": "nial", "length": 512}}}, ["tasks.new.generate.make", "'nial'", "niah"]),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence(name):
    tasks, words = MISTAKES[name]
    with pytest.raises(ValueError) as error:
        study(tasks)
    sentence = str(error.value)
    assert all(word in sentence for word in words) and "\n" not in sentence, sentence


def test_files_that_are_not_here_are_named(tmp_path):
    problems = check.problems(study(new=NEW, other=NEW | {"items": {"files": ["data/README.rst"], "pin": PIN}}), NANO)
    assert [problem for problem in problems if problem.startswith("tasks.new.items:") and "x.parquet stands for no file" in problem]
    assert not [problem for problem in problems if "factbook" in problem or "needle" in problem]


def test_lock_data_pins_tasks_too(tmp_path):
    text = (NANO / "params.yaml").read_text()
    for name in ("factbook_recall", "factbook_choice", "training", "validation", "evaluation"):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{name}.parquet").write_bytes((NANO / "data" / f"{name}.parquet").read_bytes())
    pin = load(NANO).tasks["factbook-recall"].items.pin
    (tmp_path / "params.yaml").write_text(text.replace(f', pin: "{pin}"', ""))
    found = {name: (before, now) for name, before, now in pins.lock(tmp_path)}
    assert (
        found["tasks.factbook-recall.items"] == (None, pin)
        and found["tasks.factbook-choice.items"][0] == found["tasks.factbook-choice.items"][1]
    )
    assert load(tmp_path).tasks["factbook-recall"].items.pin == pin


def test_the_entries_that_the_documentation_shows_are_valid():
    text = (NANO.parents[1] / "docs" / "tasks.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    entries = {
        name: entry
        for block in blocks
        for name, entry in yaml.safe_load(block if block.startswith("tasks:") else f"tasks:\n{block}")["tasks"].items()
    }
    assert len(entries) > 10
    for entry in entries.values():
        Task.model_validate(entry)


def test_the_version_of_internals_reaches_those_that_have_any():
    table = version_table()
    before, found = specs(study(), table), table | {"tasks": table["tasks"] | {"internals": 2}}
    moved = {name for name, spec in specs(study(), found).items() if spec.key != before[name].key}
    assert moved == {("evaluate", "mesa-tiny-1m"), ("evaluate", "mesa-cg-2-tiny-1m"), ("analyze", "analyze")}
