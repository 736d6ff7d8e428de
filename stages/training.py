"""What a training is asked for: `training:` of params.yaml, and with a cell's own what its spec holds."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from stages.engine import Precision
from stages.spec import Strict


class Replace(Strict):
    """The `count` layers with the longest memory windows become `layer`, an entry as in `models:` of params.yaml."""

    count: int = Field(ge=1)
    by: Literal["memory_window"] = "memory_window"
    layer: dict[str, Any]


class Initial(Strict):
    """drop: patterns (`*`, `?`) of the names of parameters that are not taken over. replace: layers that become others."""

    drop: list[str] = []
    replace: Replace | None = None


class Internals(Strict):
    """`training.internals` of params.yaml. every: steps between two looks. rows: validation sequences looked at."""

    every: int = Field(ge=1)
    rows: int = Field(default=4, ge=1)


class Optimizer(Strict):
    """AdamW, and the global gradient norm that gradients are clipped to (MesaNet, G.3)."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.98, ge=0, lt=1)
    epsilon: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    clip: float = Field(default=1.0, gt=0)


class Training(Strict):
    """`training:` of params.yaml.

    batch: sequences a step. warmup_steps, start_learning_rate, floor: see stages/schedule.py (floor: a fraction of the peak).
    seed: of the initial weights. precision: of activations; weights, their moments, norms, gates and losses are float32.
    reset: whether states start anew at each document in a row. on_nonfinite: what happens when a loss or gradient is not finite:
    stop with what there is; skip that step's update; roll back to the last checkpoint and leave out that batch on the way.
    checkpoint_every: steps; never in a spec (nor in `model_dump`), since it changes no result. deterministic: bit-exact resume on a GPU too, which costs some speed.
    internals: how often layers that can are looked at inside on the way (stages/course.py); null: never. It changes no weight.
    """

    batch: int = Field(ge=1)
    optimizer: Optimizer = Optimizer()
    warmup_steps: int = Field(default=2000, ge=0)
    start_learning_rate: float = Field(default=1e-6, ge=0)
    floor: float = Field(default=0.1, ge=0, le=1)
    seed: int = Field(default=0, ge=0)
    precision: Precision = "float32"
    reset: bool = False
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    checkpoint_every: int = Field(default=1000, ge=1, exclude=True)
    deterministic: bool = False
    internals: Internals | None = None


class Parameters(Training):
    """What a training's spec holds: `training:`, its cell's model and scale as params.yaml has them, and the sizes that follow.

    steps: of the whole run. learning_rate: the peak. init: of a training that starts from the weights of another (see stages/initial.py).
    internals_code: the version of what is looked at.
    """

    model: dict[str, Any]
    scale: dict[str, int]
    vocab_size: int = Field(ge=1)
    bos: int = Field(ge=0)
    sequence_length: int = Field(ge=1)
    steps: int = Field(ge=1)
    learning_rate: float = Field(gt=0)
    init: Initial | None = None
    internals_code: int = 1
