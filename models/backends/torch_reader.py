"""Torch: continuations of a shared beginning; see models/reader.py.

Shapes: B batch, P tokens read, T time, N scored targets, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from models.backends.torch import Trainer
from models.reader import Beginning

LOGITS = 1 << 26
"""Held at once."""


class Reader:
    """See models/reader.py."""

    def __init__(self, trainer: Trainer, setting: Mapping[str, Any] | None = None) -> None:
        self.model, self.dtype = trainer.model.with_setting(setting), trainer.dtype
        self.params = {name: value.detach() for name, value in trainer.params.items()}

    @torch.no_grad()
    def begin(self, tokens_P: np.ndarray) -> Beginning:
        if not len(tokens_P):
            return Beginning(None, 0)
        _, state, _ = self.model.stream(self.params, self._tokens(tokens_P[None]), dtype=self.dtype)
        return Beginning(state, len(tokens_P))

    @torch.no_grad()
    def score(
        self, beginning: Beginning, tokens_BT1: np.ndarray, segments_BT: np.ndarray | None, scored_BT: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        tokens = self._tokens(tokens_BT1)
        x_BTD, _, _ = self._stream(beginning, tokens[:, :-1], segments_BT)
        scored = torch.as_tensor(scored_BT, device=tokens.device)
        x_ND, target_N = x_BTD[scored], tokens[:, 1:][scored].long()
        nll, likeliest = [], []
        rows = max(1, LOGITS // self.model.vocab_size)
        for start in range(0, len(x_ND), rows):
            logits_NV = self.model.logits(self.params, x_ND[start : start + rows])
            nll.append(torch.nn.functional.cross_entropy(logits_NV, target_N[start : start + rows], reduction="none"))
            likeliest.append(logits_NV.argmax(-1))
        return torch.cat(nll).cpu().numpy(), torch.cat(likeliest).cpu().numpy()

    def go_on(self, beginning: Beginning, tokens_BP: np.ndarray, segments_BP: np.ndarray | None, room: int) -> Iterator[np.ndarray]:
        with torch.no_grad():
            x_BPD, state, _ = self._stream(beginning, self._tokens(tokens_BP), segments_BP)
            x_BD = x_BPD[:, -1]
        for left in reversed(range(room)):
            with torch.no_grad():
                token_B = self.model.logits(self.params, x_BD).argmax(-1)
                if left:
                    x_BD, state, _ = self.model.stream(self.params, token_B, state, dtype=self.dtype)
            yield token_B.cpu().numpy()

    def _tokens(self, tokens: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(tokens, dtype=torch.int32).to(self.params["embedding"].device)

    def _stream(self, beginning: Beginning, tokens_BT: torch.Tensor, segments_BT: np.ndarray | None) -> tuple:
        batch = len(tokens_BT)
        state = tree_map(lambda value: _repeated(value, batch), beginning.state) if beginning.tokens else None
        return self.model.stream(self.params, tokens_BT, state, segments_BT, dtype=self.dtype)


def _repeated(value: Any, batch: int) -> Any:
    """A state's array [1, ...] for a batch, taking no memory."""
    return value.expand(batch, *value.shape[1:]) if isinstance(value, torch.Tensor) else value
