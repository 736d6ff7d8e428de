"""Texts that go on from a shared beginning: its state is computed once, then continuations are scored, or greedily gone on with.

A Reader (models/backends/torch_reader.py, jax_reader.py) takes a Trainer's weights and precision, and a solver's setting:

    begin(tokens_P) -> Beginning                         the state after the tokens (int [P]); without tokens, a fresh one
    score(beginning, tokens_BT1, segments_BT, scored_BT) -> (nll_N, likeliest_N)
                                                         of the N targets that are scored, in order: float32 nats, and the likeliest token
    go_on(beginning, tokens_BP, segments_BP, room) -> iterator of likeliest tokens [B], one after another, `room` of them at most

segments are int32, 0 where there is a token and -1 where there is padding: behind the tokens for `score`, in front for `go_on`.
Shapes: B batch, P tokens read, T time.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Beginning:
    """A text's state, of a batch of one, and how many tokens it has."""

    state: Any
    tokens: int


def reader(trainer: Any, setting: Mapping[str, Any] | None = None) -> Any:
    """The Reader of a trainer's weights, its solvers under `setting` ({"steps": 5}; None: as trained)."""
    module = importlib.import_module(f"models.backends.{trainer.model.backend}_reader")
    return module.Reader(trainer, setting)


def size_class(length: int, classes: int = 4) -> int:
    """The length that a sequence is padded to, whatever it is read beside: so many classes (a power of two) to each power of two."""
    step = max(8, (1 << (length - 1).bit_length()) // (2 * classes))
    return -(-length // step) * step
