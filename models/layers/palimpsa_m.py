"""Palimpsa-M: Palimpsa's recurrence in Mamba2's block, which is a block by itself, without an MLP (arXiv 2602.09075; the authors' code).

    v, k, q = SiLU(conv4(W x) + b), not normalised; write = dt, so that writing and forgetting are one
    y = P (RMSNorm((o + skip_h v) * SiLU(W x)))                                    (over the whole inner width)

k and q are Mamba2's B and C: of G groups, each for H / G heads. Shapes: see palimpsa.py; G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

from models.layers.layer import Array
from models.layers.palimpsa import Palimpsa


@dataclass(frozen=True)
class PalimpsaM(Palimpsa):
    """value_expansion: width of the values over all heads, over the stream's width. groups: of queries and keys, null for one a head.

    See palimpsa.py and matrix.py for its other options.
    """

    value_expansion: float = 2.0
    groups: int | None = None

    name = "palimpsa_m"
    gates: ClassVar[tuple[str, ...]] = ("forget",)
    convolution_bias: ClassVar[bool] = True
    norm_epsilon: ClassVar[float] = 1e-5
    mlp: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.forget_gate != "mamba":
            raise ValueError(f"palimpsa_m: forget_gate is {self.forget_gate!r}; it writes by Mamba's step size, so it must be 'mamba'.")
        if self.groups is not None and (self.groups < 1 or self.heads % self.groups):
            raise ValueError(f"palimpsa_m: groups is {self.groups}; give a divisor of the {self.heads} heads.")

    @property
    def _values_wanted(self) -> float:
        return self.value_expansion * self.width

    @property
    def key_heads(self) -> int:
        """How many heads of queries and keys are projected."""
        return self.groups or self.heads

    def write(self, gates: dict[str, Array], *, ops: ModuleType) -> Array:
        """dt, the step size that forgetting goes by."""
        return ops.softplus(gates["forget"])

    def prepare(
        self, q_BTGK: Array, k_BTGK: Array, v_BTHV: Array, gates: dict[str, Array], *, ops: ModuleType
    ) -> tuple[Array, Array, Array]:
        """A group's queries and keys for each of its heads, values times dt."""

        def for_heads(x_BTGK: Array) -> Array:
            B, T, G, K = x_BTGK.shape
            return ops.broadcast_to(x_BTGK[:, :, :, None], (B, T, G, self.heads // G, K)).reshape(B, T, self.heads, K)

        return super().prepare(for_heads(q_BTGK), for_heads(k_BTGK), v_BTHV, gates, ops=ops)

    def normalise(self, p: dict[str, Array], o: Array, gate: Array | None, *, ops: ModuleType) -> Array:
        """The gate, then all heads together to unit size."""
        o = o if gate is None else o * gate
        flat = ops.rms_norm(o.reshape(*o.shape[:-2], self.values), p["norm"].reshape(self.values), eps=self.norm_epsilon)
        return flat.reshape(o.shape)
