"""Gated linear attention, G_t = gamma_t G_{t-1} + beta_t v_t k_t^T (MesaNet, Table 1).

Shapes: see matrix.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from kernels import linear_attention as kernel
from models.layers.layer import Array
from models.layers.matrix import MatrixLayer


@dataclass(frozen=True)
class GLA(MatrixLayer):
    """Linear attention with a forget and a write gate, one scalar each a head."""

    name = "gla"
    operation = staticmethod(kernel.linear_attention)
    one_token = staticmethod(kernel.step)

    def operands(self, p: dict[str, Array], gates: dict[str, Array], x_BTD: Array, *, ops: ModuleType) -> tuple[Array, ...]:
        """log gamma and beta."""
        return self.log_decay(p, gates, ops=ops), ops.sigmoid(gates["write"])
