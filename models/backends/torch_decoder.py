"""Torch: sequences that go on a token at a time.

Shapes: B batch, P prompt, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from models.backbone import Model
from models.backends.torch_arrays import to_numpy


class Decoder:
    """Sequences that go on a token at a time, by each layer's step. params: by the names of the model's table; no gradient is asked of them."""

    def __init__(self, model: Model, params: Mapping[str, torch.Tensor]) -> None:
        self.model, self.params = model, {name: value.detach() for name, value in params.items()}

    def prefill(self, tokens_BP: np.ndarray, segments_BP: np.ndarray | None = None) -> np.ndarray:
        """The prompts at once: logits [B, V], float32, of the token after each."""
        x_BPD, self.states, _ = self.model.stream(self.params, tokens_BP, segments=segments_BP)
        return to_numpy(self.model.logits(self.params, x_BPD[:, -1]))

    def step(self, token_B: np.ndarray) -> np.ndarray:
        """One more token of each sequence: logits [B, V] of the next."""
        logits_BV, self.states = self.model.step(self.params, token_B, self.states)
        return to_numpy(logits_BV)
