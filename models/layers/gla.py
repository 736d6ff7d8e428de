"""Gated linear attention, G_t = gamma_t G_{t-1} + beta_t v_t k_t^T (MesaNet, Table 1).

Shapes: see matrix.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

from kernels import linear_attention as kernel
from models.layers.layer import Array
from models.layers.matrix import MatrixLayer


@dataclass(frozen=True)
class GLA(MatrixLayer):
    """Linear attention with a forget and a write gate, one scalar each a head."""

    name = "gla"

    def recur(
        self, p: dict[str, Array], q_BTHK: Array, k_BTHK: Array, v_BTHK: Array, gates: dict[str, Array], memory: Any, segments: Array | None,
        *, ops: ModuleType, record: dict[str, Array] | None,
    ) -> tuple[Array, Any]:  # fmt: skip
        """Linear attention; see MatrixLayer.recur."""
        log_decay, beta = ops.log_sigmoid(gates["forget"]), ops.sigmoid(gates["write"])
        return kernel.linear_attention(q_BTHK, k_BTHK, v_BTHK, log_decay, beta, state=memory, segments=segments)

    def recur_step(
        self, p: dict[str, Array], q_BHK: Array, k_BHK: Array, v_BHK: Array, gates: dict[str, Array], memory: Any, *, ops: ModuleType
    ) -> tuple[Array, Any]:
        """See MatrixLayer.recur_step."""
        return kernel.step(q_BHK, k_BHK, v_BHK, ops.log_sigmoid(gates["forget"]), ops.sigmoid(gates["write"]), state=memory)
