"""Where a model runs: the framework, the device, and the trainer that a context asks for. Nothing here is identity but what it is given."""

from __future__ import annotations

import errno
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from stages.spec import Context

if TYPE_CHECKING:
    from models.backbone import Model
    from models.backends.torch import Team, Trainer

Precision = Literal["float32", "bfloat16"]
NEEDS = {"torch": ("torch",), "jax": ("jax", "optax")}  # the libraries that each framework's trainer is made of
OPTIONS = {"torch": ("rematerialise",), "jax": ("devices", "fsdp", "rematerialise")}  # of settings, for the trainer
Read = Callable[[int, slice], dict[str, Any]]
FULL = (errno.ENOSPC, errno.EDQUOT)


def backend(context: Context) -> str:
    """The framework that a context means, "torch" (also where it names none) or "jax". ValueError where it is unknown or not installed."""
    found = context.settings.get("backend") or "torch"
    if found not in NEEDS:
        raise ValueError(f"Backend {found!r} was asked for; it is one of {', '.join(NEEDS)}.")
    if missing := [name for name in NEEDS[found] if importlib.util.find_spec(name) is None]:
        raise ValueError(f"Backend {found} needs {' and '.join(missing)}, not installed here: pip install 'strata[tpu]', or use torch.")
    return found


def device(model: Model, context: Context, precision: Precision) -> str:
    """The device a context means: "cpu", "cuda" or "tpu", "auto" taking the best there is.

    The precision is part of what is computed, so it is never changed to suit a device: ValueError where the device cannot do it.
    """
    return model.framework.find_device(context.device, precision=precision, threads=context.threads)


def trainer(
    model: Model,
    context: Context,
    *,
    device: str,
    precision: Precision,
    optimizer: dict[str, float] | None = None,
    seed: int = 0,
    deterministic: bool = False,
    team: Team | None = None,
) -> Trainer:
    """The trainer of a model; without an optimizer, for scoring alone.

    The context's settings["compile"] says whether to compile; if it does not, training on a GPU does. Scoring sees too many shapes
    and settings for that to pay: torch compiles a block for each, and gives up after eight. JAX always compiles. settings["rematerialise"]
    saves memory, at the cost of a third more work; ["devices"] and ["fsdp"] are JAX's own (see models/backends/jax.py).
    team: of the processes that train together, in the one that leads them. settings["spread"]: whether what they write lies in one folder.
    """
    options = {name: context.settings[name] for name in OPTIONS[model.backend] if context.settings.get(name) is not None}
    options |= {
        "optimizer": optimizer,
        "seed": seed,
        "device": device,
        "precision": precision,
        "deterministic": deterministic,
        "threads": context.threads,
        "compile": context.settings.get("compile", device != "cpu" and optimizer is not None),
    }
    make = model.framework.Trainer
    if team is None:
        return make(model, **options)
    if model.backend == "jax":
        from models.backends import jax_parallel

        return jax_parallel.Leader(team, make, replace(model), options, spread=context.settings.get("spread", True))
    from models.backends.torch_parallel import Leader

    return Leader(team, partial(make, team=team), replace(model), options)


@contextmanager
def together(context: Context, precision: Precision, read: Read | None = None) -> Iterator[Team | None]:
    """The processes that were started to train together, by torchrun, Ray Train or by hand, this one among them; None where it is alone.

    What is inside runs on rank 0; on the others there is nothing left to do: they have done as rank 0 did, to its end.
    read: where JAX has each process read its own rows, how it does: (a batch's number, which of its rows) -> what Trainer.step takes.
    """
    if backend(context) == "jax":
        from models.backends import jax as framework
        from models.backends import jax_parallel as parallel

        make, more = framework.Trainer, (read,)
    else:
        from models.backends import torch as framework
        from models.backends import torch_parallel as parallel

        make, more = framework.Trainer, ()
    if not parallel.started():
        yield None
        return
    if backend(context) == "jax":  # JAX's processes meet before any computes, torch's on devices that they have found
        team = parallel.Team.join(context.device)
        framework.find_device(context.device, precision=precision, threads=context.threads)
    else:
        team = parallel.Team.join(framework.find_device(context.device, precision=precision, threads=context.threads))
        make = partial(make, team=team)
    try:
        if team.rank == 0:
            with parallel.leading():
                yield team
        else:
            parallel.follow(team, make, *more)
            yield team
    finally:
        team.leave()


def segment_ids(lengths: list[np.ndarray], inputs: int) -> np.ndarray:
    """int32 [B, inputs]: which piece of its row each input token belongs to, from the pieces' lengths (BOS opens its piece)."""
    return np.stack([np.repeat(np.arange(len(row), dtype=np.int32), row)[:inputs] for row in lengths])


@contextmanager
def told_of_full_disk(out: Path) -> Iterator[None]:
    """Turn a full disk into one sentence; any other error stays what it is."""
    try:
        yield
    except Exception as error:
        # The errors of libraries in Rust (safetensors, tokenizers) carry the number in their text alone.
        if getattr(error, "errno", None) in FULL or any(f"os error {number})" in str(error) for number in FULL):
            raise ValueError(f"The disk of {out} is full ({error}). Free some space and run again: what is complete is kept.") from error
        raise


def finite_or_none(value: Any) -> float | None:
    """A number as JSON can hold it."""
    return float(value) if value is not None and float("-inf") < value < float("inf") else None
