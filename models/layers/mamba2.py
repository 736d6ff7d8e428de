"""Mamba2 as MesaNet compares it: a forget gate only, G_t = gamma_t G_{t-1} + v_t k_t^T (MesaNet, Table 1).

Shapes: see matrix.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

from kernels import linear_attention as kernel
from models.layers.layer import Array
from models.layers.matrix import MatrixLayer


@dataclass(frozen=True)
class Mamba2(MatrixLayer):
    """Linear attention with one forget gate a head; writes are not gated."""

    name = "mamba2"
    gates: ClassVar[tuple[str, ...]] = ("forget",)

    def recur(
        self, p: dict[str, Array], q_BTHK: Array, k_BTHK: Array, v_BTHK: Array, gates: dict[str, Array], memory: Any, segments: Array | None,
        *, ops: ModuleType, record: dict[str, Array] | None,
    ) -> tuple[Array, Any]:  # fmt: skip
        """Linear attention without a write gate; see MatrixLayer.recur."""
        return kernel.linear_attention(q_BTHK, k_BTHK, v_BTHK, ops.log_sigmoid(gates["forget"]), state=memory, segments=segments)

    def recur_step(
        self, p: dict[str, Array], q_BHK: Array, k_BHK: Array, v_BHK: Array, gates: dict[str, Array], memory: Any, *, ops: ModuleType
    ) -> tuple[Array, Any]:
        """See MatrixLayer.recur_step."""
        return kernel.step(q_BHK, k_BHK, v_BHK, ops.log_sigmoid(gates["forget"]), state=memory)
