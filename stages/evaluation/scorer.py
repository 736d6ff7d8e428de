"""A trained model on a device: what every kind of unit asks.

Shapes: B batch, T time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stages import engine
from stages.evaluation.parameters import BATCH_TOKENS, Parameters
from stages.evaluation.sequences import Sequence, batches, padded
from stages.spec import Context, Stopped

if TYPE_CHECKING:
    from models.backbone import Model
    from stages.tokenizer import Tokenizer

PROGRESS_SECONDS = 1.0


class Scorer:
    """A model with its weights on a device, and the losses it gives.

    done: unit -> what was scored in it, in how many seconds, and so at what speed.
    """

    def __init__(self, model: Model, parameters: Parameters, weights: Path, context: Context) -> None:
        from models import checkpoint

        self.parameters, self.context = parameters, context
        self.device = engine.device(model, context, parameters.precision)
        self.trainer = engine.trainer(model, context, device=self.device, precision=parameters.precision)
        self.trainer.load_weights(checkpoint.load(weights / "weights.safetensors")[0])
        self.batch_tokens = context.settings.get("batch_tokens", BATCH_TOKENS)
        self.done: dict[str, dict[str, float]] = {}
        self._progress: dict[str, Any] = {}  # which unit is being made
        self._began = self._shown = float("-inf")
        self._tokenizer: Tokenizer | None = None

    def begin(self, unit: str, *, step: int, of: int) -> None:
        """From here on, `unit` is made: number `step` of `of`."""
        self._progress, self._began = {"step": step, "of": of, "unit": unit}, time.perf_counter()

    def seen(self, **counts: int) -> None:
        """So much of the unit (items=12, tokens=8192) is done: note it and show it."""
        seconds = time.perf_counter() - self._began
        speed = {f"{name}_per_second": count / seconds for name, count in counts.items()}
        self.done[self._progress["unit"]] = {"seconds": round(seconds, 3), **counts} | {
            name: round(rate, 2) for name, rate in speed.items()
        }
        self._show(**speed)

    def losses(self, sequences: list[Sequence], *, longest: int, setting: Mapping[str, Any], solver: Solver) -> list[np.ndarray]:
        """float32 [T] of each, in order; NaN where the target is BOS. What the layers' solvers did is added to `solver`."""
        found: list[np.ndarray] = [np.empty(0, np.float32)] * len(sequences)
        for length, batch in batches(sequences, longest=longest, batch_tokens=self.batch_tokens):
            self.poll()
            tokens_BT1, segments_BT = padded([sequences[index] for index in batch], length=length, bos=self.parameters.bos)
            nll_BT, info = self.trainer.nll(tokens_BT1, segments=segments_BT, setting=setting or None)
            solver.add(info, scored=sum(sequences[index].length for index in batch), averaged=nll_BT.size)
            for row, index in enumerate(batch):
                targets = sequences[index].tokens[1:]
                nll = np.nan_to_num(nll_BT[row, : len(targets)], nan=np.inf, posinf=np.inf, neginf=-np.inf)
                found[index] = np.where(targets == self.parameters.bos, np.float32(np.nan), nll).astype(np.float32)
            self.seen(tokens=solver.tokens)
        return found

    def tokenizer(self, vocabulary: Path) -> Tokenizer:
        """The study's, loaded once."""
        if self._tokenizer is None:
            from stages import tokenizer

            self._tokenizer = tokenizer.load(vocabulary, self.context.threads)
        return self._tokenizer

    def poll(self) -> None:
        """Raise Stopped where the stage is asked to stop."""
        if self.context.stop_requested():
            now = self._progress
            raise Stopped(f"at {now['unit']}, unit {now['step'] + 1} of {now['of']}; run again to go on.")

    def _show(self, **speed: float) -> None:
        if time.monotonic() - self._shown >= PROGRESS_SECONDS:
            self._shown = time.monotonic()
            self.context.progress(**self._progress, **speed)


@dataclass
class Solver:
    """Means over scored tokens, heads and layers of what solvers did: steps taken, true residual. None where no layer has one."""

    tokens: int = 0
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, info: dict[str, float], *, scored: int, averaged: int) -> None:
        """Take in a batch's means over `averaged` tokens, of which all but `scored` are padding and count nothing: no step, no residual."""
        self.tokens += scored
        for name, value in info.items():
            self.sums[name] = self.sums.get(name, 0.0) + value * averaged

    def mean(self, name: str) -> float | None:
        return self.sums[name] / self.tokens if name in self.sums else None
