"""What params.yaml says fits together: names that exist, sizes that can be, rates and sources that are there. ValueError, one sentence, else."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pipelines import slices, tuning
from pipelines.mistakes import listed, nearest
from pipelines.params import MODEL_NAME, PLAIN_NAME, Growth, Params, Worker, cells
from stages.evaluation.parameters import VALIDATION, takes


def check(params: Params) -> None:
    """Raise a ValueError for the first thing that does not fit."""
    checks = (_names, _selections, tuning.check_entries, _entries, _sizes, tuning.check_cells, _rates, _sources, _settings, _tasks, _places)
    for one in checks:
        one(params)


def _names(params: Params) -> None:
    tables = {"models": (params.models, MODEL_NAME), "scales": (params.scales, PLAIN_NAME), "budgets": (params.budgets, PLAIN_NAME),
              "data.sources": (params.data.sources, MODEL_NAME), "tasks": (params.tasks, MODEL_NAME)}  # fmt: skip
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
                raise ValueError(f"grid.{axis}: is empty, so the study has no cells; name at least one of {listed(getattr(params, axis))}.")
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
            if not _selected(params, name):
                raise ValueError(f"models.{name}: {error}") from error


def _selected(params: Params, model: str) -> bool:
    """Whether some group selects the model: then _sizes tells its fault, at a scale that it is selected at."""
    return any(model in grid.models for grid in params.groups().values())


def _sizes(params: Params) -> None:
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
        warmup = tuning.training_of(params, model).warmup_steps
        if params.steps(budget) <= warmup:
            where = "models." + model + "." if "warmup_steps" in tuning.overrides_of(params.models[model]) else ""
            raise ValueError(
                f"{where}training.warmup_steps: {warmup} leaves nothing of the {params.steps(budget)} steps of budget {budget}; "
                f"warm up for fewer, or raise budgets.{budget}.tokens."
            )


def _rates(params: Params) -> None:
    def known(where: str, names: Iterable[str], axis: str) -> None:
        for name in names:
            if name not in getattr(params, axis):
                raise ValueError(f"{where}: {name!r} is not one of {axis}; {nearest(name, getattr(params, axis))}")

    known("learning_rates", params.learning_rates, "models")
    for model, scales in params.learning_rates.items():
        known(f"learning_rates.{model}", scales, "scales")
        for scale, budgets in scales.items():
            known(f"learning_rates.{model}.{scale}", budgets, "budgets")
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
    if VALIDATION in _evaluated(params):
        raise ValueError(
            f"data.sources.{VALIDATION}: the packed validation rows are evaluated under this name; give the text set another one."
        )


def _evaluated(params: Params) -> list[str]:
    """The text sets: the sources of evaluation."""
    return [name for name, source in params.data.sources.items() if source.role == "evaluation"]


def _settings(params: Params) -> None:
    for model, scale in sorted({(cell.model, cell.scale) for cell in cells(params)}):
        built = tuning.model_at(params, model, scale)
        for name, setting in params.evaluation.settings.items():
            if takes(built, setting):
                try:
                    built.with_setting(setting.options())
                except ValueError as error:
                    raise ValueError(f"evaluation.settings.{name}: for models.{model}, {error}") from error


def _tasks(params: Params) -> None:
    for name, task in params.tasks.items():
        for place, source in task.sources().items():
            if source.pin is None:
                raise ValueError(f"tasks.{name}.{place}.pin: is missing, so its items could change unseen; `strata lock-data` writes it.")
        for setting in task.settings:
            if setting not in params.evaluation.settings:
                raise ValueError(
                    f"tasks.{name}.settings: {setting!r} is not one of evaluation.settings; {nearest(setting, params.evaluation.settings)}"
                )
        for where, axis in ((where, axis) for where in ("only", "settings_only") for axis in ("models", "scales", "budgets")):
            for one in getattr(getattr(task, where), axis):
                if one not in getattr(params, axis):
                    raise ValueError(
                        f"tasks.{name}.{where}.{axis}: {one!r} is not defined under {axis}; {nearest(one, getattr(params, axis))}"
                    )


def _places(params: Params) -> None:
    selected = [model for grid in (params.grid, params.references, params.sweep) for model in grid.models]
    if params.analysis.baseline is not None and params.analysis.baseline not in selected:
        raise ValueError(
            f"analysis.baseline: {params.analysis.baseline!r} is not a model of the grid; {nearest(params.analysis.baseline, selected)}"
        )
    for name in (*params.analysis.same_scale, *params.analysis.same_scale.values()):
        if name not in params.scales:
            raise ValueError(f"analysis.same_scale: {name!r} is not defined under scales; {nearest(name, params.scales)}")
    if params.analysis.headline not in (sets := [VALIDATION, *_evaluated(params)]):
        raise ValueError(f"analysis.headline: {params.analysis.headline!r} is not a text set; {nearest(params.analysis.headline, sets)}")
    for name in params.cluster.workers:
        if name != "default" and name not in params.scales:
            raise ValueError(f"cluster.workers: {name!r} is not a scale; {nearest(name, [*params.scales, 'default'])}")
    workers = {f"cluster.workers.{name}": params.workers(name) for name in params.cluster.workers}
    for where, some in (workers | {"cluster.grows": params.cluster.grows}).items():
        for number, one in enumerate(some):
            _worker(params, one, where if where in workers and len(some) == 1 else f"{where}.{number}")
    if params.cluster.image is not None and params.cluster.code == "upload":
        raise ValueError(
            "cluster.image: Ray runs a container as it is; put the code into the image and leave cluster.code out, or leave the image out."
        )


def _worker(params: Params, worker: Worker | Growth, where: str) -> None:
    name = worker.accelerator
    if name is not None and name not in params.accelerators:
        raise ValueError(f"{where}.accelerator: {name!r} is not under accelerators; {nearest(name, params.accelerators)}")
    if isinstance(worker, Worker) and worker.fsdp is not None and worker.chips % worker.fsdp:
        raise ValueError(f"{where}.fsdp: {worker.fsdp} does not divide the {worker.chips} chips of this worker; give a divisor of them.")
    if worker.topology is None:
        return
    if name is None or params.accelerators[name].kind != "tpu":
        raise ValueError(f"{where}.topology: {worker.topology!r} is of TPUs; name one under accelerator, or say count.")
    if worker.count not in (1, slices.chips(worker.topology)):
        raise ValueError(
            f"{where}.count: {worker.count}, and {worker.topology} has {slices.chips(worker.topology)} chips; leave count out."
        )
