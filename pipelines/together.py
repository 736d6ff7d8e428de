"""One training by several processes, a GPU or a TPU slice's host each: Ray Train places them, starts them, and makes them a process group
(torch.distributed, jax.distributed).

The first runs the stage as a single process would, under its lease; the others do as it does (models/backends/torch_parallel.py, jax_parallel.py).
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ray import exceptions

from pipelines import environment, objects
from pipelines.opening import open_store
from pipelines.work import Outcome, Request, execute
from stages.spec import Context, Spec

TIMEOUT = 2 * 3600  # seconds that a process waits for another: the first may be writing a checkpoint


class TeamLost(exceptions.WorkerCrashedError):
    """One of the processes ended by itself, and the rest with it."""

    def __init__(self, why: str = "") -> None:
        super().__init__(why)
        self.why = why

    def __str__(self) -> str:
        return self.why


def execute_together(request: Request, threads: int) -> Outcome:
    """Run a request by as many processes as it asks for. Raises TeamLost where one of them is lost."""
    from ray.train import FailureConfig, RunConfig, TrainingFailedError

    store = objects.at(request.store)
    place = f"ray-train/{request.key[:12]}-{uuid.uuid4().hex[:8]}"
    run = RunConfig(**_storage(store, place), name=request.key[:12], failure_config=FailureConfig(max_failures=0))
    given = {"request": asdict(request), "threads": max(1, threads // request.processes), "outcome": f"{place}/outcome.json"}
    try:
        _trainer(request, given, run).fit()
        return Outcome(**json.loads(store.read(given["outcome"]) or b""))
    except TrainingFailedError as error:
        if strange := next((line for line in str(error).splitlines() if environment.DIFFERS in line), None):
            return Outcome("failed", strange[strange.index(environment.WORKER) :], "mistake")
        raise TeamLost(str(error).strip().splitlines()[-1]) from error
    finally:
        _remove(store, place)


def _storage(store: objects.Objects, place: str) -> dict[str, Any]:
    """Where Ray Train keeps what its processes tell each other: in the store, which all nodes see."""
    if not isinstance(store, objects.Bucket):
        return {"storage_path": f"{store.where}/{place}"}
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    return {"storage_path": store.path(place), "storage_filesystem": PyFileSystem(FSSpecHandler(store.fs))}


def _remove(store: objects.Objects, place: str) -> None:
    if isinstance(store, objects.Bucket):
        store.remove(store.list(place))
    else:
        shutil.rmtree(Path(store.where, place), ignore_errors=True)


def _trainer(request: Request, given: dict[str, Any], run: Any) -> Any:
    """Ray Train's trainer of the request's framework. A TPU slice is reserved whole; its hosts are the processes."""
    from ray.train import ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    (place,) = replace(request, places=[]).choices
    count, each = place.processes, place.each
    if place.topology is not None:
        scaling = ScalingConfig(
            num_workers=count, use_tpu=True, topology=place.topology, accelerator_type=place.type, resources_per_worker=each
        )
    else:
        scaling = ScalingConfig(
            num_workers=count,
            use_gpu="GPU" in each,
            resources_per_worker=each,
            label_selector=[place.labels] * count if place.labels else None,
        )
    if place.backend != "jax":
        torch_config = TorchConfig(backend="cpu:gloo,cuda:nccl" if "GPU" in each else "gloo", timeout_s=TIMEOUT)
        return TorchTrainer(_work, train_loop_config=given, torch_config=torch_config, scaling_config=scaling, run_config=run)
    from ray.train.v2.jax import JaxTrainer
    from ray.train.v2.jax.config import JaxConfig

    if place.device == "cpu":
        run.worker_runtime_env = {"env_vars": {"JAX_PLATFORMS": "cpu"}}
    # Without use_tpu Ray leaves jax.distributed alone; on which platform it sets it up, JAX_PLATFORMS says.
    return JaxTrainer(_work, train_loop_config=given, jax_config=JaxConfig(use_tpu=True), scaling_config=scaling, run_config=run)


def _work(given: dict[str, Any]) -> None:
    """One of the processes."""
    from ray import train

    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(given["threads"])
    from stages import train as stage

    request = Request(**given["request"])
    if strange := environment.difference(request.environment, request.settings.get("backend") or "torch"):
        raise RuntimeError(strange)
    request.settings["spread"] = not objects.is_url(request.store)
    request.threads = given["threads"]
    if request.settings.get("backend") == "jax":
        from models.backends.jax_parallel import dismiss
    else:
        from models.backends.torch_parallel import dismiss
    if train.get_context().get_world_rank() == 0:
        try:
            outcome = execute(request, log=True)
        finally:
            dismiss()
        objects.at(request.store).write(given["outcome"], json.dumps(asdict(outcome)).encode())
    else:
        request = request.located(open_store(request.store))  # a bucket's files come to this machine, too
        context = Context(threads=request.threads, device=request.device, settings=request.settings)
        stage.help(Spec.model_validate(request.spec), {name: Path(path) for name, path in request.inputs.items()}, context)
