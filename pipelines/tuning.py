"""What an entry of `models:` says beside its layers: the cell that its cells start from, and its own training parameters.

    tuned: {layer: palimpsa_d, init_from: {model: plain, budget: 15b, drop: [...], replace: {...}}, training: {warmup_steps: 200}}

The source of a cell is the cell of that model at the same scale, on that budget (null: on the same).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError

import models
from pipelines.mistakes import explain, nearest
from pipelines.params import Cell, Params, cells
from stages.initial import stand_in, taken
from stages.spec import Strict
from stages.training import Initial, Training

if TYPE_CHECKING:
    from models.backbone import Model

BESIDE = ("init_from", "training")  # the keys of a model entry that build no model


class InitFrom(Initial):
    """See stages.training.Initial for drop and replace. model, budget: of the source."""

    model: str
    budget: str | None = None


class Overrides(Strict):
    """What of `training:` a model may have otherwise; null leaves it as it is."""

    warmup_steps: int | None = Field(default=None, ge=0)
    start_learning_rate: float | None = Field(default=None, ge=0)
    floor: float | None = Field(default=None, ge=0, le=1)


def layers_of(entry: dict[str, Any]) -> dict[str, Any]:
    """A model entry as `models.build` takes it."""
    return {name: value for name, value in entry.items() if name not in BESIDE}


def init_of(entry: dict[str, Any]) -> InitFrom | None:
    """What a model entry says of its start; ValueError, one sentence, where that is not well formed."""
    return _read(InitFrom, entry, "init_from")


def overrides_of(entry: dict[str, Any]) -> dict[str, Any]:
    """The training parameters that a model entry has of its own."""
    overrides = _read(Overrides, entry, "training")
    return overrides.model_dump(exclude_none=True) if overrides else {}


def training_of(params: Params, model: str) -> Training:
    """The training parameters of a model's cells."""
    return params.training.model_copy(update=overrides_of(params.models[model]))


def _read(kind: type[Strict], entry: dict[str, Any], key: str) -> Any:
    if not isinstance(entry, dict) or entry.get(key) is None:
        return None
    try:
        return kind.model_validate(entry[key])
    except ValidationError as error:
        mistake = explain(error, kind)
        raise ValueError(f"{key}{mistake}" if mistake.startswith(":") else f"{key}.{mistake}") from error


def model_at(params: Params, model: str, scale: str) -> Model:
    """The built model of an entry at a scale: its table, counts and FLOPs; no arrays. Where layers are replaced, some of the right number are."""
    return models.build(planned(params, model, scale), params.scales[scale].model_dump(), vocab_size=params.vocabulary.size)


def planned(params: Params, model: str, scale: str) -> dict[str, Any]:
    """The entry that `model_at` builds."""
    entry = params.models[model]
    init = init_of(entry)
    return stand_in(layers_of(entry), params.scales[scale].layers, init.replace) if init else layers_of(entry)


def source_of(params: Params, cell: Cell) -> str | None:
    """The name of the cell whose weights this one starts from."""
    init = init_of(params.models[cell.model])
    return f"{init.model}-{cell.scale}-{init.budget or cell.budget}" if init else None


def sources_first(params: Params) -> list[Cell]:
    """The study's cells, each behind the one that it starts from, else in their order."""
    known = {cell.name: cell for cell in cells(params)}
    found: dict[str, Cell] = {}

    def add(cell: Cell) -> None:
        source = source_of(params, cell)
        if source is not None and source not in found:
            add(known[source])
        found.setdefault(cell.name, cell)

    for cell in known.values():
        add(cell)
    return list(found.values())


def check_entries(params: Params) -> None:
    """What each model entry says is well formed and names what there is. ValueError, one sentence, otherwise."""
    for name, entry in params.models.items():
        try:
            init = init_of(entry)
            overrides_of(entry)
        except ValueError as error:
            raise ValueError(f"models.{name}.{error}") from error
        if init is None:
            continue
        where = f"models.{name}.init_from"
        for axis, value in (("models", init.model), ("budgets", init.budget)):
            if value is not None and value not in getattr(params, axis):
                raise ValueError(f"{where}.{axis[:-1]}: {value!r} is not defined under {axis}; {nearest(value, getattr(params, axis))}")
        before = init_of(params.models[init.model])
        if before is not None and before.replace is not None:
            raise ValueError(f"{where}.model: which layers {init.model!r} has is known only once it is trained; start from another model.")


def check_cells(params: Params) -> None:
    """Every source is a cell of the study, without circles, and what is taken over from it fits. ValueError, one sentence, otherwise."""
    known = {cell.name: cell for cell in cells(params)}
    for cell in known.values():
        _check_cell(params, cell, known)


def _check_cell(params: Params, cell: Cell, known: dict[str, Cell]) -> None:
    where, init, source = f"models.{cell.model}.init_from", init_of(params.models[cell.model]), source_of(params, cell)
    if init is None or source is None:
        return
    if source not in known:
        raise ValueError(
            f"{where}: cell {cell.name} starts from {source}, which the study does not have; select it in grid, references or sweep."
        )
    chain = [cell.name]
    while source is not None and source not in chain:
        chain.append(source)
        source = source_of(params, known[source]) if source in known else None
    if source is not None:
        raise ValueError(f"{where}: {' starts from '.join([*chain, source])}, a circle; name a source that starts from nothing.")
    model, given = model_at(params, cell.model, cell.scale), model_at(params, init.model, cell.scale)
    if init.replace is not None:
        base = models.build(layers_of(params.models[cell.model]), params.scales[cell.scale].model_dump(), vocab_size=params.vocabulary.size)
        if not base.layers[0].forgets:
            raise ValueError(f"{where}.replace: layer {base.layers[0].name!r} has no forget gate for each head, and so no memory window.")
        if {name: one.shape for name, one in base.table.items()} != {name: one.shape for name, one in given.table.items()}:
            raise ValueError(
                f"{where}.replace: {cell.model!r} must have the layer and options of {init.model!r}, some of which it replaces."
            )
    try:
        taken(*({name: one.shape for name, one in each.table.items()} for each in (model, given)), init.drop)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
