"""Could this study run here? Everything that is missing, each with what to do, before any work starts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from pipelines.objects import is_url, normal
from pipelines.params import Params, Worker, cells
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
    """What is missing, one sentence each: data, disk, workers, accelerators, layers without a forward pass."""
    return [*_data(params, folder), *_disk(params, folder), *_workers(params), *_accelerators(params), *_layers(params)]


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

    if is_url(params.cluster.storage or ""):
        return _bucket(params.cluster.storage or "")
    place = Path(params.cluster.storage).expanduser() if params.cluster.storage else folder
    if not place.exists():
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


def _workers(params: Params) -> list[str]:
    """Workers whose chips cannot share a step's sequences evenly."""
    return [
        f"cluster.workers.{name}.{'topology' if worker.topology else 'count'}: {worker.chips} do not divide training.batch, "
        f"{params.training.batch} sequences; use a divisor of it."
        for name in params.cluster.workers
        for worker in params.workers(name)
        if worker.accelerator and params.training.batch % worker.chips
    ]


def _bucket(url: str) -> list[str]:
    """What stands against a store in this bucket."""
    from pipelines.objects import bucket

    try:
        bucket(normal(url))
    except ValueError as error:
        return [f"cluster.storage: {error}"]
    return []


def _accelerators(params: Params) -> list[str]:
    """Kinds of chips that cells ask for and this node lacks, or what the cluster that RAY_ADDRESS names does."""
    if os.environ.get("RAY_ADDRESS"):
        return _nodes(params)
    from pipelines.nodes import accelerators

    here, found = accelerators(), []
    for scale in dict.fromkeys(cell.scale for cell in cells(params)):
        workers = params.workers(scale)
        if any(_has(here, params, worker) for worker in workers):
            continue
        wanted = " or ".join(f"{worker.chips} x {worker.accelerator}" for worker in workers)
        kinds = dict.fromkeys(params.accelerators[worker.accelerator].kind for worker in workers if worker.accelerator)
        found.append(
            f"accelerators: cells of {scale} want {wanted}, this node has {' and '.join(f'{here.get(kind, 0)} {kind.upper()}s' for kind in kinds)}; "
            "set RAY_ADDRESS to a cluster that has them, or change cluster.workers."
        )
    return found


def _has(here: dict[str, int], params: Params, worker: Worker) -> bool:
    """Whether this node has a worker's chips, of whatever name."""
    kind = params.accelerators[worker.accelerator].kind if worker.accelerator else "cpu"
    return kind == "cpu" or here.get(kind, 0) >= worker.chips


def _nodes(params: Params) -> list[str]:
    """What the cluster that RAY_ADDRESS names can never run: said before anything begins there."""
    from pipelines import head, placement
    from pipelines.resolve import context
    from pipelines.run import place

    address = head.address_from_environment()
    if address is None:
        return []
    given = context(params)
    nodes = placement.nodes_at(address) + placement.later(given["grows"])
    found = []
    for scale in dict.fromkeys(["default", *(cell.scale for cell in cells(params))]):
        workers = given["workers"].get(next((cell.name for cell in cells(params) if cell.scale == scale), scale))
        for stage in ("train", "evaluate") if scale != "default" else ("pack",):
            places = [place(stage, worker) for worker in workers]
            if placement.first(places, nodes) is None:
                what = f"{stage} of {scale}" if scale != "default" else "a stage without a scale (cluster.workers.default)"
                found.append(f"cluster: {placement.refusal(what, places, nodes)}")
    return found


def _layers(params: Params) -> list[str]:
    from pipelines.cells import model_of

    reasons = {cell.model: reason for cell in cells(params) if (reason := model_of(params, cell).trainable)}
    return [f"models.{name}: {reason}; take it out of the grid." for name, reason in reasons.items()]
