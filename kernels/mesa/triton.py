"""Mesa in Triton: a walk for [G | H] at the chunks' starts (`walks.py`), then every chunk's solve and read-out by itself (`solve.py`);
backward one more solve, a walk the other way, and the chunks' gradients (`inside.py`).

Products (`products.py`): of float32 inputs in float32. Of bfloat16 inputs in float16, refined where they do not reach (`precision="auto"`),
or in high and low parts throughout (`precision="split"`).

Shapes: B batch, T time, H heads, K key size, V value size, X = V + K, N chunks, M = N B H.
"""

from functools import partial
from typing import Any

import torch

from kernels import arrays
from kernels.launch import divide_up, launch
from kernels.linear_attention import triton as linear
from kernels.mesa import chunked, inside, walks
from kernels.mesa import solve as solver
from kernels.mesa.reference import State

Array = Any  # torch.Tensor

CHUNK = 64
BOUND = 1e-3
"""A token of true residual above this (of a right-hand side of norm 1) is refined."""


def mesa(q, k, v, log_decay, beta, lam, *, precision: str = "auto", **options: Any) -> tuple[Array, State, dict[str, Array]]:
    """See `kernels.mesa.mesa`. precision: "auto" or "split", of bfloat16 inputs; see above."""
    if precision not in ("auto", "split"):
        raise ValueError(f'mesa: precision is {precision!r}; it must be "auto" or "split".')
    run = partial(differentiable, precision=precision)
    return chunked.mesa(q, k, v, log_decay, beta, lam, **options, chunk=CHUNK, run=run, read=linear.differentiable)


def forward(q, k, v, log_decay, beta, lam, sign, S_BHKX, *, steps, eps, criterion, start, chunk, precision):
    mode = products(q, k, v, precision)
    dtype = v.dtype
    q, k, v, log_decay, beta, lam, sign, S_BHKX = operands(mode, q, k, v, log_decay, beta, lam, sign, S_BHKX)
    B, T, H, K = q.shape
    V, N = v.shape[-1], divide_up(T, chunk)
    sizes = {"K": K, "V": V, "C": chunk, "BK": tile(K)}
    new = q.new_empty
    M = N * B * H
    high = new((M, K, V + K), dtype=torch.float32 if mode == "exact" else torch.float16)
    low = high if mode == "exact" else torch.empty_like(high)
    scale, last = new((M, 2), dtype=torch.float32), torch.empty_like(S_BHKX)
    launch(
        walks.starts, (B * H, 2), k, v, log_decay, beta, sign, S_BHKX, high, low, scale, last, T, H, N, B * H,
        **sizes, BW=tile(max(K, V)), MODE=mode, warps=8, stages=2,
    )  # fmt: skip
    o, x = torch.empty_like(v), new(q.shape, dtype=torch.float32)
    taken, residual = new(q.shape[:3], dtype=torch.int32), new(q.shape[:3], dtype=torch.float32)
    launch(
        solver.solve, (M,), q, k, v, x, log_decay, beta, sign, lam, high, low, scale, x, o, taken, residual, residual, residual,
        T, H, B * H, steps, eps, BOUND,
        **sizes, BV=tile(V), MODE=mode, BACK=False, JACOBI=start == "jacobi", CRITERION=criterion, warps=4, stages=1,
    )  # fmt: skip
    return (o.to(dtype), last, taken, residual), (x, high, scale, *(() if mode == "exact" else (low,)))


def backward(inputs, residuals, gradients, *, steps, eps, criterion, start, chunk, precision):
    q, k, v, log_decay, beta, lam, sign, S_BHKX = inputs
    x, high, scale, low = residuals if len(residuals) == 4 else (*residuals, residuals[1])
    do, dlast = gradients[:2]
    mode, dtypes = products(q, k, v, precision), (q.dtype, k.dtype, v.dtype)
    q, k, v, log_decay, beta, lam, sign, S_BHKX = operands(mode, q, k, v, log_decay, beta, lam, sign, S_BHKX)
    do, dlast = do.to(v.dtype).contiguous(), dlast.float().contiguous()
    B, T, H, K = q.shape
    V, N = v.shape[-1], divide_up(T, chunk)
    M = N * B * H
    sizes = {"K": K, "V": V, "C": chunk, "BK": tile(K)}
    new = partial(q.new_empty, dtype=torch.float32)
    back, dq, since, dlam = new(q.shape), torch.empty_like(q), new(q.shape[:3]), new((M, K))
    launch(
        solver.solve, (M,), do, k, v, x, log_decay, beta, sign, lam, high, low, scale, back, dq, since, since, since, dlam,
        T, H, B * H, steps, eps, BOUND,
        **sizes, BV=tile(V), MODE=mode, BACK=True, JACOBI=start == "jacobi", CRITERION=criterion, warps=4, stages=1,
    )  # fmt: skip
    dhigh = new((M, K, V + K), dtype=torch.float32 if mode == "exact" else torch.bfloat16)
    dlow = dhigh if mode == "exact" else torch.empty_like(dhigh)
    dthrough, dS = new((M, 2)), new(S_BHKX.shape)
    launch(
        walks.ends, (B * H, 2), x, do, back, log_decay, sign, high, low, scale, dlast, dhigh, dlow, dthrough, dS, T, H, N, B * H,
        **sizes, BW=tile(max(K, V)), MODE=mode, warps=8, stages=2,
    )  # fmt: skip
    dk, dv, dbeta, dlog_decay = torch.empty_like(k), torch.empty_like(v), new(beta.shape), new(beta.shape)
    launch(
        inside.gradients, (M,), x, back, do, k, v, log_decay, beta, sign, dhigh, dlow, since, dthrough, dk, dv, dbeta, dlog_decay,
        T, H, B * H, **sizes, BV=tile(V), MODE=mode, warps=8, stages=1,
    )  # fmt: skip
    dlam = dlam.reshape(N * B, H, K).sum(0)
    dH = dS[..., V:]
    dS = torch.cat((dS[..., :V], (dH + dH.mT) / 2), -1)  # H is symmetric, and so is its gradient
    dq, dk, dv = (x.to(dtype) for x, dtype in zip((dq, dk, dv), dtypes, strict=True))
    return dq, dk, dv, dlog_decay, dbeta, dlam.to(inputs[5].dtype), None, dS


differentiable = arrays.custom_gradient(forward, backward, outputs=4)


def products(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, precision: str) -> str:
    """The kernels' MODE."""
    if any(x.dtype != torch.bfloat16 for x in (q, k, v)):
        return "exact"
    return "refine" if precision == "auto" else "split"


def operands(mode: str, q, k, v, *rest: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Contiguous; q, k, v in one dtype, the rest in float32."""
    return [x.to(torch.float32 if mode == "exact" else torch.bfloat16).contiguous() for x in (q, k, v)] + [
        None if x is None else x.float().contiguous() for x in rest
    ]


def tile(size: int) -> int:
    """The next power of two that tensor cores take."""
    return max(16, 1 << (size - 1).bit_length())
