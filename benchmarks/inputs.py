"""Inputs of the Mesa layer, from easy to hard on a solver: what tests bound and benchmarks time.

Shapes: B batch, T time, H heads, K key size (the values' too).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MESA = ("mixed", "hard", "lowrank", "scream")
"""mixed: heads from fast to slow, gamma 0.5 to 0.9975. hard: gamma 0.9975 throughout. lowrank: as hard, keys in 8 dimensions, Lambda 0.25.
scream: as hard, every key of a head equal, beta 0.44, Lambda 0.25 (MesaNet, arXiv 2506.05233, section G.5)."""
LONG = "long"
"""gamma 0.99, Lambda from 0.25 to 8 over the key's dimensions: no token stops before 30 steps, and each is solved to 1e-5 then."""


def mesa(
    kind: str, B: int, T: int, H: int, K: int, *, seed: int = 0, device: Any = "cpu", dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """q, k, v [B, T, H, K] in `dtype` (bfloat16), log_decay, beta [B, T, H] and lam [H, K] in float32, as `kernels.mesa` names them.

    Queries and keys are of SiLU and unit length, values standard normal. Raises ValueError for a kind that is neither in MESA nor LONG.
    """
    import torch
    import torch.nn.functional as F

    if kind not in (*MESA, LONG):
        raise ValueError(f"there are no {kind!r} inputs; there are {', '.join((*MESA, LONG))}.")
    dtype = dtype or torch.bfloat16
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    q, k = F.silu(normal(B, T, H, K)), F.silu(normal(B, T, H, K))
    if kind == "lowrank":
        k = normal(B, T, H, 8) @ normal(8, K)
    if kind == "scream":
        k = k[:, :1].expand(B, T, H, K)
    slow = torch.full((H,), 0.01 if kind == LONG else 0.0025, device=device)
    forgotten = torch.logspace(-0.30103, -2.60206, H, device=device) if kind == "mixed" else slow
    jitter = 0.5 + torch.rand(B, T, H, generator=generator, device=device) if kind == "mixed" else torch.ones(B, T, H, device=device)
    beta = torch.rand(B, T, H, generator=generator, device=device)
    lam = torch.full((H, K), 1.0 if kind in ("mixed", "hard") else 0.25, device=device)
    if kind == LONG:
        lam = torch.logspace(-2, 3, K, base=2, device=device).expand(H, K).contiguous()
    return {
        "q": F.normalize(q, dim=-1).to(dtype),
        "k": F.normalize(k, dim=-1).to(dtype),
        "v": normal(B, T, H, K).to(dtype),
        "log_decay": torch.log1p(-forgotten) * jitter,
        "beta": torch.full_like(beta, 0.44) if kind == "scream" else beta,
        "lam": lam,
    }
