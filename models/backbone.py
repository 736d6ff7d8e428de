"""The backbone every layer sits on: a pre-norm decoder in the manner of Llama 2 (MesaNet, section 4, E.1 and G.2).

    x = sqrt(D) embedding[token];  each block: x += layer(RMSNorm(x)), x += MLP(RMSNorm(x))    (some layers: no MLP)
    MLP(x) = (SiLU(x W_gate) * x W_up) W_down;  logits = 30 tanh(RMSNorm(x) embedding^T / 30)

Shapes: B batch, T time, D width, M MLP width, V vocabulary.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from types import ModuleType
from typing import Any

from kernels import arrays
from kernels.head_loss import SOFT_CAP
from models.layers.layer import TRAINING, Array, Layer, State, linear, product
from models.parameters import Parameter, Table, behind, count, fan_in_transposed, initialise, ones, prefixed, residual

BACKENDS = ("torch", "jax")
NORM_EPSILON = 1e-6


@dataclass(frozen=True)
class Model:
    """A stack of blocks, one layer each, as pure functions over a dict of parameters.

    layers: of each block, first to last. width, mlp: of the stream and of the MLP's branches. backend: whose arrays it takes.
    """

    layers: tuple[Layer, ...]
    width: int
    mlp: int
    vocab_size: int
    backend: str = "torch"

    @cached_property
    def table(self) -> Table:
        """Every parameter by name: "embedding", "blocks.0.mixer.q", "blocks.0.mlp.gate", ..., "final_norm"."""
        norm = Parameter((self.width,), ones, decay=False, axes=("width",))
        table = {"embedding": Parameter((self.vocab_size, self.width), fan_in_transposed, decay=False, axes=("vocabulary", "width"))}
        for index, layer in enumerate(self.layers):
            block = {
                "mixer_norm": norm,
                **prefixed("mixer", layer.parameters()),
            }
            mlp = {
                "mlp_norm": norm,
                "mlp.gate": Parameter((self.width, self.mlp), axes=("width", "mlp")),
                "mlp.up": Parameter((self.width, self.mlp), axes=("width", "mlp")),
                "mlp.down": Parameter((self.mlp, self.width), residual, axes=("mlp", "width")),
            }
            table.update(prefixed(f"blocks.{index}", block | mlp if layer.mlp else block))
        return {**table, "final_norm": norm}

    @cached_property
    def parameters(self) -> int:
        """How many scalars are trained; the tied embedding counts once."""
        return count(self.table)

    @property
    def trainable(self) -> str | None:
        """None, or why there is a table and a cost but no forward pass."""
        return next((reason for layer in self.layers if (reason := layer.trainable)), None)

    def flops(self, length: int, *, steps: float | None = None, training: bool = False) -> float:
        """Floating-point operations a token, averaged over a sequence of `length`; a multiply-add is two, element-wise work is not counted.

        steps: solver steps taken by layers that have a solver (None: their cap). training: forward and backward; a solver runs once
        in each; recomputed activations are not counted.
        """
        mlps = sum(layer.mlp for layer in self.layers)
        dense = mlps * product(3, self.width, self.mlp) + product(self.vocab_size, self.width)
        layers = sum(layer.flops(length, steps=steps, training=training) for layer in self.layers)
        return (TRAINING if training else 1) * dense + layers

    def state_floats(self, length: int) -> int:
        """Scalars kept a sequence after `length` tokens of decoding, without convolution caches."""
        return sum(layer.state_floats(length) for layer in self.layers)

    # What needs a framework
    @cached_property
    def ops(self) -> ModuleType:
        """The backend's array operations."""
        return arrays.load(self.backend)

    @cached_property
    def framework(self) -> ModuleType:
        """models.backends.torch or .jax: the backend's arrays from numpy and back, and its Trainer."""
        return importlib.import_module(f"models.backends.{self.backend}")

    @cached_property
    def _names(self) -> list[dict[str, str]]:
        """For each block, its parameters' own names and their names in the table."""
        return [behind(f"blocks.{index}.", {name: name for name in self.table}) for index in range(len(self.layers))]

    def init(self, seed: int) -> dict[str, Array]:
        """Initial parameters as the backend's float32 arrays; the values depend on the seed and on their names alone."""
        values = initialise(self.table, seed=seed, blocks=len(self.layers))
        return self.framework.to_arrays(values)

    def block(
        self, layer: Layer, p: Mapping[str, Array], x: Array, state: State | None, segments: Array | None
    ) -> tuple[Array, State, dict[str, Array]]:
        """One block on the stream [B, T, D], or [B, D] for one token: the stream after it, its layer's state, its layer's scalars."""
        x, y, state, record = self.unsummed(layer, p, x, state, segments)
        return x + y, state, record

    def unsummed(
        self, layer: Layer, p: Mapping[str, Array], x: Array, state: State | None, segments: Array | None
    ) -> tuple[Array, Array, State, dict[str, Array]]:
        """`block` before its last sum: the stream and what is to be added to it, for whoever sums and normalises in one go."""
        ops, record = self.ops, {}
        mixer = behind("mixer.", p)
        z = ops.rms_norm(x, p["mixer_norm"], eps=NORM_EPSILON)
        if x.ndim == 2:
            y, state = layer.step(mixer, z, state, ops=ops)
        else:
            y, state = layer.forward(mixer, z, state, segments, ops=ops, record=record)
        if not layer.mlp:
            return x, y, state, record
        x = x + y
        z = ops.rms_norm(x, p["mlp_norm"], eps=NORM_EPSILON)
        hidden = ops.silu(linear(z, p["mlp.gate"], ops=ops)) * linear(z, p["mlp.up"], ops=ops)
        return x, linear(hidden, p["mlp.down"], ops=ops), state, record

    def stream(
        self, params: Mapping[str, Array], tokens: Array, states: list[State] | None = None, segments: Array | None = None, *,
        dtype: Any = None, transform: Callable[[Callable, Layer], Callable] | None = None,
    ) -> tuple[Array, list[State], dict[str, Array]]:  # fmt: skip
        """Everything but the head: the normalised stream [B, T, D], each block's state, and the layers' scalars, averaged over blocks.

        tokens: [B, T], or [B] for one token by the layers' step; the stream then is [B, D].
        params: by the names of `table`, float32. dtype: of the activations (None: the parameters'). states: of `initial_state` or of an
        earlier call; None starts fresh. transform: (block, layer) -> block, applied to each block's function (compilation, recomputation).
        """
        x, after, means = self.through_blocks(params, tokens, states, segments, dtype=dtype, transform=transform)
        return self.normalise(params, x), after, means

    def through_blocks(
        self, params: Mapping[str, Array], tokens: Array, states: list[State] | None = None, segments: Array | None = None, *,
        dtype: Any = None, transform: Callable[[Callable, Layer], Callable] | None = None,
    ) -> tuple[Array, list[State], dict[str, Array]]:  # fmt: skip
        """`stream` before its last norm."""
        ops = self.ops
        if segments is not None:
            segments = ops.array(segments, ops.int32, params["embedding"])
        x = self.embed(params, tokens, dtype)
        after, scalars = [], {}
        for index, (layer, names) in enumerate(zip(self.layers, self._names, strict=True)):
            block = transform(self.block, layer) if transform else self.block
            p = {local: params[name] for local, name in names.items()}
            x, state, record = block(layer, p, x, states[index] if states else None, segments)
            after.append(state)
            for name, value in record.items():
                scalars.setdefault(name, []).append(value)
        return x, after, {name: ops.mean(ops.stack(values), 0) for name, values in scalars.items()}

    def embed(self, params: Mapping[str, Array], tokens: Array, dtype: Any = None) -> Array:
        """The stream before the first block, [..., D]."""
        ops, embedding_VD = self.ops, params["embedding"]
        tokens = ops.array(tokens, ops.int32, embedding_VD)
        return ops.cast(ops.take(embedding_VD, tokens) * math.sqrt(self.width), dtype or embedding_VD.dtype)

    def normalise(self, params: Mapping[str, Array], x: Array) -> Array:
        """The stream after the last block, as the head takes it."""
        return self.ops.rms_norm(x, params["final_norm"], eps=NORM_EPSILON)

    def logits(self, params: Mapping[str, Array], x: Array) -> Array:
        """The head: normalised stream [..., D] to soft-capped float32 logits [..., V]."""
        ops = self.ops
        weight_VD = ops.cast(params["embedding"], x.dtype)
        wide = ops.float64 if x.dtype == ops.float64 else ops.float32
        logits = ops.matmul(x, ops.swapaxes(weight_VD, 0, 1), accumulate=wide)
        return ops.tanh(logits * (1 / SOFT_CAP)) * SOFT_CAP

    def forward(self, params: Mapping[str, Array], tokens_BT: Array, segments_BT: Array | None = None) -> Array:
        """Logits [B, T, V], float32, soft-capped, of the token after each.

        tokens_BT: integers. segments_BT: int32 ids of each token's piece, where pieces must not see each other (-1: padding).
        Raises NotImplementedError where a layer has no forward pass yet.
        """
        return self.logits(params, self.stream(params, tokens_BT, segments=segments_BT)[0])

    def initial_state(self, batch: int, params: Mapping[str, Array] | None = None) -> list[State | None]:
        """Each block's state before the first token of `batch` sequences.

        Without params, None for every block, which starts afresh; with them, arrays of the shapes that later states have, beside them.
        """
        if params is None:
            return [None] * len(self.layers)
        return [
            layer.initial_state(behind(f"blocks.{index}.mixer.", params), batch, ops=self.ops) for index, layer in enumerate(self.layers)
        ]

    def prefill(
        self, params: Mapping[str, Array], tokens_BT: Array, states: list[State] | None = None, segments_BT: Array | None = None
    ) -> tuple[Array, list[State]]:
        """Logits [B, T, V] as `forward`, and the states to go on from; states: where the sequences stand (None: at their start)."""
        x_BTD, states, _ = self.stream(params, tokens_BT, states, segments_BT)
        return self.logits(params, x_BTD), states

    def step(self, params: Mapping[str, Array], token_B: Array, states: list[State]) -> tuple[Array, list[State]]:
        """One token of each sequence: logits [B, V] of the next, and the next states."""
        x_BD, states, _ = self.stream(params, token_B, states)
        return self.logits(params, x_BD), states

    def with_setting(self, setting: Mapping[str, Any] | None) -> Model:
        """The same model with its solver set otherwise, for inference: {"steps": 5}, {"eps": 1e-3}, {"solve": False}.

        Raises ValueError where no layer has such an option, naming the nearest.
        """
        options = dict(setting or {})
        solvers = [set(options) <= set(layer.options()) for layer in self.layers]
        if options and not any(solvers):
            known = sorted({option for layer in self.layers for option in layer.options()})
            nearest = {name: get_close_matches(name, known, 1, 0) for name in options}
            raise ValueError(f"No layer of this model has the options {sorted(options)}; nearest: {nearest}.")
        layers = tuple(replace(layer, **options) if solver else layer for layer, solver in zip(self.layers, solvers, strict=True))
        return replace(self, layers=layers)
