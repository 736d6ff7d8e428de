"""What the layers with a matrix state share (MesaNet, section 4 and E.1): everything around their recurrence.

    q, k, v = W x;  q, k = SiLU(conv4(q, k));  q, k = q / |q|, k / |k|   (each per head)
    gates   = sigmoid(W x + b)                                          (one scalar per head and token, float32)
    y       = sum over heads of P_h RMSNorm_h(o_h)

Shapes: B batch, T time, D width, H heads, K key and value size, C = H K.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

from models.layers.layer import TRAINING, Array, Layer, State, gate, linear, product
from models.parameters import Parameter, Table, ones, residual, zeros

CHUNK = 64
"""Chunk length that FLOPs are counted at."""
NORM_EPSILON = 1e-6


@dataclass(frozen=True)
class MatrixLayer(Layer):
    """A linear recurrence on a K x K state per head.

    convolution: window of the causal depthwise convolution on queries and keys. convolve_values: also on values.
    """

    convolution: int = 4
    convolve_values: bool = False

    gates: ClassVar[tuple[str, ...]] = ("forget", "write")
    operation: ClassVar[Callable]
    """The kernel: (q, k, v, *operands, state, segments) -> (o, state, ...), over [B, T, H, K]."""
    one_token: ClassVar[Callable]
    """The kernel's step: the same over [B, H, K]."""

    def __post_init__(self) -> None:
        if self.convolution < 1:
            raise ValueError(f"{self.name}: convolution is {self.convolution}; it is a window in tokens, at least 1.")

    @property
    def convolved(self) -> tuple[str, ...]:
        """Which projections pass through a convolution."""
        return ("q", "k", "v") if self.convolve_values else ("q", "k")

    def parameters(self) -> Table:
        """Projections, convolutions, gates with their biases, one norm weight per head and dimension, output."""
        inner, heads = self.inner, self.heads
        return {
            **{name: Parameter((self.width, inner), axes=("width", "inner")) for name in ("q", "k", "v")},
            **{f"{name}_conv": Parameter((self.convolution, inner), axes=("window", "inner")) for name in self.convolved},
            **{name: Parameter((self.width, heads), axes=("width", "heads")) for name in self.gates},
            **{f"{name}_bias": Parameter((heads,), zeros, decay=False, axes=("heads",)) for name in self.gates},
            "norm": Parameter((heads, self.key_size), ones, decay=False, axes=("heads", "key")),
            "out": Parameter((inner, self.width), residual, axes=("inner", "width")),
        }

    def forward(
        self, p: dict[str, Array], x_BTD: Array, state: State | None = None, segments: Array | None = None, *, ops: ModuleType,
        record: dict[str, Array] | None = None,
    ) -> tuple[Array, State]:  # fmt: skip
        """See Layer.forward. State: the recurrence's ("memory") and each convolution's ("q_conv", "k_conv")."""
        q, k, v, operands, after = self._inputs(p, x_BTD, state, segments, ops=ops)
        o_BTHK, after["memory"], *info = type(self).operation(
            q, k, v, *operands, **self.settings(), state=(state or {}).get("memory"), segments=segments
        )
        if record is not None:
            record |= self.scalars(operands, info, ops=ops)
        return self._output(p, o_BTHK, ops=ops), after

    def step(self, p: dict[str, Array], x_BD: Array, state: State | None, *, ops: ModuleType) -> tuple[Array, State]:
        """See Layer.step."""
        q, k, v, operands, after = self._inputs(p, x_BD[:, None], state, None, ops=ops)
        q, k, v, *operands = (x[:, 0] if x.ndim > 2 else x for x in (q, k, v, *operands))
        o_BHK, after["memory"], *_ = type(self).one_token(q, k, v, *operands, **self.settings(), state=(state or {}).get("memory"))
        return self._output(p, o_BHK, ops=ops), after

    def _inputs(
        self, p: dict[str, Array], x_BTD: Array, state: State | None, segments: Array | None, *, ops: ModuleType
    ) -> tuple[Array, Array, Array, tuple[Array, ...], State]:
        """q, k, v [B, T, H, K], the operation's further operands, and the convolutions' next states."""
        after = {}

        def heads(name: str) -> Array:
            x_BTC = linear(x_BTD, p[name], ops=ops)
            if name in self.convolved:
                cache = f"{name}_conv"
                x_BTC, after[cache] = ops.short_convolution(x_BTC, p[cache], state=(state or {}).get(cache), segments=segments)
                x_BTC = ops.silu(x_BTC)
            return x_BTC.reshape(*x_BTC.shape[:2], self.heads, self.key_size)

        q, k, v = self.prepare(heads("q"), heads("k"), heads("v"), ops=ops)
        gates = {name: gate(x_BTD, p[name], p[f"{name}_bias"], ops=ops) for name in self.gates}
        return q, k, v, self.operands(p, gates, ops=ops), after

    def _output(self, p: dict[str, Array], o: Array, *, ops: ModuleType) -> Array:
        """Read-outs [..., H, K], normalised per head, to the stream [..., D]."""
        o = ops.rms_norm(o, p["norm"], eps=NORM_EPSILON)
        return linear(o.reshape(*o.shape[:-2], self.inner), p["out"], ops=ops)

    def prepare(self, q_BTHK: Array, k_BTHK: Array, v_BTHK: Array, *, ops: ModuleType) -> tuple[Array, Array, Array]:
        """Queries and keys to unit length."""
        return ops.l2_normalise(q_BTHK), ops.l2_normalise(k_BTHK), v_BTHK

    def operands(self, p: dict[str, Array], gates: dict[str, Array], *, ops: ModuleType) -> tuple[Array, ...]:
        """What the operation takes after q, k and v: activated gates [B, T, H] and parameters [H, K].

        gates: [B, T, H] by name, before their activation, float32.
        """
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """The operation's options."""
        return {}

    def scalars(self, operands: tuple[Array, ...], info: list[dict[str, Array]], *, ops: ModuleType) -> dict[str, Array]:
        """What the layer records of a forward pass, from its operands and what the operation gave beside output and state."""
        return {}

    def around_flops(self) -> int:
        """Projections, convolutions and gates, forward, a token."""
        projections = product(4, self.width, self.inner)
        convolutions = product(len(self.convolved), self.convolution, self.inner)
        return projections + convolutions + product(len(self.gates), self.width, self.heads)

    def recurrence_flops(self, length: int) -> float:
        """The chunked recurrence of one head, forward, a token: read-out 4CK + 2K^2 and state 2K^2 (mesanet.md, section 7)."""
        return readout_flops(length, self.key_size) + product(self.key_size, self.key_size)

    def flops(self, length: int, *, steps: float | None = None, training: bool = False) -> float:
        """Everything a token; steps has no meaning here."""
        return (TRAINING if training else 1) * (self.around_flops() + self.heads * self.recurrence_flops(length))

    def state_floats(self, length: int) -> int:
        """K^2 a head."""
        return self.heads * self.key_size**2


def readout_flops(length: int, key_size: int) -> int:
    """Chunked q -> G q of one head, a token: scores and values 2CK each over a chunk of C tokens, the state before it 2K^2."""
    return product(2, min(CHUNK, length), key_size) + product(key_size, key_size)
