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


def delta_flops(length: int, key_size: int) -> float:
    """The chunked delta rule of one head, a token: 10CK + 6K^2.

    Read-out 4CK + 2K^2; keys against keys, and the triangle's inverse times keys and values, 6CK; what the state holds
    already, and its update, 4K^2. The inverse itself (C^2 / 3) is left out.
    """
    return readout_flops(length, key_size) + product(3, min(CHUNK, length), key_size) + product(2, key_size, key_size)


@dataclass(frozen=True)
class DeltaNet(MatrixLayer):
    """The delta rule with a write gate; nothing is forgotten."""

    name = "deltanet"
    gates: ClassVar[tuple[str, ...]] = ("write",)
    operation = staticmethod(kernel.delta_rule)
    one_token = staticmethod(kernel.step)

    def recurrence_flops(self, length: int) -> float:
        """The delta rule's."""
        return delta_flops(length, self.key_size)

    def operands(self, p: dict[str, Array], gates: dict[str, Array], *, ops: ModuleType) -> tuple[Array, ...]:
        """beta."""
        return (ops.sigmoid(gates["write"]),)
