"""The schema of params.yaml, composed of each stage's own parameter class, and the cells that it selects."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, field_validator

from pipelines import slices
from stages.evaluation.parameters import Evaluation
from stages.pack import Packing
from stages.report.parameters import Analysis
from stages.sources import Source
from stages.spec import Strict
from stages.tasks.entry import Task
from stages.training import Training
from stages.vocabulary import Vocabulary

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
    utilization: the share of the peak that a training step is expected to reach. type: what Ray's nodes call it in their label
    ray.io/accelerator-type; null: its own name, in Ray's spelling (h100: H100, v5p: TPU-V5P); "any": whatever there is of its kind.
    """

    kind: Literal["cpu", "gpu", "tpu"]
    flops: PositiveFloat
    memory: PositiveFloat
    cost: Annotated[float, Field(ge=0)]
    utilization: Annotated[float, Field(gt=0, le=1)]
    type: str | None = None


def _topology(value: str | None) -> str | None:
    return None if value is None else slices.topology(value)


class Worker(Strict):
    """What the worker of a cell needs. accelerator: a name of `accelerators`, or null for processors alone; count: how many of it.

    topology: of a TPU slice, all of which is taken: its chips along each axis ("2x4", "2x2x2") or its name ("v5p-16"); then cpus are of each
    host, and count follows. backend: which framework computes there; null: jax on a TPU, else torch. fsdp: over how many of the chips each
    parameter is split, under jax.
    """

    cpus: PositiveInt = 2
    accelerator: str | None = None
    count: PositiveInt = 1
    topology: Annotated[str | None, AfterValidator(_topology)] = None
    backend: Literal["torch", "jax"] | None = None
    fsdp: PositiveInt | None = None

    @property
    def chips(self) -> int:
        """How many chips a cell gets here."""
        return slices.chips(self.topology) if self.topology else self.count


class Growth(Strict):
    """Nodes that an autoscaling cluster may add. nodes: how many at most (slices, of a TPU with a topology). The rest as a Worker's: of a node."""

    nodes: PositiveInt
    cpus: PositiveInt
    accelerator: str | None = None
    count: PositiveInt = 1
    topology: Annotated[str | None, AfterValidator(_topology)] = None


class Cluster(Strict):
    """Where work goes and how much of it at once: never part of what a result is.

    storage: the store: a folder seen by all nodes, or a bucket (s3://bucket/path, gs://bucket/path; docs/storage.md); null: .strata/ in the repository. workers: by scale; "default" for the other stages; several
    in order of preference, of which a cell takes the first that has room. grows: what an autoscaling cluster may become.
    code: how its nodes get this code: "shared", a path that all see, or "upload", a copy of the tracked files. python: theirs; null: this one's path
    (code: shared), or what they call python. image: a container that holds code and environment, in place of both.
    retries: after a lost worker or node, not after an error. ahead: how many stages may run at once that a plain `dvc repro` will ask for later.
    confirm_hours: accelerator-hours above which a study wants `strata approve` before its first training.
    """

    storage: str | None = None
    workers: dict[str, Worker | Annotated[list[Worker], Field(min_length=1)]] = {}
    grows: list[Growth] = []
    code: Literal["shared", "upload"] = "shared"
    python: str | None = None
    image: str | None = None
    retries: Annotated[int, Field(ge=0)] = 2
    ahead: Annotated[int, Field(ge=0)] = 64
    confirm_hours: Annotated[float, Field(ge=0)] = 24.0

    @field_validator("storage")
    @classmethod
    def _a_place(cls, value: str | None) -> str | None:
        if value is not None and re.match(r"[a-z0-9+.-]*://[^/@]*@", value):
            raise ValueError(
                "holds a user or a password; leave credentials to the environment (AWS_PROFILE, GOOGLE_APPLICATION_CREDENTIALS)"
            )
        if value is not None and ("::" in value or value.startswith(("http://", "https://", "hf://"))):
            raise ValueError(
                f"is {value!r}; a store is a folder that all nodes see, or a bucket that can be written to: s3://bucket/path, gs://bucket/path"
            )
        return value


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
    tasks: dict[str, Task] = {}
    analysis: Analysis
    accelerators: dict[str, Accelerator] = {}
    cluster: Cluster = Cluster()
    outputs: Literal["files", "pointers"] = "files"
    tracking: str | None = None

    def learning_rate(self, model: str, scale: str, budget: str) -> float:
        """The peak learning rate of a cell."""
        rate = self.learning_rates[model][scale][budget]
        return rate.rate if isinstance(rate, Rate) else rate

    def steps(self, budget: str) -> int:
        """Optimiser steps of a budget: whole batches only."""
        return self.budgets[budget].tokens // (self.training.batch * self.packing.sequence_length)

    def workers(self, scale: str) -> list[Worker]:
        """The workers that a scale's cells may have, the preferred first."""
        found = self.cluster.workers.get(scale) or self.cluster.workers.get("default") or Worker()
        return found if isinstance(found, list) else [found]

    def worker(self, scale: str) -> Worker:
        """The preferred one."""
        return self.workers(scale)[0]

    def groups(self) -> dict[str, Grid]:
        """The matrices of cells, by the name of their table in params.yaml."""
        return {"grid": self.grid, "references": self.references, "sweep": self.sweep}


@dataclass(frozen=True)
class Cell:
    """One model at one scale on one budget. group: the table of params.yaml that selects it."""

    model: str
    scale: str
    budget: str
    group: str

    @property
    def name(self) -> str:
        return f"{self.model}-{self.scale}-{self.budget}"


def cells(params: Params) -> list[Cell]:
    """Every cell of the study, in the order of params.yaml."""
    return [
        Cell(model, scale, budget, group)
        for group, grid in params.groups().items()
        for model in grid.models
        for scale in grid.scales
        for budget in grid.budgets
    ]
