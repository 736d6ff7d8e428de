"""JAX: trains a model by AdamW, and scores sequences; the same interface, arithmetic and names of states as torch's.

Weights are float32; activations are float32 or bfloat16. Shapes: B batch, T time, N = B T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels import arrays
from models.backbone import Model

PRECISIONS = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
CHUNK = 1 << 26
"""Logits held at once by the loss."""

Params = dict[str, jax.Array]


def to_arrays(values: Mapping[str, np.ndarray]) -> Params:
    """numpy arrays as JAX arrays on the default device."""
    return {name: jnp.array(value) for name, value in values.items()}


def to_numpy(value: jax.Array) -> np.ndarray:
    """A copy on the host."""
    return np.array(value)


def frozen(params: Params) -> Params:
    """The same parameters: JAX asks for gradients where they are taken."""
    return params


def head_nll(model: Model, params: Params, x_ND: jax.Array, target_N: jax.Array) -> jax.Array:
    """Negative log likelihoods [N], a few rows of logits at a time, computed again in the backward pass."""
    rows = max(1, min(len(x_ND), CHUNK // model.vocab_size))
    padding = -len(x_ND) % rows
    x = jnp.pad(x_ND, ((0, padding), (0, 0))).reshape(-1, rows, x_ND.shape[-1])
    target = jnp.pad(target_N, (0, padding)).reshape(-1, rows)

    @jax.checkpoint
    def nll(x_RD: jax.Array, target_R: jax.Array) -> jax.Array:
        return arrays.load("jax").softmax_cross_entropy(model.logits(params, x_RD), target_R)

    return jax.lax.map(lambda part: nll(*part), (x, target)).reshape(-1)[: len(x_ND)]


def loss(model: Model, params: Params, dtype: Any, tokens_BT1: Any, segments_BT: Any, weight_BT: Any) -> tuple[jax.Array, tuple]:
    """Weighted sum of the negative log likelihoods, and (each of them [B, T], the layers' scalars)."""
    x_BTD, _, record = model.stream(params, tokens_BT1[:, :-1], segments=segments_BT, dtype=dtype)
    nll_BT = head_nll(model, params, x_BTD.reshape(-1, model.width), tokens_BT1[:, 1:].reshape(-1)).reshape(weight_BT.shape)
    return (nll_BT * weight_BT).sum(), (nll_BT, record)


@functools.partial(jax.jit, static_argnames=("model", "optimizer", "dtype", "parts", "skip_nonfinite"), donate_argnames=("state",))
def train_step(
    state: tuple, tokens_BT1: Any, segments_BT: Any, weight_BT: Any, learning_rate: Any, *, model: Model, optimizer: tuple, dtype: Any,
    parts: int, skip_nonfinite: bool,
) -> tuple:  # fmt: skip
    """One AdamW step over `parts` micro-batches: state (parameters, means, squares, count) and the facts that Trainer.step returns."""
    params, mean, square, count = state
    options = dict(optimizer)

    def add_part(total: tuple, part: tuple) -> tuple:
        tokens, weight, segments = part
        scored = lambda params: loss(model, params, dtype, tokens, segments, weight)  # noqa: E731
        (value, (_, record)), gradient = jax.value_and_grad(scored, has_aux=True)(params)
        return jax.tree.map(jnp.add, total, (value, gradient)), record

    def cut(x: jax.Array) -> jax.Array:
        return x.reshape(parts, -1, *x.shape[1:])

    start = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    given = (cut(tokens_BT1), cut(weight_BT), None if segments_BT is None else cut(segments_BT))
    (value, gradient), records = jax.lax.scan(add_part, start, given)

    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in gradient.values()))
    finite = jnp.isfinite(norm) & jnp.isfinite(value)
    scale, count_after = options["clip"] / jnp.maximum(norm, options["clip"]), count + 1
    beta1, beta2 = options["beta1"], options["beta2"]
    after = ({}, {}, {})
    for name, weight in params.items():
        g = gradient[name] * scale
        m, s = beta1 * mean[name] + (1 - beta1) * g, beta2 * square[name] + (1 - beta2) * g * g
        decay = options["weight_decay"] if model.table[name].decay else 0.0
        update = (m / (1 - beta1**count_after)) / (jnp.sqrt(s / (1 - beta2**count_after)) + options["epsilon"])
        for into, new in zip(after, (weight * (1 - learning_rate * decay) - learning_rate * update, m, s), strict=True):
            into[name] = new
    moved = (*after, count_after)
    if skip_nonfinite:
        moved = jax.tree.map(lambda new, old: jnp.where(finite, new, old), moved, state)
    return moved, {"loss": value, "grad_norm": norm, "finite": finite.astype(jnp.float32), **jax.tree.map(jnp.mean, records)}


@functools.partial(jax.jit, static_argnames=("model", "dtype"))
def scores(params: Params, tokens_BT1: Any, segments_BT: Any, *, model: Model, dtype: Any) -> tuple:
    """Negative log likelihoods [B, T] and the layers' scalars."""
    return loss(model, params, dtype, tokens_BT1, segments_BT, jnp.ones((tokens_BT1.shape[0], tokens_BT1.shape[1] - 1)))[1]


class Trainer:
    """Parameters and AdamW's moments of one model; see models.backends.torch.Trainer, whose arguments and methods these are.

    compile: always, by jax.jit. deterministic: holds on a CPU and a TPU; on a GPU XLA_FLAGS must ask for it. threads: XLA's own.
    """

    def __init__(
        self, model: Model, *, optimizer: Mapping[str, float], seed: int, device: str = "cpu", precision: str = "float32",
        deterministic: bool = False, threads: int | None = None, compile: bool = True,
    ) -> None:  # fmt: skip
        if model.trainable:
            raise ValueError(f"This model cannot be trained: {model.trainable}. Choose other layers, or only plan it.")
        if precision not in PRECISIONS:
            raise ValueError(f"precision is {precision!r}; it is one of {', '.join(PRECISIONS)}.")
        self.model, self.dtype, self.optimizer = model, PRECISIONS[precision], tuple(sorted(optimizer.items()))
        self.device = jax.devices(device)[0]
        self.params = jax.device_put(model.init(seed), self.device)
        self.mean, self.square = (jax.tree.map(jnp.zeros_like, self.params) for _ in range(2))
        self.count = jax.device_put(jnp.zeros((), jnp.float32), self.device)

    def step(
        self, tokens_BT1: np.ndarray, *, learning_rate: float, segments: np.ndarray | None = None, targets_mask: np.ndarray | None = None,
        micro_batch: int | None = None, skip_nonfinite: bool = False,
    ) -> dict[str, float]:  # fmt: skip
        """See the torch Trainer's. Raises ValueError where micro_batch does not divide the rows."""
        rows, length = tokens_BT1.shape[0], tokens_BT1.shape[1] - 1
        micro_batch = micro_batch or rows
        if rows % micro_batch:
            raise ValueError(f"micro_batch {micro_batch} does not divide the batch of {rows} rows; give a divisor of it.")
        mask = np.ones((rows, length), np.float32) if targets_mask is None else np.asarray(targets_mask, np.float32)
        weight = mask / max(float(mask.sum()), 1.0)
        segments = None if segments is None else np.asarray(segments, np.int32)
        state = (self.params, self.mean, self.square, self.count)
        (self.params, self.mean, self.square, self.count), facts = train_step(
            state, np.asarray(tokens_BT1, np.int32), segments, weight, jnp.float32(learning_rate), model=self.model, optimizer=self.optimizer,
            dtype=self.dtype, parts=rows // micro_batch, skip_nonfinite=skip_nonfinite,
        )  # fmt: skip
        return {name: float(value) for name, value in jax.device_get(facts).items()}

    def nll(
        self, tokens_BT1: np.ndarray, *, segments: np.ndarray | None = None, setting: Mapping[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, float]]:
        """See the torch Trainer's."""
        segments = None if segments is None else np.asarray(segments, np.int32)
        model = self.model.with_setting(setting)
        nll_BT, record = scores(self.params, np.asarray(tokens_BT1, np.int32), segments, model=model, dtype=self.dtype)
        return np.array(nll_BT), {name: float(value) for name, value in record.items()}

    def weights(self) -> dict[str, np.ndarray]:
        """The parameters, float32, by the names of the model's table."""
        return {name: to_numpy(self.params[name]) for name in self.model.table}

    def load_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Take over what `weights` gave. Raises ValueError naming the first array that is missing, unknown or of another shape."""
        self._check({name: value.shape for name, value in self.params.items()}, weights)
        self.params = jax.device_put(to_arrays(weights), self.device)

    def state_dict(self) -> dict[str, np.ndarray]:
        """All that an exact resume needs, under the names that the torch Trainer uses."""
        groups = {"parameters": self.params, "mean": self.mean, "square": self.square}
        state = {f"{group}/{name}": to_numpy(values[name]) for group, values in groups.items() for name in self.model.table}
        return {**state, "step": to_numpy(self.count)}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on from `state_dict`. Raises ValueError naming the first array that is missing, unknown or of another shape."""
        self._check({name: value.shape for name, value in self.state_dict().items()}, state)
        self.params, self.mean, self.square = (
            jax.device_put({name: jnp.array(state[f"{group}/{name}"]) for name in self.model.table}, self.device)
            for group in ("parameters", "mean", "square")
        )
        self.count = jax.device_put(jnp.array(state["step"], jnp.float32), self.device)

    @staticmethod
    def _check(shapes: Mapping[str, tuple[int, ...]], given: Mapping[str, np.ndarray]) -> None:
        for name in sorted(shapes.keys() ^ given.keys()):
            side = "lacks" if name in shapes else "has an unknown"
            raise ValueError(f"This checkpoint {side} {name!r}: it belongs to another model. Remove it, or resume the model that made it.")
        for name, shape in shapes.items():
            if shape != given[name].shape:
                raise ValueError(f"{name!r} has shape {given[name].shape} in this checkpoint, {shape} in the model; they differ.")
