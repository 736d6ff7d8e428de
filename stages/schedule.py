"""The learning rate of a step: linear warm-up, then a cosine (MesaNet, G.3)."""

from __future__ import annotations

import math


def learning_rate(step: int, *, steps: int, peak: float, start: float, warmup: int, floor: float) -> float:
    """The rate of step `step` (0, 1, ... steps - 1) of a run of `steps`.

    Linear from `start` at step 0 to `peak` at step `warmup`, then a cosine that reaches `floor` * `peak` where the run ends,
    at step `steps`. A run that is over before its warm-up never gets to its peak.
    """
    assert 0 <= step < steps and warmup >= 0, (step, steps, warmup)
    if step < warmup:
        return start + (peak - start) * step / warmup
    done = (step - warmup) / (steps - warmup)
    return peak * (floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2)
