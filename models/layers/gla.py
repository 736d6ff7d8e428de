"""Gated linear attention, G_t = gamma_t G_{t-1} + beta_t v_t k_t^T (MesaNet, Table 1).

Shapes: see matrix.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.layers.matrix import MatrixLayer


@dataclass(frozen=True)
class GLA(MatrixLayer):
    """Linear attention with a forget and a write gate, one scalar each a head."""

    name = "gla"
