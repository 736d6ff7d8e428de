"""Could this study run here? Everything that is missing, each with what to do, before any work starts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from pipelines.params import Params, cells
from pipelines.plan import GIB, TOKEN_BYTES
from pipelines.reading import load

NANO = "To see Strata work on this machine, run `make nano`."


def require(folder: Path) -> None:
    """Raise a ValueError that lists what this study lacks here; nothing if it can run."""
    params = load(folder)
    if found := problems(params, folder):
        lines = "\n".join(f"  - {problem}" for problem in found)
        raise ValueError(f"The study {params.study} cannot run here:\n{lines}\n{NANO if params.study != 'nano' else ''}".rstrip())


def problems(params: Params, folder: Path) -> list[str]:
    """What is missing, one sentence each: data, disk, accelerators, layers without a forward pass."""
    return [*_data(params, folder), *_disk(params, folder), *_accelerators(params), *_layers(params)]


def _data(params: Params, folder: Path) -> list[str]:
    from stages.sources import kind as text_form
    from stages.sources import reachable
    from stages.tasks.items import form

    found = []
    for name, source in params.data.sources.items():
        if (problem := reachable(source, folder)) is not None:
            found.append(f"data.sources.{name}: {problem}")
    for name, task in params.tasks.items():
        for place, source in task.sources().items():
            if (problem := reachable(source, folder, kind=form if place != "generate.text" else text_form)) is not None:
                found.append(f"tasks.{name}.{place}: {problem}")
    return found


def _disk(params: Params, folder: Path) -> list[str]:
    """The largest budget's tokens and packed rows, and the cells' weights with two checkpoints of the largest."""
    from pipelines.cells import model_of

    place = Path(params.cluster.storage).expanduser() if params.cluster.storage else folder
    if "://" in str(place) or not place.exists():
        return []
    longest = max(params.steps(cell.budget) for cell in cells(params)) * params.training.batch * params.packing.sequence_length
    sizes = [model_of(params, cell).parameters for cell in cells(params)]
    needed = 2 * TOKEN_BYTES * longest + 4 * sum(sizes) + 24 * max(sizes)
    free = shutil.disk_usage(place).free
    if needed <= free:
        return []
    return [
        f"disk: about {needed / GIB:,.0f} GiB are needed for tokens, packed rows and weights, {free / GIB:,.0f} are free; set cluster.storage to a larger place."
    ]


def _accelerators(params: Params) -> list[str]:
    """Kinds of chips that cells ask for and this node lacks; a cluster named by RAY_ADDRESS is asked when work arrives there."""
    found = [
        f"cluster.workers.{name}.count: {worker.count} do not divide training.batch, {params.training.batch} sequences; use a divisor of it."
        for name, worker in params.cluster.workers.items()
        if worker.accelerator and params.training.batch % worker.count
    ]
    if os.environ.get("RAY_ADDRESS"):
        return found
    from pipelines.nodes import accelerators

    here = accelerators()
    wanted: dict[str, int] = {}
    for worker in (params.worker(cell.scale) for cell in cells(params)):
        if worker.accelerator:
            wanted[worker.accelerator] = max(worker.count, wanted.get(worker.accelerator, 0))
    for name, number in sorted(wanted.items()):
        kind = params.accelerators[name].kind
        if kind != "cpu" and here.get(kind, 0) < number:
            found.append(
                f"accelerators: cells want up to {number} x {name}, this node has {here.get(kind, 0)} {kind.upper()}s; "
                "set RAY_ADDRESS to a cluster that has them, or change cluster.workers."
            )
    return found


def _layers(params: Params) -> list[str]:
    from pipelines.cells import model_of

    reasons = {cell.model: reason for cell in cells(params) if (reason := model_of(params, cell).trainable)}
    return [f"models.{name}: {reason}; take it out of the grid." for name, reason in reasons.items()]
