"""Where a model runs: the device, and the trainer that a context asks for. Nothing here is identity but what it is given."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from stages.spec import Context

if TYPE_CHECKING:
    from models.backbone import Model
    from models.backends.torch import Trainer

Precision = Literal["float32", "bfloat16"]
FULL = (errno.ENOSPC, errno.EDQUOT)


def device(context: Context, precision: Precision) -> str:
    """The device a context means: "cpu" or "cuda", "auto" taking the GPU where there is one.

    The precision is part of what is computed, so it is never changed to suit a device: ValueError where the device cannot do it.
    """
    import torch

    found = ("cuda" if torch.cuda.is_available() else "cpu") if context.device == "auto" else context.device
    if found.startswith("cuda"):
        if not torch.cuda.is_available():
            raise ValueError("Device cuda was asked for and torch finds no GPU here: use --device cpu, or run where one is.")
        if precision == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise ValueError(f"{torch.cuda.get_device_name()} has no bfloat16: set training.precision to float32, or run on another GPU.")
    return found


def trainer(
    model: Model,
    context: Context,
    *,
    device: str,
    precision: Precision,
    optimizer: dict[str, float] | None = None,
    seed: int = 0,
    deterministic: bool = False,
) -> Trainer:
    """The trainer of a model; without an optimizer, for scoring alone.

    The context's settings["compile"] says whether to compile; if it does not, training on a GPU does. Scoring sees too many shapes
    and settings for that to pay: torch compiles a block for each, and gives up after eight.
    """
    from models.backends.torch import Trainer

    return Trainer(
        model,
        optimizer=optimizer,
        seed=seed,
        device=device,
        precision=precision,
        deterministic=deterministic,
        threads=context.threads,
        compile=context.settings.get("compile", device != "cpu" and optimizer is not None),
    )


def device_name(device: str) -> str:
    """What provenance calls a device: a GPU by its model."""
    import torch

    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def segment_ids(lengths: list[np.ndarray], inputs: int) -> np.ndarray:
    """int32 [B, inputs]: which piece of its row each input token belongs to, from the pieces' lengths (BOS opens its piece)."""
    return np.stack([np.repeat(np.arange(len(row), dtype=np.int32), row)[:inputs] for row in lengths])


@contextmanager
def told_of_full_disk(out: Path) -> Iterator[None]:
    """Turn a full disk into one sentence; any other error of the system stays what it is."""
    try:
        yield
    except OSError as error:
        # safetensors' own errors carry the number in their text alone.
        if error.errno in FULL or any(f"os error {number})" in str(error) for number in FULL):
            raise ValueError(f"The disk of {out} is full ({error}). Free some space and run again: what is complete is kept.") from error
        raise


def finite_or_none(value: Any) -> float | None:
    """A number as JSON can hold it."""
    return float(value) if value is not None and float("-inf") < value < float("inf") else None
