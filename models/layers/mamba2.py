"""Mamba2 as MesaNet compares it: a forget gate only, G_t = gamma_t G_{t-1} + v_t k_t^T (MesaNet, Table 1).

Shapes: see matrix.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from models.layers.matrix import MatrixLayer


@dataclass(frozen=True)
class Mamba2(MatrixLayer):
    """Linear attention with one forget gate a head; writes are not gated."""

    name = "mamba2"
    gates: ClassVar[tuple[str, ...]] = ("forget",)
