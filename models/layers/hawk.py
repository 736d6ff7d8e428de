"""Hawk's recurrent block: a gated linear recurrence on a vector (RG-LRU; Griffin, section 2.4; MesaNet, G.4).

    gate = GELU(x W_y + b_y);  u = conv4(x W_x + b_x) + b;  r, i = sigmoid(block-diagonal(u))
    log a = -8 r softplus(a_param);  h_t = a_t h_{t-1} + sqrt(1 - a_t^2) i_t u_t;  y = W_o (h gate) + b_o

Shapes: B batch, T time, D width, L = 1.25 D the recurrence's width, H blocks of the gates' weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from models.layers.layer import TRAINING, Layer, product
from models.parameters import Parameter, Table, normal, residual, zeros


def decay_parameter(random: np.random.Generator, shape: tuple[int, ...], blocks: int) -> np.ndarray:
    """a_param such that a = exp(-8 softplus(a_param)), the decay at an open gate, has a^2 uniform in [0.9^2, 0.999^2] (Griffin, 2.4)."""
    rate = -np.log(random.uniform(0.9**2, 0.999**2, shape)) / 2 / 8
    return np.log(np.expm1(rate)).astype(np.float32)


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

    def flops(self, length: int, *, steps: float | None = None, training: bool = False) -> float:
        """Three linear maps, convolution, block-diagonal gates; the recurrence itself is one multiply-add an element."""
        block = self.lru // self.heads
        maps = product(3, self.width, self.lru) + product(self.convolution, self.lru) + product(2, self.lru, block) + product(self.lru)
        return (TRAINING if training else 1) * maps

    def state_floats(self, length: int) -> int:
        """One number a channel."""
        return self.lru
