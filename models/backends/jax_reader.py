"""JAX: continuations of a shared beginning; see models/reader.py.

A batch is filled up to a power of two of rows, so that few shapes are compiled.
Shapes: B batch, P tokens read, T time, N scored targets, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.backbone import Model
from models.backends.jax import Trainer
from models.backends.jax_stack import Params, Stack
from models.reader import Beginning

LOGITS = 1 << 26
"""Held at once."""


class Reader:
    """See models/reader.py."""

    def __init__(self, trainer: Trainer, setting: Mapping[str, Any] | None = None) -> None:
        self.model, self.dtype, self.params = trainer.model.with_setting(setting), trainer.dtype, trainer.params

    def begin(self, tokens_P: np.ndarray) -> Beginning:
        if not len(tokens_P):
            return Beginning(None, 0)
        padding = -len(tokens_P) % 64  # in front, where it changes nothing
        tokens, segments = np.pad(tokens_P, (padding, 0)), np.repeat(np.array([-1, 0], np.int32), [padding, len(tokens_P)])
        _, state = _stream(self.params, np.asarray(tokens[None], np.int32), None, segments[None], model=self.model, dtype=self.dtype)
        return Beginning(state, len(tokens))

    def score(
        self, beginning: Beginning, tokens_BT1: np.ndarray, segments_BT: np.ndarray | None, scored_BT: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        x_BTD, _ = self._read(beginning, tokens_BT1[:, :-1], segments_BT)
        row_N, place_N = np.nonzero(scored_BT)
        target_N = np.asarray(tokens_BT1[row_N, place_N + 1], np.int32)
        nll, likeliest = [], []
        size = max(1, LOGITS // self.model.vocab_size)
        for start in range(0, len(row_N), size):
            part = slice(start, start + size)
            count = len(row_N[part])
            fill = min(1 << (count - 1).bit_length(), size) - count
            row, place, target = (np.pad(value[part], (0, fill)) for value in (row_N, place_N, target_N))
            found = _head(self.params, x_BTD, row, place, target, model=self.model)
            nll.append(np.asarray(found[0])[:count])
            likeliest.append(np.asarray(found[1])[:count])
        return np.concatenate(nll), np.concatenate(likeliest)

    def go_on(self, beginning: Beginning, tokens_BP: np.ndarray, segments_BP: np.ndarray | None, room: int) -> Iterator[np.ndarray]:
        x_BPD, state = self._read(beginning, tokens_BP, segments_BP)
        state = Stack(self.model).reserve(state, beginning.tokens + tokens_BP.shape[1] + room)
        token_B = _likeliest(self.params, x_BPD[:, -1], model=self.model)
        for left in reversed(range(room)):
            yield np.asarray(token_B)[: len(tokens_BP)]
            if left:
                token_B, state = _step(self.params, token_B, state, model=self.model, dtype=self.dtype)

    def _read(self, beginning: Beginning, tokens_BT: np.ndarray, segments_BT: np.ndarray | None) -> tuple:
        batch, length = tokens_BT.shape
        segments = np.zeros((batch, length), np.int32) if segments_BT is None else segments_BT
        fill = (1 << (batch - 1).bit_length()) - batch
        tokens = np.pad(np.asarray(tokens_BT, np.int32), ((0, fill), (0, 0)))
        segments = np.pad(np.asarray(segments, np.int32), ((0, fill), (0, 0)), constant_values=-1)
        state = beginning.state and jax.tree.map(partial(_repeated, batch=batch + fill), beginning.state)
        return _stream(self.params, tokens, state, segments, model=self.model, dtype=self.dtype)


def _repeated(value: jax.Array, batch: int) -> jax.Array:
    """A stacked state [R, 1, ...] for a batch."""
    return jnp.broadcast_to(value, (value.shape[0], batch, *value.shape[2:]))


@partial(jax.jit, static_argnames=("model", "dtype"))
def _stream(params: Params, tokens_BT: jax.Array, state: Any, segments_BT: jax.Array, *, model: Model, dtype: Any) -> tuple:
    x_BTD, state, _ = Stack(model).stream(params, tokens_BT, state, segments_BT, dtype=dtype, keep_states=True)
    return x_BTD, state


@partial(jax.jit, static_argnames=("model",))
def _head(params: Params, x_BTD: jax.Array, row_N: jax.Array, place_N: jax.Array, target_N: jax.Array, *, model: Model) -> tuple:
    logits_NV = model.logits(params, x_BTD[row_N, place_N])
    chosen_N = jnp.take_along_axis(logits_NV, target_N[:, None], 1)[:, 0]
    return jax.nn.logsumexp(logits_NV, -1) - chosen_N, logits_NV.argmax(-1)


@partial(jax.jit, static_argnames=("model",))
def _likeliest(params: Params, x_BD: jax.Array, *, model: Model) -> jax.Array:
    return model.logits(params, x_BD).argmax(-1).astype(jnp.int32)


@partial(jax.jit, static_argnames=("model", "dtype"), donate_argnames=("state",))
def _step(params: Params, token_B: jax.Array, state: Any, *, model: Model, dtype: Any) -> tuple:
    x_BD, state, _ = Stack(model).stream(params, token_B, state, dtype=dtype, keep_states=True)
    return model.logits(params, x_BD).argmax(-1).astype(jnp.int32), state
