"""Every stage of every cell resolved to a plain spec: pure functions of params.yaml and the version table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models import internals
from models.backbone import Model
from pipelines import tuning
from pipelines.params import Cell, Params, cells
from stages import items, pack
from stages.evaluation.parameters import VALIDATION, takes
from stages.spec import Spec, Strict, fingerprint
from stages.tasks.entry import SCHEMAS

VERSIONS = Path(__file__).parent.parent / "stages" / "versions.yaml"
VOCABULARY, PACK, ITEMS, ANALYZE = ("vocabulary", "vocabulary"), ("pack", "pack"), ("items", "items"), ("analyze", "analyze")
TABLES = ("stages", "model", "layers", "tasks")


def version_table(path: Path = VERSIONS) -> dict[str, dict[str, int]]:
    """stages/versions.yaml: versions by table (stages, model, layers, tasks) and name. ValueError where it is damaged."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        table = YAML(typ="safe").load(path.read_text())
        return {part: {name: int(version) for name, version in table[part].items()} for part in TABLES}
    except (OSError, YAMLError, TypeError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not a readable version table ({error}); restore it from git.") from error


def model_of(params: Params, cell: Cell) -> Model:
    """The built model of a cell; see tuning.model_at."""
    return tuning.model_at(params, cell.model, cell.scale)


Specs = dict[tuple[str, str], Spec]


def specs(params: Params, versions: dict[str, dict[str, int]]) -> Specs:
    """(stage, cell) -> spec of everything the study makes, in an order in which inputs come first."""
    found: Specs = {}
    sources = params.data.sources

    def spec(stage: str, cell: str, parameters: dict[str, Any], inputs: dict[str, str], **more: int) -> Spec:
        made = Spec(stage=stage, versions={stage: versions["stages"][stage], **more}, inputs=inputs, parameters=parameters)
        found[stage, cell] = made
        return made

    by_role = {role: [name for name, source in sources.items() if source.role == role] for role in ("training", "validation", "evaluation")}
    learned = {"sources": {name: sources[name].identity() for name in by_role["training"]}} if params.vocabulary.kind == "bpe" else {}
    vocabulary = spec(*VOCABULARY, plain(params.vocabulary) | learned, {})
    for name in sources:
        spec("tokenize", name, {"source": name, **sources[name].identity()}, {"vocabulary": vocabulary.key})

    shape = {"vocab_size": params.vocabulary.size, "bos": params.vocabulary.bos, "sequence_length": params.packing.sequence_length}
    rows = {
        name: params.steps(name) * params.training.batch for name in params.budgets if any(cell.budget == name for cell in cells(params))
    }
    tokens = {f"{role}/{name}": found["tokenize", name].key for role in ("training", "validation") for name in by_role[role]}
    packed = spec(*PACK, plain(params.packing) | shape | {"budgets": rows}, tokens)
    units = task_items(params, versions["tasks"])
    asked_of = spec(*ITEMS, {"tasks": units}, {"vocabulary": vocabulary.key} if any("generate" in unit for unit in units.values()) else {})

    for cell in tuning.sources_first(params):
        entry, scale = tuning.layers_of(params.models[cell.model]), params.scales[cell.scale].model_dump()
        what = {"model": entry, "scale": scale} | shape
        model = model_of(params, cell)
        layers = {f"layers.{layer.name}": versions["layers"][layer.name] for layer in model.layers}
        training = plain(tuning.training_of(params, cell.model)) | what
        training |= {"steps": params.steps(cell.budget), "learning_rate": params.learning_rate(cell.model, cell.scale, cell.budget)}
        given = {"budget": pack.budget_key(packed, rows[cell.budget])}
        if not internals.can(model):
            training.pop("internals", None)
        elif params.training.internals:
            training["internals_code"] = versions["tasks"]["internals"]
            given[VALIDATION] = pack.validation_key(packed)
        if (init := tuning.init_of(params.models[cell.model])) and (source := tuning.source_of(params, cell)):
            training["init"] = init.model_dump(include={"drop", "replace"})
            given["initial"] = found["train", source].key
        trained = spec(
            "train",
            cell.name,
            training,
            given,
            backbone=versions["model"]["backbone"],
            **layers,
        )

        settings = {name: setting.options() for name, setting in params.evaluation.settings.items() if takes(model, setting)}
        evaluation = plain(params.evaluation) | what | {"settings": settings}
        if not settings:
            evaluation.pop("settings_lengths", None)
        if not internals.can(model):
            evaluation.pop("internals", None)
        elif params.evaluation.internals:
            evaluation["internals_code"] = versions["tasks"]["internals"]
        evaluation |= {"reset": params.training.reset, "precision": params.training.precision}
        texts = {f"evaluation/{name}": found["tokenize", name].key for name in by_role["evaluation"]}
        if tasks := asked(params, cell, set(settings), versions["tasks"]):
            evaluation["tasks"] = tasks
            texts["vocabulary"] = vocabulary.key
            texts |= {f"items/{name}": items.item_key(asked_of, name) for name in units if name.removesuffix(items.EXAMPLES) in tasks}
        spec("evaluate", cell.name, evaluation, {"weights": trained.key, VALIDATION: pack.validation_key(packed), **texts})

    spec(
        *ANALYZE,
        plain(params.analysis) | {"cells": [_summary(params, cell) for cell in cells(params)]},
        {f"history/{cell.name}": found["train", cell.name].key for cell in cells(params)}
        | {f"evaluations/{cell.name}": found["evaluate", cell.name].key for cell in cells(params)},
    )
    return found


def task_items(params: Params, versions: dict[str, int]) -> dict[str, dict[str, Any]]:
    """The units of the items stage: each task's items, and the examples of those that have their own."""
    found: dict[str, dict[str, Any]] = {}
    for name, task in params.tasks.items():
        schema = SCHEMAS[task.kind]
        if task.generate is not None:
            made = task.generate.model_dump(exclude_defaults=True) | {"make": task.generate.make}
            if task.generate.text is not None:
                made["text"] = task.generate.text.identity()
            found[name] = {"schema": schema, "generate": made, "code": versions[task.generate.make]}
        elif task.items is not None:
            found[name] = {"schema": schema, "files": task.items.identity()}
        if task.examples is not None:
            found[name + items.EXAMPLES] = {"schema": schema, "files": task.examples.identity()}
    return found


def asked(params: Params, cell: Cell, settings: set[str], versions: dict[str, int]) -> dict[str, dict[str, Any]]:
    """The tasks of a cell as its evaluation's spec has them. settings: those that its model takes."""
    found = {}
    for name, task in params.tasks.items():
        if task.only.takes(cell.model, cell.scale, cell.budget):
            entry = task.scoring() | {"code": versions[task.kind]}
            swept = settings if task.settings_only.takes(cell.model, cell.scale, cell.budget) else set()
            also = {"group": task.group, "settings": [one for one in task.settings if one in swept]}
            found[name] = entry | {field: value for field, value in also.items() if value}
    return found


def plain(parameters: Strict) -> dict[str, Any]:
    """Parameters as a spec holds them: what differs from the defaults, so that a new option leaves every key; a default that changes numbers
    raises a version instead."""
    return parameters.model_dump(exclude_defaults=True)


def makers(study: Specs) -> dict[str, tuple[str, str]]:
    """input key -> (key of the artifact that holds it, path in it): of every key that some spec of the study names as an input."""
    found = {spec.key: (spec.key, "") for spec in study.values()}
    packed = study[PACK]
    for name, rows in packed.parameters["budgets"].items():
        found[pack.budget_key(packed, rows)] = (packed.key, f"{pack.BUDGETS}/{name}.json")
    found[pack.validation_key(packed)] = (packed.key, pack.VALIDATION)
    found |= {items.item_key(study[ITEMS], name): (study[ITEMS].key, name) for name in study[ITEMS].parameters["tasks"]}
    return {key: found[key] for spec in study.values() for key in spec.inputs.values()}


def _summary(params: Params, cell: Cell) -> dict[str, Any]:
    """What the analysis says of a cell beyond its results."""
    model, tokens = model_of(params, cell), params.steps(cell.budget) * params.training.batch * params.packing.sequence_length
    return {
        "cell": cell.name,
        "model": cell.model,
        "scale": cell.scale,
        "budget": cell.budget,
        "group": cell.group,
        "layer": "+".join(dict.fromkeys(layer.name for layer in model.layers)),
        "parameters": model.parameters,
        "tokens": tokens,
        "flops": tokens * model.flops(params.packing.sequence_length, training=True),
        "steps": next((layer.steps for layer in model.layers if hasattr(layer, "steps")), None),
        "learning_rate": params.learning_rate(cell.model, cell.scale, cell.budget),
        "window": next((layer.window for layer in model.layers if getattr(layer, "window", None)), None),
        "entry": fingerprint(params.models[cell.model]),
    }
