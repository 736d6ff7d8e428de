"""Softmax attention, causal: full, or over a sliding window (MesaNet's transformer and SWA).

Shapes: B batch, T time, S cached keys, D width, H heads, K key size.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from kernels import attention as kernel
from kernels.rope import rope
from models.layers.layer import TRAINING, Array, Layer, State, linear, product
from models.parameters import Parameter, Table, residual


@dataclass(frozen=True)
class Attention(Layer):
    """Multi-head attention with RoPE on all dimensions of queries and keys.

    window: how many tokens, itself included, a token sees; None: all before it. rope_base: RoPE's base.
    """

    window: int | None = None
    rope_base: float = 10_000.0

    name = "attention"

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"attention: window is {self.window}; a token sees at least itself, so give 1 or more, or null for all.")
        if self.key_size % 2:
            raise ValueError(f"attention: key_size is {self.key_size}; RoPE turns pairs of dimensions, so it must be even.")

    def parameters(self) -> Table:
        """Four projections."""
        projections = {name: Parameter((self.width, self.inner), axes=("width", "inner")) for name in ("q", "k", "v")}
        return {**projections, "out": Parameter((self.inner, self.width), residual, axes=("inner", "width"))}

    def forward(
        self, p: dict[str, Array], x_BTD: Array, state: State | None = None, segments: Array | None = None, *, ops: ModuleType,
        record: dict[str, Array] | None = None,
    ) -> tuple[Array, State]:  # fmt: skip
        """See Layer.forward. The state is a cache of keys and values (see kernels.attention)."""
        q, k, v = (self._heads(linear(x_BTD, p[name], ops=ops)) for name in ("q", "k", "v"))
        fresh = state is None and segments is None
        positions = ops.arange(x_BTD.shape[1], x_BTD) if fresh else kernel.positions(x_BTD, state, segments)
        q, k = (rope(x, positions, base=self.rope_base) for x in (q, k))
        o_BTHK, state = kernel.attention(q, k, v, window=self.window, state=state, segments=segments)
        return linear(o_BTHK.reshape(*x_BTD.shape[:2], self.inner), p["out"], ops=ops), state

    def step(self, p: dict[str, Array], x_BD: Array, state: State | None, *, ops: ModuleType) -> tuple[Array, State]:
        """See Layer.step."""
        x_B1D = x_BD[:, None]
        q, k, v = (self._heads(linear(x_B1D, p[name], ops=ops)) for name in ("q", "k", "v"))
        position_B1 = kernel.positions(x_B1D, state)
        q, k = (ops.rope(x, position_B1, base=self.rope_base) for x in (q, k))
        o_BHK, state = kernel.step(q[:, 0], k[:, 0], v[:, 0], window=self.window, state=state)
        return linear(o_BHK.reshape(-1, self.inner), p["out"], ops=ops), state

    def reserve(self, state: State, tokens: int) -> State:
        """See Layer.reserve."""
        return state if self.window else kernel.reserve(state, tokens)

    def _heads(self, x_BTC: Array) -> Array:
        return x_BTC.reshape(*x_BTC.shape[:2], self.heads, self.key_size)

    def flops(self, length: int, *, steps: float | None = None, training: bool = False) -> float:
        """Projections, and scores and values over the causal mean of keys seen."""
        window = min(self.window or length, length)
        seen = window - window * (window - 1) / 2 / length  # mean over t = 1 .. length of min(t, window)
        return (TRAINING if training else 1) * (product(4, self.width, self.inner) + product(2, self.inner) * seen)

    def state_floats(self, length: int) -> int:
        """A key and a value for each token in sight."""
        return 2 * self.inner * min(self.window or length, length)
