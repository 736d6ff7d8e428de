"""DeltaNet, G_t = G_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T (MesaNet, Table 1).

Shapes: see matrix.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

from kernels import delta_rule as kernel
from models.layers.layer import Array, product
from models.layers.matrix import CHUNK, MatrixLayer, readout_flops


def delta_flops(length: int, key_size: int, value_size: int) -> float:
    """The chunked delta rule of one head, a token: 6CK + 4CV + 6KV.

    Read-out 2CK + 2CV + 2KV; keys against keys, and the triangle's inverse times keys and values, 4CK + 2CV; what the state
    holds already, and its update, 4KV. The inverse itself (C^2 / 3) is left out.
    """
    chunk = min(CHUNK, length)
    solved = product(chunk, 2 * key_size + value_size)
    return readout_flops(length, key_size, value_size) + solved + product(2, key_size, value_size)


@dataclass(frozen=True)
class DeltaNet(MatrixLayer):
    """The delta rule with a write gate; nothing is forgotten."""

    name = "deltanet"
    gates: ClassVar[tuple[str, ...]] = ("write",)
    operation = staticmethod(kernel.delta_rule)
    one_token = staticmethod(kernel.step)

    def recurrence_flops(self, length: int) -> float:
        """The delta rule's."""
        return delta_flops(length, self.key_size, self.value_size)

    def operands(self, p: dict[str, Array], gates: dict[str, Array], x_BTD: Array, *, ops: ModuleType) -> tuple[Array, ...]:
        """beta."""
        return (ops.sigmoid(gates["write"]),)
