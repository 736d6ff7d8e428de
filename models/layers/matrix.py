"""What the layers with a matrix state share (MesaNet, section 4 and E.1): everything around their recurrence.

    q, k, v = W x;  q, k = SiLU(conv4(q, k));  q, k = q / |q|, k / |k|   (each per head)
    gates   = sigmoid(W x + b)                                          (one scalar per head and token, float32)
    y       = sum over heads of P_h RMSNorm_h(o_h)

Options make of it the block of Palimpsa's baselines, which is Gated DeltaNet's own (Palimpsa, arXiv 2602.09075; Mamba2's gates):

    gamma   = exp(-exp(rate) softplus(W x + b))                         (forget_gate: mamba)
    y       = sum over heads of P_h (RMSNorm_h(o_h + skip_h v_h) * SiLU(W x)_h)      (skip, output_gate)

Shapes: B batch, T time, D width, H heads, K key size, V value size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, ClassVar, Literal

import numpy as np

from kernels.convolution import short_convolution
from models.layers.layer import TRAINING, Array, Layer, State, linear, precise, product
from models.layers.layer import gates as gates_of
from models.parameters import Parameter, Table, ones, residual, zeros

CHUNK = 64
"""Chunk length that FLOPs are counted at."""


def step_bias(random: np.random.Generator, shape: tuple[int, ...], blocks: int) -> np.ndarray:
    """b such that softplus(b) is log-uniform from 1e-3 to 1e-1 (Mamba2's dt_bias)."""
    step = np.exp(random.uniform(np.log(1e-3), np.log(1e-1), shape))
    return (step + np.log(-np.expm1(-step))).astype(np.float32)


def log_rate(random: np.random.Generator, shape: tuple[int, ...], blocks: int) -> np.ndarray:
    """The logarithm of a uniform number in (0, 16] (A_log, as Gated DeltaNet and Palimpsa start it; Mamba2 from 1 on)."""
    return np.log(16 - random.uniform(0, 16, shape)).astype(np.float32)


@dataclass(frozen=True)
class MatrixLayer(Layer):
    """A linear recurrence on a K x V state per head.

    convolution: window of the causal depthwise convolution on queries and keys. convolve_values: also on values.
    forget_gate: "sigmoid", or "mamba": a step size times a rate. value_expansion: V / K. output_gate: SiLU of one more projection, on what is
    read. skip: a head's own multiple of the values is added to what is read, before its norm.
    """

    convolution: int = 4
    convolve_values: bool = False
    forget_gate: Literal["sigmoid", "mamba"] = "sigmoid"
    value_expansion: float = 1.0
    output_gate: bool = False
    skip: bool = False

    gates: ClassVar[tuple[str, ...]] = ("forget", "write")
    convolution_bias: ClassVar[bool] = False
    unit: ClassVar[tuple[str, ...]] = ("q", "k")
    """Which of what is convolved is scaled to unit length, each head."""
    norm_epsilon: ClassVar[float] = 1e-6
    operation: ClassVar[Callable]
    """The kernel: (q, k, v, *operands, state, segments) -> (o, state, ...), over [B, T, H, K]."""
    one_token: ClassVar[Callable]
    """The kernel's step: the same over [B, H, K]."""

    def __post_init__(self) -> None:
        if self.convolution < 1:
            raise ValueError(f"{self.name}: convolution is {self.convolution}; it is a window in tokens, at least 1.")
        if self.forget_gate not in ("sigmoid", "mamba"):
            raise ValueError(f"{self.name}: forget_gate is {self.forget_gate!r}; it is 'sigmoid' or 'mamba'.")
        if self.forget_gate == "mamba" and "forget" not in self.gates:
            raise ValueError(f"{self.name} forgets nothing here, so forget_gate 'mamba' means nothing; leave it out.")
        if self.value_size < 1 or self.value_size * self.heads != self._values_wanted:
            raise ValueError(
                f"{self.name}: value_expansion {self.value_expansion:g} makes values of {self._values_wanted:g} numbers over {self.heads} heads; "
                "choose one that gives every head a whole number."
            )

    @property
    def _values_wanted(self) -> float:
        return self.value_expansion * self.inner

    @property
    def value_size(self) -> int:
        """V."""
        return round(self._values_wanted / self.heads)

    @property
    def values(self) -> int:
        """Width of the values over all heads."""
        return self.heads * self.value_size

    @property
    def key_heads(self) -> int:
        """How many heads of queries and keys are projected."""
        return self.heads

    @property
    def projections(self) -> dict[str, int]:
        """Width of each projection of the stream."""
        keys = self.key_heads * self.key_size
        return {"q": keys, "k": keys, "v": self.values} | ({"gate": self.values} if self.output_gate else {})

    @property
    def convolved(self) -> tuple[str, ...]:
        """Which projections pass through a convolution."""
        return ("q", "k", "v") if self.convolve_values else ("q", "k")

    def parameters(self) -> Table:
        """Projections, convolutions, gates with their biases, one norm weight per head and dimension, output."""
        heads, projections = self.heads, self.projections
        per_head = Parameter((heads,), ones, decay=False, axes=("heads",))
        table = {
            **{name: Parameter((self.width, size), axes=("width", "inner")) for name, size in projections.items()},
            **{f"{name}_conv": Parameter((self.convolution, projections[name]), axes=("window", "inner")) for name in self.convolved},
            **{name: Parameter((self.width, heads), axes=("width", "heads")) for name in self.gates},
            **{f"{name}_bias": replace(per_head, init=zeros) for name in self.gates},
            "norm": Parameter((heads, self.value_size), ones, decay=False, axes=("heads", "value")),
            "out": Parameter((self.values, self.width), residual, axes=("inner", "width")),
        }
        if self.convolution_bias:
            bias = {name: Parameter((projections[name],), zeros, decay=False, axes=("inner",)) for name in self.convolved}
            table |= {f"{name}_conv_bias": parameter for name, parameter in bias.items()}
        if self.forget_gate == "mamba":
            table |= {"forget_bias": replace(per_head, init=step_bias), "forget_rate": replace(per_head, init=log_rate)}
        if self.skip:
            table["skip"] = per_head
        return table

    def forward(
        self, p: dict[str, Array], x_BTD: Array, state: State | None = None, segments: Array | None = None, *, ops: ModuleType,
        record: dict[str, Array] | None = None,
    ) -> tuple[Array, State]:  # fmt: skip
        """See Layer.forward. State: the recurrence's ("memory") and each convolution's ("q_conv", "k_conv")."""
        q, k, v, operands, beside, after = self._inputs(p, x_BTD, state, segments, ops=ops)
        o_BTHV, after["memory"], *info = self.operation(
            q, k, v, *operands, **self.settings(), state=(state or {}).get("memory"), segments=segments
        )
        if record is not None:
            record |= self.scalars(operands, after["memory"], info, ops=ops)
        return self._output(p, o_BTHV, beside, ops=ops), after

    def step(self, p: dict[str, Array], x_BD: Array, state: State | None, *, ops: ModuleType) -> tuple[Array, State]:
        """See Layer.step."""
        q, k, v, operands, beside, after = self._inputs(p, x_BD[:, None], state, None, ops=ops)
        q, k, v, *operands = (x[:, 0] if x.ndim > 2 else x for x in (q, k, v, *operands))
        o_BHV, after["memory"], *_ = self.one_token(q, k, v, *operands, **self.settings(), state=(state or {}).get("memory"))
        return self._output(p, o_BHV, {name: x[:, 0] for name, x in beside.items()}, ops=ops), after

    def _inputs(
        self, p: dict[str, Array], x_BTD: Array, state: State | None, segments: Array | None, *, ops: ModuleType
    ) -> tuple[Array, Array, Array, tuple[Array, ...], dict[str, Array], State]:
        """q, k [B, T, H, K], v [B, T, H, V], the operation's further operands, what the output takes beside its result ("skip", "gate":
        [B, T, H, V]), and the convolutions' next states."""
        after = {}

        def projected(name: str, heads: int) -> Array:
            x_BTC = linear(x_BTD, p[name], ops=ops)
            if name in self.convolved:
                cache = f"{name}_conv"
                given = {"heads": heads if name in self.unit else None, "state": (state or {}).get(cache), "segments": segments}
                x_BTC, after[cache] = short_convolution(x_BTC, p[cache], p.get(f"{cache}_bias"), silu=True, **given)
            return x_BTC.reshape(*x_BTC.shape[:2], heads, -1)

        q, k, v = projected("q", self.key_heads), projected("k", self.key_heads), projected("v", self.heads)
        beside = {"skip": v} if self.skip else {}
        if self.output_gate:
            beside["gate"] = ops.silu(projected("gate", self.heads))
        gates = gates_of(x_BTD, p, self.gates, ops=ops)
        q, k, v = self.prepare(q, k, v, gates, ops=ops)
        return q, k, v, self.operands(p, gates, x_BTD, ops=ops), beside, after

    def _output(self, p: dict[str, Array], o: Array, beside: dict[str, Array], *, ops: ModuleType) -> Array:
        """Read-outs [..., H, V] to the stream [..., D]."""
        if self.skip:
            o = ops.cast(precise(o, ops=ops) + precise(p["skip"], ops=ops)[:, None] * precise(beside["skip"], ops=ops), o.dtype)
        o = self.normalise(p, o, beside.get("gate"), ops=ops)
        return linear(o.reshape(*o.shape[:-2], self.values), p["out"], ops=ops)

    def normalise(self, p: dict[str, Array], o: Array, gate: Array | None, *, ops: ModuleType) -> Array:
        """Each head's read-out to unit size, then the gate."""
        o = ops.rms_norm(o, p["norm"], eps=self.norm_epsilon)
        return o if gate is None else o * gate

    def prepare(
        self, q_BTHK: Array, k_BTHK: Array, v_BTHV: Array, gates: dict[str, Array], *, ops: ModuleType
    ) -> tuple[Array, Array, Array]:
        """As the operation takes them."""
        return q_BTHK, k_BTHK, v_BTHV

    def operands(self, p: dict[str, Array], gates: dict[str, Array], x_BTD: Array, *, ops: ModuleType) -> tuple[Array, ...]:
        """What the operation takes after q, k and v: [B, T, H] or [B, T, H, V], and parameters [H] or [H, K].

        gates: [B, T, H] by name, before their activation, float32. x: the stream.
        """
        raise NotImplementedError

    def log_decay(self, p: dict[str, Array], gates: dict[str, Array], *, ops: ModuleType) -> Array:
        """log gamma [B, T, H]."""
        if self.forget_gate == "sigmoid":
            return ops.log_sigmoid(gates["forget"])
        return -ops.exp(precise(p["forget_rate"], ops=ops)) * ops.softplus(gates["forget"])

    @property
    def forgets(self) -> bool:
        """Some of these layers only write."""
        return "forget" in self.gates

    def log_forget(self, p: dict[str, Array], x_BTD: Array, *, ops: ModuleType) -> Array:
        """See Layer.log_forget."""
        return self.log_decay(p, gates_of(x_BTD, p, self.gates, ops=ops), ops=ops)

    def settings(self) -> dict[str, Any]:
        """The operation's options."""
        return {}

    def scalars(self, operands: tuple[Array, ...], memory: Any, info: list[dict[str, Array]], *, ops: ModuleType) -> dict[str, Array]:
        """What the layer records of a forward pass, from its operands, the state behind the last token, and what the operation gave beside these."""
        return {}

    def around_flops(self) -> int:
        """Projections, convolutions and gates, forward, a token."""
        sizes = self.projections
        maps = product(self.width, sum(sizes.values())) + product(self.values, self.width)
        convolutions = product(self.convolution, sum(sizes[name] for name in self.convolved))
        return maps + convolutions + product(len(self.gates), self.width, self.heads)

    def recurrence_flops(self, length: int) -> float:
        """The chunked recurrence of one head, forward, a token: read-out 2CK + 2CV + 2KV and state 2KV (MesaNet, Eq. 9)."""
        return readout_flops(length, self.key_size, self.value_size) + product(self.key_size, self.value_size)

    def flops(self, length: int, *, steps: float | None = None, training: bool = False) -> float:
        """Everything a token; steps has no meaning here."""
        return (TRAINING if training else 1) * (self.around_flops() + self.heads * self.recurrence_flops(length))

    def state_floats(self, length: int) -> int:
        """K V a head."""
        return self.heads * self.key_size * self.value_size


def remaining(log_decay_BTH: Array, t: int, segments: Array | None, *, ops: ModuleType) -> Array:
    """How much is left behind token t, counted from 1, of what each of the first t wrote [B, t, H], float32; nothing of another document."""
    since_BTH = ops.cumsum(log_decay_BTH[:, :t], 1)
    left_BTH = ops.exp(since_BTH[:, -1:] - since_BTH)
    return left_BTH if segments is None else left_BTH * ops.cast(segments[:, :t, None] == segments[:, t - 1 : t, None], ops.float32)


def readout_flops(length: int, key_size: int, value_size: int) -> int:
    """Chunked q -> G q of one head, a token: scores 2CK and values 2CV over a chunk of C tokens, the state before it 2KV."""
    return product(min(CHUNK, length), key_size + value_size) + product(key_size, value_size)
