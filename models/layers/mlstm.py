"""xLSTM's matrix memory (mLSTM) on the common block (MesaNet, Table 1; xLSTM, equations 19-27).

    C_t = f_t C_{t-1} + i_t v_t k_t^T;  n_t = f_t n_{t-1} + i_t k_t;  o_t = C_t q_t / max(|n_t . q_t|, 1)
    i = exp(W_i x + b_i), f = sigmoid(W_f x + b_f), k scaled by 1 / sqrt(K), all stabilised by a running maximum m

Shapes: see matrix.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import ClassVar

import numpy as np

from kernels import mlstm as kernel
from models.layers.layer import Array, product
from models.layers.matrix import MatrixLayer
from models.parameters import Table, normal, zeros


def forget_bias(random: np.random.Generator, shape: tuple[int, ...], blocks: int) -> np.ndarray:
    """Evenly from 3 to 6 over the heads, as xLSTM's code has it: gates begin almost open."""
    return np.linspace(3, 6, shape[0], dtype=np.float32)


@dataclass(frozen=True)
class MLSTM(MatrixLayer):
    """Linear attention with an exponential write gate and a normaliser; queries and keys are not normalised."""

    name = "mlstm"
    gates: ClassVar[tuple[str, ...]] = ("forget", "write")
    unit = ()
    operation = staticmethod(kernel.mlstm)
    one_token = staticmethod(kernel.step)

    def parameters(self) -> Table:
        """The common block's; gates begin as xLSTM's do: weights 0, forget biases 3 to 6, write biases N(0, 0.1^2)."""
        table = super().parameters()
        initial = {"forget": zeros, "write": zeros, "forget_bias": forget_bias, "write_bias": normal(0.1)}
        return {**table, **{name: replace(table[name], init=init) for name, init in initial.items()}}

    def recurrence_flops(self, length: int) -> float:
        """Linear attention's, and the normaliser's update and product."""
        return super().recurrence_flops(length) + product(2, self.key_size)

    def state_floats(self, length: int) -> int:
        """K V and the normaliser's K a head."""
        return super().state_floats(length) + self.heads * self.key_size

    def prepare(
        self, q_BTHK: Array, k_BTHK: Array, v_BTHV: Array, gates: dict[str, Array], *, ops: ModuleType
    ) -> tuple[Array, Array, Array]:
        """Keys over sqrt(K)."""
        return q_BTHK, k_BTHK * self.key_size**-0.5, v_BTHV

    def operands(self, p: dict[str, Array], gates: dict[str, Array], x_BTD: Array, *, ops: ModuleType) -> tuple[Array, ...]:
        """log i and log f."""
        return gates["write"], self.log_decay(p, gates, ops=ops)
