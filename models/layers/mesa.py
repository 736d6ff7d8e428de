"""The Mesa layer: each token's read-out solves the regression of values on keys so far (MesaNet, equations 7, 8, 43, 44).

    G_t = gamma_t G_{t-1} + beta_t v_t k_t^T;  H_t = gamma_t H_{t-1} + beta_t k_t k_t^T;  o_t = G_t (H_t + Lambda)^-1 q_t
    Lambda = minimum + softplus(lambda);  gamma <- gamma (1 - (1 - bound) beta^2)                  (MesaNet, G.5)

Shapes: see matrix.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import numpy as np

from kernels import mesa as kernel
from models.layers.layer import TRAINING, Array, precise, product
from models.layers.matrix import MatrixLayer, readout_flops, remaining
from models.parameters import Parameter, Table, constant

SOLVES_IN_TRAINING = 2
"""One forward, one backward (MesaNet, appendix D)."""


@dataclass(frozen=True)
class Mesa(MatrixLayer):
    """Gated linear attention whose query passes through (H + Lambda)^-1 by conjugate gradients.

    steps: the solver's cap. eps: a token is done once its residual is that much below what `criterion` names: "b", both its
    first residual and its query; "r0", its first residual alone (the paper's inference study). start: "jacobi", q / diag(H + Lambda), or "zero".
    solve: False reads out with the query itself, as GLA does. gradient: "implicit", by one more solve backward, or "unrolled", through the
    steps that were taken, at the memory of all of them; which is better where the solver stops early, the paper leaves open (its Appendix J).
    lambda_minimum, lambda_initial: Lambda's bound, and where it begins. forget_bound: gamma's upper bound at beta = 1; 1 leaves gamma as it is.
    """

    steps: int = 30
    eps: float = 1e-4
    criterion: Literal["b", "r0"] = "b"
    start: Literal["jacobi", "zero"] = "jacobi"
    solve: bool = True
    gradient: Literal["implicit", "unrolled"] = "implicit"
    lambda_minimum: float = 0.25
    lambda_initial: float = 1.0
    forget_bound: float = 0.9975

    name = "mesa"
    operation = staticmethod(kernel.mesa)
    one_token = staticmethod(kernel.step)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 0 or self.eps < 0:
            raise ValueError(f"mesa: steps is {self.steps} and eps {self.eps}; neither may be negative.")
        if self.criterion not in ("b", "r0"):
            raise ValueError(f"mesa: criterion is {self.criterion!r}; it is 'b' or 'r0'.")
        if self.start not in ("jacobi", "zero"):
            raise ValueError(f"mesa: start is {self.start!r}; it is 'jacobi' or 'zero'.")
        if self.gradient not in ("implicit", "unrolled"):
            raise ValueError(f"mesa: gradient is {self.gradient!r}; it is 'implicit' or 'unrolled'.")
        if not 0 <= self.lambda_minimum < self.lambda_initial:
            raise ValueError(
                f"mesa: lambda_initial {self.lambda_initial} must lie above lambda_minimum {self.lambda_minimum}, and that at 0 or more."
            )
        if not 0 < self.forget_bound <= 1:
            raise ValueError(f"mesa: forget_bound is {self.forget_bound}; it lies in (0, 1].")

    def parameters(self) -> Table:
        """The common block's and one lambda a head and key dimension."""
        start = math.log(math.expm1(self.lambda_initial - self.lambda_minimum))
        return {
            **super().parameters(),
            "lambda": Parameter((self.heads, self.key_size), constant(start), decay=False, axes=("heads", "key")),
        }

    def operands(self, p: dict[str, Array], gates: dict[str, Array], x_BTD: Array, *, ops: ModuleType) -> tuple[Array, ...]:
        """log gamma, beta, and Lambda's diagonal [H, K]."""
        log_decay, beta = self.log_decay(p, gates, ops=ops), ops.sigmoid(gates["write"])
        return log_decay, beta, self.lambda_minimum + ops.softplus(precise(p["lambda"], ops=ops))

    def log_decay(self, p: dict[str, Array], gates: dict[str, Array], *, ops: ModuleType) -> Array:
        """log gamma [B, T, H], bounded where much is written."""
        beta = ops.sigmoid(gates["write"])
        return super().log_decay(p, gates, ops=ops) + ops.log1p(-(1 - self.forget_bound) * beta * beta)

    def settings(self) -> dict[str, Any]:
        """The solver's."""
        return {name: getattr(self, name) for name in ("steps", "eps", "criterion", "solve", "start", "gradient")}

    def scalars(self, operands: tuple[Array, ...], memory: Any, info: list[dict[str, Array]], *, ops: ModuleType) -> dict[str, Array]:
        """Means over tokens and heads: steps taken, the true residual ||q - (H + Lambda) q*|| / ||q||, gamma, beta; and Lambda's mean."""
        log_decay, beta, lam = (ops.stop_gradient(one) for one in operands)
        facts = {"cg_steps": info[0]["steps"], "cg_residual": info[0]["residual"], "gamma": ops.exp(log_decay), "beta": beta}
        means = {name: ops.mean(ops.cast(value, ops.float32), (0, 1, 2)) for name, value in facts.items()}
        return means | {"lambda": ops.mean(lam, (0, 1))}

    def internals(
        self, p: dict[str, Array], x_BTD: Array, positions: tuple[int, ...], segments: Array | None = None, *, tolerance: float, ops: ModuleType
    ) -> dict[str, Array]:  # fmt: skip
        """What the heads do on the normalised stream x, for looking at (MesaNet, appendix O), all float32.

        gamma, beta, steps, cosine: [B, T, H]; the steps that bring a token's residual to `tolerance` of its first one, and the cosine of what
        is read with and without the solve. system: [B, P, H, K, K], H_t + Lambda behind the tokens `positions`, counted from 1. lambda: [H, K].
        """
        q, k, v, (log_decay, beta, lam), *_ = self._inputs(p, x_BTD, None, segments, ops=ops)
        given = (q, k, v, log_decay, beta, lam)
        enough = {"steps": self.key_size, "eps": tolerance, "criterion": "r0", "start": self.start}
        steps = self.operation(*given, **enough, segments=segments)[2]["steps"]
        with_solve, without = (
            precise(self.operation(*given, **self.settings() | {"solve": solve}, segments=segments)[0], ops=ops) for solve in (True, False)
        )
        lengths = ops.sqrt(ops.sum(with_solve * with_solve, -1) * ops.sum(without * without, -1))
        return {
            "gamma": ops.exp(log_decay),
            "beta": beta,
            "steps": ops.cast(steps, ops.float32),
            "cosine": ops.sum(with_solve * without, -1) / ops.maximum(lengths, 1e-30),
            "system": ops.stack([self._system(k, log_decay, beta, lam, t, segments, ops=ops) for t in positions], 1),
            "lambda": lam,
        }

    def _system(
        self, k_BTHK: Array, log_decay_BTH: Array, beta_BTH: Array, lam_HK: Array, t: int, segments: Array | None, *, ops: ModuleType
    ) -> Array:  # fmt: skip
        """H_t + Lambda [B, H, K, K]: the sum over s <= t of beta_s k_s k_s^T, decayed from s to t."""
        k_BTHK, weight_BTH = precise(k_BTHK[:, :t], ops=ops), remaining(log_decay_BTH, t, segments, ops=ops) * beta_BTH[:, :t]
        h_BHKL = ops.einsum("bthk,bthl->bhkl", weight_BTH[..., None] * k_BTHK, k_BTHK, precision="highest")
        identity_KL = ops.array(np.eye(self.key_size), ops.float32, lam_HK)
        return h_BHKL + lam_HK[:, :, None] * identity_KL

    def flops(self, length: int, *, steps: float | None = None, training: bool = False) -> float:
        """The common block's, H's update, and for each step taken 4CK + 2K^2 a head, forward and, in training, once more backward
        (twice, where it is unrolled).

        The start's residual is not counted as a step.
        """
        steps = (self.steps if steps is None else steps) if self.solve else 0
        common = self.around_flops() + self.heads * (self.recurrence_flops(length) + product(self.key_size, self.key_size))
        solve = self.heads * steps * readout_flops(length, self.key_size, self.key_size)
        solves = SOLVES_IN_TRAINING if self.gradient == "implicit" else TRAINING
        return (TRAINING * common + solves * solve) if training else common + solve

    def state_floats(self, length: int) -> int:
        """G and H."""
        return super().state_floats(length) + self.heads * self.key_size**2
