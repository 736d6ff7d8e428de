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
    unit = ("q", "k")

    def write(self, gates: dict[str, Array], *, ops: ModuleType) -> Array:
        """A gate of its own."""
        return ops.sigmoid(gates["write"])

    def settings(self) -> dict[str, Any]:
        """The read-out's scale."""
        return {"scale": self.key_size**-0.5}
