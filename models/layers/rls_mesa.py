"""The original Mesa layer: recursive least squares whose regulariser is forgotten with the rest (von Oswald et al. 2024; MesaNet, App. H).

    G_t = gamma_t G_{t-1} + beta_t v_t k_t^T;  H_t = gamma_t H_{t-1} + beta_t k_t k_t^T;  H_0 = Lambda;  o_t = G_t H_t^-1 q_t
    Lambda = minimum + softplus(lambda)

Everything around it is Mesa's, so that the two differ in what becomes of Lambda alone. MesaNet (section 4) compares it without a forget
gate, as the original "cannot use" one: the default here. Shapes: see matrix.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType

from kernels import rls_mesa as kernel
from models.layers.layer import TRAINING, Array, precise, product
from models.layers.matrix import MatrixLayer
from models.layers.mesa import SOLVES_IN_TRAINING
from models.parameters import Parameter, Table, constant


@dataclass(frozen=True)
class RLSMesa(MatrixLayer):
    """Gated linear attention whose query passes through H^-1, H forgotten as a whole.

    forget_minimum: gamma lies between it and 1; 1 means no forget gate. Far below 1, H becomes singular (see kernels.rls_mesa).
    lambda_minimum, lambda_initial: Lambda's bound, and where it begins.
    """

    forget_minimum: float = 1.0
    lambda_minimum: float = 0.25
    lambda_initial: float = 1.0

    name = "rls_mesa"
    operation = staticmethod(kernel.rls_mesa)
    one_token = staticmethod(kernel.step)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.forget_minimum <= 1:
            raise ValueError(f"rls_mesa: forget_minimum is {self.forget_minimum}; it lies in (0, 1], and 1 means no forget gate.")
        if not 0 <= self.lambda_minimum < self.lambda_initial:
            raise ValueError(
                f"rls_mesa: lambda_initial {self.lambda_initial} must lie above lambda_minimum {self.lambda_minimum}, and that at 0 or more."
            )

    @property
    def gates(self) -> tuple[str, ...]:
        """A forget gate only where there is something to choose."""
        return ("write",) if self.forget_minimum == 1 else ("forget", "write")

    def parameters(self) -> Table:
        """The common block's and one lambda a head and key dimension."""
        start = math.log(math.expm1(self.lambda_initial - self.lambda_minimum))
        return {
            **super().parameters(),
            "lambda": Parameter((self.heads, self.key_size), constant(start), decay=False, axes=("heads", "key")),
        }

    def operands(self, p: dict[str, Array], gates: dict[str, Array], x_BTD: Array, *, ops: ModuleType) -> tuple[Array, ...]:
        """log gamma, beta, and Lambda's diagonal [H, K]."""
        beta = ops.sigmoid(gates["write"])
        if self.forget_minimum == 1:
            log_decay = ops.zeros(beta.shape, beta.dtype, beta)
        else:
            log_decay = self.log_decay(p, gates, ops=ops)
        return log_decay, beta, self.lambda_minimum + ops.softplus(precise(p["lambda"], ops=ops))

    def log_decay(self, p: dict[str, Array], gates: dict[str, Array], *, ops: ModuleType) -> Array:
        """log gamma [B, T, H], with gamma = minimum + (1 - minimum) gate."""
        return ops.log1p((1 - self.forget_minimum) * ops.expm1(super().log_decay(p, gates, ops=ops)))

    def solve_flops(self, length: int) -> float:
        """H_t^-1 b_t of one head, a token: 8CK + 8K^2 for Woodbury's identity and its refinement, 4CK + 2K^2 for the residual between."""
        C, K = min(kernel.chunked.CHUNK, length), self.key_size
        return product(6, C, K) + product(5, K, K)

    def factor_flops(self, length: int) -> float:
        """A K x K Cholesky factor and its inverse a chunk, 2/3 K^3; keys through it 2K^2 a token; of C x C, what they meet, 3CK."""
        C, K = min(kernel.chunked.CHUNK, length), self.key_size
        return 2 / 3 * K**3 / C + product(K, K) + 3 * C * K

    def flops(self, length: int, *, steps: float | None = None, training: bool = False) -> float:
        """The common block's, H's update, a chunk's factors, and a solve forward and, in training, once more backward; steps has no meaning."""
        common = self.around_flops() + self.heads * (self.recurrence_flops(length) + product(self.key_size, self.key_size))
        solve, factors = self.heads * self.solve_flops(length), self.heads * self.factor_flops(length)
        return (TRAINING * common + SOLVES_IN_TRAINING * solve if training else common + solve) + factors

    def state_floats(self, length: int) -> int:
        """G, H, and what is left of Lambda in it."""
        return super().state_floats(length) + self.heads * (self.key_size**2 + 1)
