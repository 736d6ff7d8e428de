"""Mamba2 as MesaNet compares it: a forget gate only, G_t = gamma_t G_{t-1} + v_t k_t^T (MesaNet, Table 1).

Shapes: see matrix.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

from kernels import linear_attention as kernel
from models.layers.layer import Array
from models.layers.matrix import MatrixLayer


@dataclass(frozen=True)
class Mamba2(MatrixLayer):
    """Linear attention with one forget gate a head; writes are not gated."""

    name = "mamba2"
    gates: ClassVar[tuple[str, ...]] = ("forget",)
    operation = staticmethod(kernel.linear_attention)
    one_token = staticmethod(kernel.step)

    def operands(self, p: dict[str, Array], gates: dict[str, Array], x_BTD: Array, *, ops: ModuleType) -> tuple[Array, ...]:
        """log gamma."""
        return (self.log_decay(p, gates, ops=ops),)
