"""Softmax attention, causal: full, or over a sliding window (MesaNet's transformer and SWA).

Shapes: B batch, T time, S cached keys, D width, H heads, K key size.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.layers.layer import TRAINING, Layer, product
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

    def flops(self, length: int, *, steps: float | None = None, training: bool = False) -> float:
        """Projections, and scores and values over the causal mean of keys seen."""
        window = min(self.window or length, length)
        seen = window - window * (window - 1) / 2 / length  # mean over t = 1 .. length of min(t, window)
        return (TRAINING if training else 1) * (product(4, self.width, self.inner) + product(2, self.inner) * seen)

    def state_floats(self, length: int) -> int:
        """A key and a value for each token in sight."""
        return 2 * self.inner * min(self.window or length, length)
