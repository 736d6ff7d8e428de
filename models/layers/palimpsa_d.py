"""Palimpsa-D: Palimpsa's recurrence in Gated DeltaNet's block, with an MLP behind (arXiv 2602.09075; the authors' code).

    q, k normalised per head; scale 1 / sqrt(K); write = sigmoid(W x + b), apart from forgetting
    y = sum over heads of P_h (RMSNorm_h(o_h + skip_h v_h) * SiLU(W x)_h)

Its published MLP is 8/3 of the width, rounded up to a multiple of 256: `mlp` of the scale. Shapes: see palimpsa.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

from models.layers.layer import Array
from models.layers.palimpsa import Palimpsa


@dataclass(frozen=True)
class PalimpsaD(Palimpsa):
    """Convolutions on queries, keys and values, a skip, an output gate; see palimpsa.py and matrix.py for its options."""

    name = "palimpsa_d"

    def write(self, gates: dict[str, Array], *, ops: ModuleType) -> Array:
        """A gate of its own."""
        return ops.sigmoid(gates["write"])

    def prepare(
        self, q_BTHK: Array, k_BTHK: Array, v_BTHV: Array, gates: dict[str, Array], *, ops: ModuleType
    ) -> tuple[Array, Array, Array]:
        """Queries and keys to unit length, values times the write gate."""
        return super().prepare(ops.l2_normalise(q_BTHK), ops.l2_normalise(k_BTHK), v_BTHV, gates, ops=ops)

    def settings(self) -> dict[str, Any]:
        """The read-out's scale."""
        return {"scale": self.key_size**-0.5}
