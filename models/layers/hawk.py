"""Hawk's recurrent block: a gated linear recurrence on a vector (RG-LRU; Griffin, section 2.4; MesaNet, G.4).

    gate = GELU(x W_y + b_y);  u = conv4(x W_x + b_x) + b;  r, i = sigmoid(block-diagonal(u))
    log a = -8 r softplus(a_param);  h_t = a_t h_{t-1} + sqrt(1 - a_t^2) i_t u_t;  y = W_o (h gate) + b_o

Shapes: B batch, T time, D width, L = 1.25 D the recurrence's width, H blocks of the gates' weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import numpy as np

from kernels import rg_lru as kernel
from kernels import segmentation
from kernels.convolution import short_convolution
from kernels.lru_input import lru_input
from models.layers.layer import TRAINING, Array, Layer, State, linear, precise, product
from models.parameters import Parameter, Table, normal, residual, zeros


def decay_parameter(random: np.random.Generator, shape: tuple[int, ...], blocks: int) -> np.ndarray:
    """a_param such that a = exp(-8 softplus(a_param)), the decay at an open gate, has a^2 uniform in [0.9^2, 0.999^2] (Griffin, 2.4)."""
    rate = -np.log(random.uniform(0.9**2, 0.999**2, shape)) / 2 / RATE
    return np.log(np.expm1(rate)).astype(np.float32)


RATE = 8.0
STEEPEST = 1000.0
"""Bound on the derivative of sqrt(1 - a^2) with respect to a^2, as RecurrentGemma has it."""


def first_tokens(x_BTD: Array, state: kernel.State | None, segments: Array | None, *, ops: ModuleType) -> Array:
    """bool [B, T]: where a document starts, so that nothing was there to decay."""
    B, T = x_BTD.shape[:2]
    last_B = ops.full((B,), -1, ops.int32, x_BTD) if state is None else state.segment_B
    if segments is None:
        return (ops.arange(T, x_BTD) == 0)[None] & (last_B < 0)[:, None]
    return (segments >= 0) & (segments != segmentation.running(segments, last_B)[:, :-1])


@dataclass(frozen=True)
class Hawk(Layer):
    """RG-LRU between two linear maps, beside a GELU gate.

    expansion: the recurrence's width over the stream's. convolution: window of the depthwise convolution before it.
    """

    expansion: float = 1.25
    convolution: int = 4

    name = "hawk"

    def __post_init__(self) -> None:
        if (self.expansion * self.width) % self.heads:
            raise ValueError(
                f"hawk: expansion {self.expansion} times width {self.width} is {self.expansion * self.width:g}, which {self.heads} heads "
                "do not divide; choose an expansion whose product with the width is a multiple of the heads."
            )

    @property
    def lru(self) -> int:
        """Width of the recurrence."""
        return round(self.expansion * self.width)

    def parameters(self) -> Table:
        """Two branches, convolution, two block-diagonal gates, decay, output; all with biases."""
        lru, block = self.lru, self.lru // self.heads
        branch = Parameter((self.width, lru), axes=("width", "lru"))
        gate = Parameter((self.heads, block, block), axes=("heads", "lru_in", "lru_out"))
        bias = Parameter((lru,), zeros, decay=False, axes=("lru",))
        return {
            "x": branch, "x_bias": bias, "y": branch, "y_bias": bias,
            "conv": Parameter((self.convolution, lru), normal((0.01 / self.convolution) ** 0.5), axes=("window", "lru")), "conv_bias": bias,
            "input": gate, "input_bias": bias, "forget": gate, "forget_bias": bias,
            "decay": Parameter((lru,), decay_parameter, decay=False, axes=("lru",)),
            "out": Parameter((lru, self.width), residual, axes=("lru", "width")),
            "out_bias": Parameter((self.width,), zeros, decay=False, axes=("width",)),
        }  # fmt: skip

    def forward(
        self, p: dict[str, Array], x_BTD: Array, state: State | None = None, segments: Array | None = None, *, ops: ModuleType,
        record: dict[str, Array] | None = None,
    ) -> tuple[Array, State]:  # fmt: skip
        """See Layer.forward. State: the convolution's ("conv") and the recurrence's ("memory")."""
        gate_BTL, u_BTL, log_a_BTL, after = self._inputs(p, x_BTD, state, segments, ops=ops)
        h_BTL, after["memory"] = kernel.rg_lru(u_BTL, log_a_BTL, state=(state or {}).get("memory"), segments=segments)
        return linear(h_BTL * gate_BTL, p["out"], p["out_bias"], ops=ops), after

    def step(self, p: dict[str, Array], x_BD: Array, state: State | None, *, ops: ModuleType) -> tuple[Array, State]:
        """See Layer.step."""
        gate_B1L, u_B1L, log_a_B1L, after = self._inputs(p, x_BD[:, None], state, None, ops=ops)
        h_BL, after["memory"] = kernel.step(u_B1L[:, 0], log_a_B1L[:, 0], state=(state or {}).get("memory"))
        return linear(ops.cast(h_BL, x_BD.dtype) * gate_B1L[:, 0], p["out"], p["out_bias"], ops=ops), after

    def _inputs(
        self, p: dict[str, Array], x_BTD: Array, state: State | None, segments: Array | None, *, ops: ModuleType
    ) -> tuple[Array, Array, Array, State]:
        """The GELU branch, what the recurrence adds in x's dtype (as RecurrentGemma has it: half the bytes) and its log decay in float32, and the
        convolution's next state."""
        state = state or {}
        gate_BTL = ops.gelu(linear(x_BTD, p["y"], p["y_bias"], ops=ops))
        u_BTL = linear(x_BTD, p["x"], p["x_bias"], ops=ops)
        u_BTL, conv = short_convolution(u_BTL, p["conv"], p["conv_bias"], state=state.get("conv"), segments=segments)
        forget_HBTJ, input_HBTJ = (self._block_diagonal(u_BTL, p[name], ops=ops) for name in ("forget", "input"))
        steps_L = ops.softplus(precise(p["decay"], ops=ops))
        first_BT = first_tokens(x_BTD, state.get("memory"), segments, ops=ops)
        given = (u_BTL, forget_HBTJ, input_HBTJ, p["forget_bias"], p["input_bias"], steps_L, first_BT)
        return gate_BTL, *lru_input(*given, rate=RATE, steepest=STEEPEST), {"conv": conv}

    def _block_diagonal(self, u_BTL: Array, weight_HIJ: Array, *, ops: ModuleType) -> Array:
        """Each of H blocks of channels through its own square matrix, in u's dtype: [H, B, T, J]."""
        u_BTHI = u_BTL.reshape(*u_BTL.shape[:2], self.heads, -1)
        return ops.einsum("bthi,hij->hbtj", u_BTHI, ops.cast(weight_HIJ, u_BTL.dtype))

    def flops(self, length: int, *, steps: float | None = None, training: bool = False) -> float:
        """Three linear maps, convolution, block-diagonal gates; the recurrence itself is one multiply-add an element."""
        block = self.lru // self.heads
        maps = product(3, self.width, self.lru) + product(self.convolution, self.lru) + product(2, self.lru, block) + product(self.lru)
        return (TRAINING if training else 1) * maps

    def state_floats(self, length: int) -> int:
        """One number a channel."""
        return self.lru
