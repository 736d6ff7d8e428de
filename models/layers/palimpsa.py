"""What Palimpsa's two layers share (arXiv 2602.09075): every entry of the state knows how sure it is, and is overwritten accordingly.

    M_t = a_t M_{t-1} + v*_t k_t^T;  J_t = a_t J_{t-1} + beta_t (k_t^2)^T;  o_t = scale [M_t / (prior + J_t)] q_t      (division by entry)
    dt  = softplus(W x + b);  log a = -exp(rate) dt;  v* = write v;  beta = write sigmoid(W_2 W_1 x) softplus(beta_scale)

write is one number a head and token; v is convolved and activated. The prior is 1 and not trained, as in the authors' code. Without
metaplasticity there is no beta and the read-out is M_t q_t: linear attention with the same projections (the paper's "w/o Meta").
beta, gates, prior and states are float32 whatever the activations' dtype.

Shapes: B batch, T time, D width, H heads, K key size, V value size, R rank of the beta branch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import numpy as np

from kernels import linear_attention, palimpsa
from models.layers.layer import Array, precise, product
from models.layers.matrix import MatrixLayer, remaining
from models.parameters import Parameter, Table, ones


def inverse_sqrt_uniform(random: np.random.Generator, shape: tuple[int, ...], blocks: int) -> np.ndarray:
    """Uniform in +-1 / sqrt(fan_in): the beta branch's second matrix."""
    return random.uniform(-1, 1, shape).astype(np.float32) * np.float32(shape[-2] ** -0.5)


def start_uniform(random: np.random.Generator, shape: tuple[int, ...], blocks: int) -> np.ndarray:
    """Uniform in [0.1, 1]: beta's scale where fine-tuning begins, less than from scratch and so nearer to Mamba2's limit."""
    return random.uniform(0.1, 1, shape).astype(np.float32)


LONGEST_WINDOW = 1 << 20
"""Tokens: beyond it float32 cannot well tell a decay from 1."""


def log_window(log_decay: Array, *, ops: ModuleType) -> Array:
    """log N = -log(1 - a): the memory window of a forget gate, in the logarithm of tokens."""
    return -ops.log1p(-ops.minimum(ops.exp(log_decay), 1 - 1 / LONGEST_WINDOW))


@dataclass(frozen=True)
class Palimpsa(MatrixLayer):
    """The common part; see palimpsa_d.py and palimpsa_m.py for the blocks.

    metaplasticity: False leaves out beta and the division. rank: of the beta branch, null for width / 16. prior: importance of what was
    never written. beta_start: beta_scale begins at 1 ("one"), or uniform in [0.1, 1] ("uniform"), as for weights trained without it.
    """

    forget_gate: Literal["sigmoid", "mamba"] = "mamba"
    convolve_values: bool = True
    output_gate: bool = True
    skip: bool = True
    metaplasticity: bool = True
    rank: int | None = None
    prior: float = 1.0
    beta_start: Literal["one", "uniform"] = "one"

    unit = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"{self.name}: rank is {self.rank}; the beta branch needs at least 1, or null for width / 16.")
        if self.beta_start not in ("one", "uniform"):
            raise ValueError(f"{self.name}: beta_start is {self.beta_start!r}; it is 'one' or 'uniform'.")
        if not self.prior > 0:
            raise ValueError(f"{self.name}: prior is {self.prior}; it must be above 0.")

    @property
    def operation(self) -> Callable:
        """The kernel."""
        return palimpsa.palimpsa if self.metaplasticity else linear_attention.linear_attention

    @property
    def one_token(self) -> Callable:
        """The kernel's step."""
        return palimpsa.step if self.metaplasticity else linear_attention.step

    @property
    def bottleneck(self) -> int:
        """R."""
        return self.rank or max(1, self.width // 16)

    def parameters(self) -> Table:
        """The common block's and the beta branch."""
        if not self.metaplasticity:
            return super().parameters()
        return {
            **super().parameters(),
            "beta_in": Parameter((self.width, self.bottleneck), axes=("width", "rank")),
            "beta_out": Parameter((self.bottleneck, self.values), inverse_sqrt_uniform, axes=("rank", "inner")),
            "beta_scale": Parameter((self.heads,), ones if self.beta_start == "one" else start_uniform, decay=False, axes=("heads",)),
        }

    def write(self, gates: dict[str, Array], *, ops: ModuleType) -> Array:
        """How much of each token is written [B, T, H], float32."""
        raise NotImplementedError

    def prepare(
        self, q_BTHK: Array, k_BTHK: Array, v_BTHV: Array, gates: dict[str, Array], *, ops: ModuleType
    ) -> tuple[Array, Array, Array]:
        """Values times the write gate."""
        return q_BTHK, k_BTHK, ops.cast(precise(v_BTHV, ops=ops) * self.write(gates, ops=ops)[..., None], v_BTHV.dtype)

    def operands(self, p: dict[str, Array], gates: dict[str, Array], x_BTD: Array, *, ops: ModuleType) -> tuple[Array, ...]:
        """beta [B, T, H, V], log a and the prior [H]; log a alone without metaplasticity."""
        log_decay = self.log_decay(p, gates, ops=ops)
        if not self.metaplasticity:
            return (log_decay,)
        x, into, out, scale = (precise(y, ops=ops) for y in (x_BTD, p["beta_in"], p["beta_out"], p["beta_scale"]))
        logit = ops.matmul(ops.matmul(x, into), out).reshape(*x_BTD.shape[:2], self.heads, self.value_size)
        beta = ops.sigmoid(logit) * (ops.softplus(scale) * self.write(gates, ops=ops))[..., None]
        return beta, log_decay, ops.full((self.heads,), self.prior, log_decay.dtype, log_decay)

    def scalars(self, operands: tuple[Array, ...], memory: Any, info: list[dict[str, Array]], *, ops: ModuleType) -> dict[str, Array]:
        """Means over sequences and heads: log_window, log N_t, over tokens too; with metaplasticity importance_ratio, (most - least) / least over
        the entries of a head's importance behind the last token."""
        log_decay = operands[-2 if self.metaplasticity else 0]
        found = {"log_window": ops.mean(log_window(ops.stop_gradient(log_decay), ops=ops), (0, 1, 2))}
        if self.metaplasticity:
            J_BHN = ops.stop_gradient(memory.J_BHKV).reshape(*memory.J_BHKV.shape[:2], -1)
            most_BH, least_BH = self.prior + ops.max(J_BHN, -1), self.prior - ops.max(-J_BHN, -1)
            found["importance_ratio"] = ops.mean((most_BH - least_BH) / least_BH, (0, 1))
        return found

    def internals(
        self, p: dict[str, Array], x_BTD: Array, positions: tuple[int, ...], segments: Array | None = None, *, tolerance: float, ops: ModuleType
    ) -> dict[str, Array]:  # fmt: skip
        """What the heads do on the normalised stream x, for looking at (arXiv 2602.09075, section on learning dynamics), all float32.

        log_window [B, T, H]: log N_t. With metaplasticity also beta [B, T, H], its mean over values, and importance [B, P, H, K, V], prior + J behind
        the tokens `positions`, counted from 1. tolerance is for solvers.
        """
        _, k, _, operands, *_ = self._inputs(p, x_BTD, None, segments, ops=ops)
        found = {"log_window": log_window(operands[-2 if self.metaplasticity else 0], ops=ops)}
        if self.metaplasticity:
            beta, log_decay, _ = operands
            squared_BTHK = precise(k, ops=ops) * precise(k, ops=ops)
            left = [(t, remaining(log_decay, t, segments, ops=ops)) for t in positions]
            J = [
                ops.einsum("bthk,bthv->bhkv", left_BTH[..., None] * squared_BTHK[:, :t], beta[:, :t], precision="highest")
                for t, left_BTH in left
            ]
            found |= {"beta": ops.mean(beta, -1), "importance": self.prior + ops.stack(J, 1)}
        return found

    def around_flops(self) -> int:
        """The common block's and the beta branch."""
        branch = product(self.bottleneck, self.width + self.values) if self.metaplasticity else 0
        return super().around_flops() + branch

    def recurrence_flops(self, length: int) -> float:
        """Three multiply-adds an entry and token, M's and J's update and the read-out; the division is not counted."""
        return product(3, self.key_size, self.value_size) if self.metaplasticity else super().recurrence_flops(length)

    def state_floats(self, length: int) -> int:
        """M, and J."""
        return (2 if self.metaplasticity else 1) * super().state_floats(length)

    def settings(self) -> dict[str, Any]:
        """The read-out's scale."""
        return {}
