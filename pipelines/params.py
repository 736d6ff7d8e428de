"""The schema of params.yaml, composed of each stage's own parameter class; and its reading, with one clear sentence a mistake."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from pipelines import tuning
from stages.analyze import Analysis
from stages.evaluate import Evaluation
from stages.pack import Packing
from stages.sources import Source
from stages.spec import Strict
from stages.train import Training
from stages.vocabulary import Vocabulary

NAME = Path("params.yaml")
# A name becomes part of paths, DVC stage names and Ray ids; a cell is <model>-<scale>-<budget>, cut from the right.
MODEL_NAME = r"[a-z0-9][a-z0-9_]*(-[a-z0-9_]+)*"
PLAIN_NAME = r"[a-z0-9][a-z0-9_]*"


class Grid(Strict):
    """A full product of names."""

    models: list[str]
    scales: list[str]
    budgets: list[str]


class Scale(Strict):
    """The backbone's size: blocks, residual width, heads of key_size each, width of the SwiGLU branches."""

    layers: PositiveInt
    width: PositiveInt
    heads: PositiveInt
    key_size: PositiveInt
    mlp: PositiveInt


class Budget(Strict):
    """Training tokens of a cell; a cell takes as many whole steps as fit."""

    tokens: PositiveInt


class Rate(Strict):
    """A peak learning rate that the paper does not state, and where it comes from."""

    rate: PositiveFloat
    source: Annotated[str, Field(min_length=1)]


class Data(Strict):
    sources: Annotated[dict[str, Source], Field(min_length=1)]


class Accelerator(Strict):
    """One kind of chip, for the plan's hours and cost and for placement.

    kind: what it is to Ray. flops: peak dense bfloat16 FLOP/s. memory: GiB. cost: currency units an hour.
    utilization: the share of the peak that a training step is expected to reach.
    """

    kind: Literal["cpu", "gpu", "tpu"]
    flops: PositiveFloat
    memory: PositiveFloat
    cost: Annotated[float, Field(ge=0)]
    utilization: Annotated[float, Field(gt=0, le=1)]


class Worker(Strict):
    """What the worker of a cell needs. accelerator: a name of `accelerators`, or null for processors alone; count: how many of it.

    backend: which framework computes there; null: jax on a TPU, else torch.
    """

    cpus: PositiveInt = 2
    accelerator: str | None = None
    count: PositiveInt = 1
    backend: Literal["torch", "jax"] | None = None


class Cluster(Strict):
    """Where work goes and how much of it at once: never part of what a result is.

    storage: the store's folder seen by all nodes; null: .strata/ in the repository. workers: by scale; "default" for the other stages.
    retries: after a lost worker or node, not after an error.
    """

    storage: str | None = None
    workers: dict[str, Worker] = {}
    retries: Annotated[int, Field(ge=0)] = 2


class Params(Strict):
    """One study, whole."""

    root: str
    study: Annotated[str, Field(pattern=rf"^{MODEL_NAME}$")]
    grid: Grid
    references: Grid
    sweep: Grid
    models: Annotated[dict[str, dict[str, Any]], Field(min_length=1)]
    scales: Annotated[dict[str, Scale], Field(min_length=1)]
    budgets: Annotated[dict[str, Budget], Field(min_length=1)]
    learning_rates: dict[str, dict[str, dict[str, PositiveFloat | Rate]]]
    vocabulary: Vocabulary
    data: Data
    packing: Packing
    training: Training
    evaluation: Evaluation
    analysis: Analysis
    accelerators: dict[str, Accelerator] = {}
    cluster: Cluster = Cluster()
    outputs: Literal["files", "pointers"] = "files"
    tracking: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Params:
        for check in (_names, _selections, tuning.check_entries, _entries, _sizes, tuning.check_cells, _rates, _sources, _places):
            check(self)
        return self

    def learning_rate(self, model: str, scale: str, budget: str) -> float:
        """The peak learning rate of a cell."""
        rate = self.learning_rates[model][scale][budget]
        return rate.rate if isinstance(rate, Rate) else rate

    def steps(self, budget: str) -> int:
        """Optimiser steps of a budget: whole batches only."""
        return self.budgets[budget].tokens // (self.training.batch * self.packing.sequence_length)

    def training_of(self, model: str) -> Training:
        """The training parameters of a model's cells."""
        return self.training.model_copy(update=tuning.overrides_of(self.models[model]))

    def worker(self, scale: str) -> Worker:
        return self.cluster.workers.get(scale) or self.cluster.workers.get("default") or Worker()

    def groups(self) -> dict[str, Grid]:
        """The matrices of cells, by the name of their table in params.yaml."""
        return {"grid": self.grid, "references": self.references, "sweep": self.sweep}


def _names(params: Params) -> None:
    tables = {"models": (params.models, MODEL_NAME), "scales": (params.scales, PLAIN_NAME), "budgets": (params.budgets, PLAIN_NAME),
              "data.sources": (params.data.sources, MODEL_NAME)}  # fmt: skip
    for table, (entries, pattern) in tables.items():
        for name in entries:
            if not re.fullmatch(pattern, name):
                letters = "small letters, digits, _" + (" and single -" if pattern == MODEL_NAME else "")
                raise ValueError(f"{table}.{name}: a name here may hold {letters} only, since it becomes part of paths and stage names.")


def _selections(params: Params) -> None:
    seen: dict[str, str] = {}
    for group, grid in params.groups().items():
        for axis in ("models", "scales", "budgets"):
            names = getattr(grid, axis)
            if group == "grid" and not names:
                raise ValueError(
                    f"grid.{axis}: is empty, so the study has no cells; name at least one of {_listed(getattr(params, axis))}."
                )
            if not names and (grid.models or grid.scales or grid.budgets):
                raise ValueError(f"{group}.{axis}: is empty while the group's other lists are not; fill it, or empty all three.")
            for name in names:
                if name not in getattr(params, axis):
                    raise ValueError(f"{group}.{axis}: {name!r} is not defined under {axis}; {nearest(name, getattr(params, axis))}")
        for model in grid.models:
            for scale in grid.scales:
                for budget in grid.budgets:
                    cell = f"{model}-{scale}-{budget}"
                    if cell in seen:
                        where = f"in {seen[cell]} and again in {group}" if seen[cell] != group else f"twice in {group}"
                        raise ValueError(f"{group}: cell {cell} is selected {where}; select it once.")
                    seen[cell] = group


def _entries(params: Params) -> None:
    scale = next(iter(params.scales))
    for name in params.models:
        try:
            tuning.model_at(params, name, scale)
        except ValueError as error:
            if not _selected_with_others(params, name):
                raise ValueError(f"models.{name}: {error}") from error


def _selected_with_others(params: Params, name: str) -> bool:
    """Whether a model is only ever selected at scales of its own, so that its fault at the first one says nothing (see _sizes)."""
    return any(name in grid.models for grid in params.groups().values())


def _sizes(params: Params) -> None:
    from pipelines.cells import cells

    for model, scale in sorted({(cell.model, cell.scale) for cell in cells(params)}):
        try:
            tuning.model_at(params, model, scale)
        except ValueError as error:
            raise ValueError(f"models.{model} at scales.{scale}: {error}") from error
    tokens = params.training.batch * params.packing.sequence_length
    for name, budget in params.budgets.items():
        if budget.tokens < tokens:
            raise ValueError(
                f"budgets.{name}.tokens: {budget.tokens} is less than one step's {tokens} (training.batch x packing.sequence_length)."
            )
    for model, budget in sorted({(cell.model, cell.budget) for cell in cells(params)}):
        warmup = params.training_of(model).warmup_steps
        if params.steps(budget) <= warmup:
            where = "models." + model + "." if "warmup_steps" in tuning.overrides_of(params.models[model]) else ""
            raise ValueError(
                f"{where}training.warmup_steps: {warmup} leaves nothing of the {params.steps(budget)} steps of budget {budget}; "
                f"warm up for fewer, or raise budgets.{budget}.tokens."
            )


def _rates(params: Params) -> None:
    for table, entries in {"models": params.learning_rates, **{m: v for m, v in params.learning_rates.items()}}.items():
        allowed = params.models if table == "models" else params.scales
        for name in entries:
            if name not in allowed:
                where = "learning_rates" if table == "models" else f"learning_rates.{table}"
                raise ValueError(f"{where}: {name!r} is not one of {'models' if table == 'models' else 'scales'}; {nearest(name, allowed)}")
    from pipelines.cells import cells

    for cell in cells(params):
        if cell.budget not in params.learning_rates.get(cell.model, {}).get(cell.scale, {}):
            raise ValueError(
                f"learning_rates.{cell.model}.{cell.scale}.{cell.budget}: is missing, and cell {cell.name} of {cell.group} needs it."
            )


def _sources(params: Params) -> None:
    roles = {source.role for source in params.data.sources.values()}
    for role in ("training", "validation"):
        if role not in roles:
            raise ValueError(f"data.sources: no source has role {role!r}; a study needs at least one.")
    for name, source in params.data.sources.items():
        if source.pin is None:
            raise ValueError(f"data.sources.{name}.pin: is missing, so its data could change unseen; `strata lock-data` writes it.")


def _places(params: Params) -> None:
    selected = [model for grid in (params.grid, params.references, params.sweep) for model in grid.models]
    if params.analysis.baseline is not None and params.analysis.baseline not in selected:
        raise ValueError(
            f"analysis.baseline: {params.analysis.baseline!r} is not a model of the grid; {nearest(params.analysis.baseline, selected)}"
        )
    for name, worker in params.cluster.workers.items():
        if name != "default" and name not in params.scales:
            raise ValueError(f"cluster.workers: {name!r} is not a scale; {nearest(name, [*params.scales, 'default'])}")
        if worker.accelerator is not None and worker.accelerator not in params.accelerators:
            raise ValueError(
                f"cluster.workers.{name}.accelerator: {worker.accelerator!r} is not under accelerators; {nearest(worker.accelerator, params.accelerators)}"
            )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def nearest(name: str, allowed: Iterable[str]) -> str:
    """What to write instead of `name`: the nearest match where there is one, and all that is allowed."""
    allowed = list(dict.fromkeys(allowed))
    close = difflib.get_close_matches(str(name), allowed, n=1)
    return (f"did you mean {close[0]!r}? " if close else "") + f"Allowed: {_listed(allowed)}."


def load(folder: Path) -> Params:
    """The parameters of the study in `folder`. Raises ValueError with one sentence: the key, what was found, what is allowed."""
    return parse(read(folder), folder / NAME)


def read(folder: Path) -> dict[str, Any]:
    """params.yaml as plain values, by the YAML reader that DVC uses too."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    path = folder / NAME
    try:
        value = YAML(typ="safe").load(path.read_text())
    except FileNotFoundError as error:
        raise ValueError(f"{folder or '.'} has no params.yaml, so it is no study; `strata study NAME` makes one.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start}).") from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = (error.problem or str(error)).split("\n")[0]
        raise ValueError(f"{path}, line {mark.line + 1 if mark else '?'}: is not valid YAML: {problem}.") from error
    except YAMLError as error:
        raise ValueError(f"{path}: is not valid YAML: {str(error).splitlines()[0]}.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds {_kind(value)}, wanted a table of parameters.")
    return value


def parse(value: dict[str, Any], path: Path = NAME) -> Params:
    """Validate plain values as a study's parameters."""
    try:
        return Params.model_validate(value)
    except ValidationError as error:
        raise ValueError(f"{path}: {explain(error)}") from error


def explain(error: ValidationError, kind: type[Strict] | None = None) -> str:
    """The first mistake of a failed validation as one sentence that names the key, what was found and what is allowed.

    kind: what was validated; None: a whole study.
    """
    details = error.errors(include_url=False)
    # A union reports each of its branches: the one that went deepest is what the user meant.
    first = max(
        (item for item in details if item["loc"][:1] == details[0]["loc"][:1]),
        key=lambda item: len(item["loc"]) - 9 * (item["type"] == "value_error"),
        default=details[0],
    )
    first = next((item for item in details if item["type"] == "value_error"), first) if details[0]["type"] == "value_error" else first
    where = ".".join(str(part) for part in first["loc"] if not _is_branch(part))
    found, context = first["input"], first.get("ctx", {})
    match first["type"]:
        case "missing":
            return f"{where}: is missing."
        case "extra_forbidden":
            return f"{where}: is not a parameter; {nearest(str(first['loc'][-1]), _siblings(first['loc'], kind or Params))}"
        case "value_error":
            reason = str(context["error"])
            return f"{where}: {reason}" if where else reason
        case "literal_error" | "enum":
            return f"{where}: found {found!r}, allowed: {context['expected']}."
        case "union_tag_invalid" | "union_tag_not_found":
            return f"{where}: {context.get('discriminator', 'kind')} must be one of {context.get('expected_tags', 'the known kinds')}, found {found!r}."
    wanted = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return f"{where}: found {_kind(found)}, wanted {wanted}."


def _is_branch(part: Any) -> bool:
    """Whether a part of a location names a union's branch, which is no key of params.yaml."""
    return isinstance(part, str) and bool(re.search(r"[\[\]()]|^(float|int|str|bool|constrained-.*|[A-Z]\w+)$", part))


def _siblings(location: tuple[Any, ...], kind: Any) -> list[str]:
    """The keys that are allowed where an unknown one stands in a `kind`."""
    for part in location[:-1]:
        kind = _inside(kind, part)
    return (
        list(getattr(kind, "model_fields", {}))
        if not isinstance(kind, list)
        else [name for item in kind for name in getattr(item, "model_fields", {})]
    )


def _inside(kind: Any, part: Any) -> Any:
    """The type that stands under `part` of `kind`: a field's, a table's or list's items', or a union's branch."""
    import typing

    if isinstance(kind, list):
        return next((found for item in kind if (found := _inside(item, part)) is not None), None)
    if hasattr(kind, "model_fields"):
        field = kind.model_fields.get(part)
        return _unwrap(field.annotation) if field else kind if _is_branch(part) else None
    arguments = typing.get_args(kind)
    return _unwrap(arguments[-1]) if arguments else kind


def _unwrap(kind: Any) -> Any:
    """A type without Annotated and None; a union of several as the list of them."""
    import types
    import typing

    if typing.get_origin(kind) is Annotated:
        return _unwrap(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kinds = [_unwrap(item) for item in typing.get_args(kind) if item is not type(None)]
        return kinds[0] if len(kinds) == 1 else kinds
    return kind


def _kind(value: Any) -> str:
    """A value as a person would name it."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "a list"
    return repr(value) if len(repr(value)) < 80 else f"a {type(value).__name__}"
