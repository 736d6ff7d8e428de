"""One training by several processes, a GPU each: Ray Train places them, starts them, and makes them a process group.

The first runs the stage as a single process would, under its lease; the others do as it does (models/backends/torch_parallel.py).
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ray import exceptions

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
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchConfig, TorchTrainer

    count = request.processes
    gpus = request.resources.get("gpus", 0) / count
    others = {name: size / count for name, size in request.resources.items() if name not in ("cpus", "gpus")}
    each = {"CPU": max(1, request.resources.get("cpus", 1) // count), "GPU": gpus, **others}
    with tempfile.TemporaryDirectory(dir=request.store, prefix=".ray-train-") as folder:
        trainer = TorchTrainer(
            _work,
            train_loop_config={"request": asdict(request), "threads": max(1, threads // count), "outcome": f"{folder}/outcome.json"},
            torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if gpus else "gloo", timeout_s=TIMEOUT),
            scaling_config=ScalingConfig(num_workers=count, use_gpu=gpus > 0, resources_per_worker=each),
            run_config=RunConfig(storage_path=folder, name=request.key[:12], failure_config=FailureConfig(max_failures=0)),
        )
        try:
            trainer.fit()
        except TrainingFailedError as error:
            raise TeamLost(str(error).strip().splitlines()[-1]) from error
        return Outcome(**json.loads(Path(folder, "outcome.json").read_text()))


def _work(given: dict[str, Any]) -> None:
    """One of the processes."""
    from ray import train

    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(given["threads"])
    from models.backends import torch_parallel
    from stages import engine

    request = Request(**given["request"])
    request.threads = given["threads"]
    if train.get_context().get_world_rank() == 0:
        try:
            outcome = execute(request, log=True)
        finally:
            torch_parallel.dismiss()
        Path(given["outcome"]).write_text(json.dumps(asdict(outcome)))
    else:
        spec = Spec.model_validate(request.spec)
        context = Context(threads=request.threads, device=request.device, settings=request.settings)
        with engine.together(context, spec.parameters.get("precision", "float32")):
            pass
