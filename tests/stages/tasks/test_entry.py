"""Entries of `tasks:`: what they may say, and what a spec has of them."""

import pytest
from pydantic import ValidationError

from stages.tasks.entry import Files, Generated, Only, Task

ITEMS = {"files": ["x.parquet"], "pin": "sha256:" + "0" * 64}


def task(**entry):
    return Task.model_validate({"kind": "multiple_choice", "items": ITEMS} | entry)


@pytest.mark.parametrize(
    "entry, sentence",
    [
        ({"kind": "choice"}, "multiple_choice"),
        ({"items": None}, "either items"),
        ({"generate": {"make": "niah", "length": 512}}, "either items"),
        ({"items": None, "generate": {"make": "niah", "length": 512}}, "generated items are for recall tasks; this one is multiple_choice"),
        ({"truncate": 100}, "truncate is an option of recall tasks; this one is multiple_choice"),
        ({"kind": "greedy", "normalisation": "bytes"}, "normalisation is an option of multiple_choice tasks"),
        ({"kind": "greedy", "new_tokens": 4}, "new_tokens is an option of recall and generation tasks"),
        ({"prompt": "{question}"}, r"prompt has \{question\}, which is no field of its items; they have id, context, choices"),
        ({"prompt": "{context"}, "prompt is no template"),
        ({"prompt": "{context!r}"}, "no field"),
        ({"kind": "recall", "prompt": "{context} {context}"}, "more than once"),
        ({"separator": "###"}, "must begin with white space"),
        ({"shots": [1]}, "shots need examples of their own"),
        ({"shots": [0, 0]}, "lists 0 twice"),
        ({"shots": []}, "at least 1"),
        ({"items": ITEMS | {"original": "hellaswack"}}, "original is 'hellaswack'; it is one of arc,"),
        ({"items": ITEMS | {"original": "arc", "columns": {"context": "x"}}}, "two ways"),
        ({"items": ITEMS | {"pin": "md5:1"}}, "strata lock-data"),
        ({"promt": "x"}, "promt"),
    ],
)
def test_mistakes_are_named(entry, sentence):
    with pytest.raises(ValidationError, match=sentence):
        task(**entry)


@pytest.mark.parametrize(
    "entry, sentence",
    [
        ({"haystack": "text"}, "give it with `haystack: text`"),
        ({"queries": 2}, "more than the 1 keys"),
        ({"make": "variable_tracing", "haystack": "needles"}, "makes its own"),
        ({"length": 10}, "greater than or equal to 64"),
    ],
)
def test_mistakes_of_generators_are_named(entry, sentence):
    with pytest.raises(ValidationError, match=sentence):
        Generated.model_validate({"make": "niah", "length": 512} | entry)


def test_a_spec_has_what_differs_from_the_defaults():
    assert task(group="local", settings=["cg-1"]).scoring() == {"kind": "multiple_choice"}
    assert task(limit=5, shots=[0, 2], draws=3).scoring() == {"kind": "multiple_choice", "limit": 5, "shots": [0, 2], "draws": 3}


def test_generated_items_are_asked_whole_and_for_all_answers():
    made = task(kind="recall", items=None, generate={"make": "niah", "length": 4096})
    assert made.scoring() == {"kind": "recall", "window": 4096, "truncate": 4096, "new_tokens": 128, "answers": "all"}
    assert task(kind="recall", items=None, generate={"make": "variable_tracing", "length": 64}, answers="any").scoring()["answers"] == "any"


def test_defaults_are_the_papers():
    recall = task(kind="recall")
    assert (recall.get("truncate"), recall.get("new_tokens"), recall.get("answers")) == (2000, 48, "any")
    assert task(kind="generation").get("new_tokens") == 128 and task().get("normalisation") == "tokens"


def test_names_of_files_are_identity_under_a_revision_alone():
    assert Files.model_validate(ITEMS).identity() == {"pin": ITEMS["pin"]}
    hub = {"files": ["hf://datasets/a/b/c.parquet"], "pin": "revision:" + "a" * 40, "where": {"split": "test"}}
    assert Files.model_validate(hub).identity() == hub


def test_only_takes_the_cells_that_are_listed():
    assert Only().takes("mesa", "1b", "50b")
    assert Only(budgets=["50b"]).takes("mesa", "1b", "50b") and not Only(budgets=["50b"]).takes("mesa", "1b", "15b")
    assert not Only(budgets=["50b"], scales=["140m"]).takes("mesa", "1b", "50b")
