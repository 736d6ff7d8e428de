"""Gated DeltaNet, G_t = gamma_t G_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T (MesaNet, Table 1).

Shapes: see matrix.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from kernels import delta_rule as kernel
from models.layers.deltanet import delta_flops
from models.layers.layer import Array
from models.layers.matrix import MatrixLayer


@dataclass(frozen=True)
class GatedDeltaNet(MatrixLayer):
    """The delta rule with a forget and a write gate."""

    name = "gated_deltanet"
    operation = staticmethod(kernel.delta_rule)
    one_token = staticmethod(kernel.step)

    def recurrence_flops(self, length: int) -> float:
        """The delta rule's; decay costs no product."""
        return delta_flops(length, self.key_size, self.value_size)

    def operands(self, p: dict[str, Array], gates: dict[str, Array], x_BTD: Array, *, ops: ModuleType) -> tuple[Array, ...]:
        """beta and log gamma."""
        return ops.sigmoid(gates["write"]), self.log_decay(p, gates, ops=ops)
