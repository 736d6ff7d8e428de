"""Rotary position embedding in Triton, one pass over x: a program has some tokens with their angles, and goes through their heads.

The gradient is the same turn the other way.

Shapes: B batch, T time, H heads, K key size, F = K / 2 pairs; tiles of R tokens.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kernels import arrays
from kernels.launch import divide_up, launch

Array = Any  # torch.Tensor
TOKENS, WARPS = 16, 4


def rope(x_BTHK: Array, positions: Array, *, base: float) -> Array:
    """See `kernels.rope.rope`."""
    cos, sin = arrays.of(x_BTHK).rotation(positions, x_BTHK.shape[-1] // 2, base)
    return differentiable(x_BTHK, cos, sin)[0]


def forward(x, cos, sin):
    return (turned(x, cos, sin, back=False),), ()


def backward(inputs, residuals, gradients):
    _, cos, sin = inputs
    return turned(gradients[0], cos, sin, back=True), None, None


def turned(x_BTHK: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, back: bool) -> torch.Tensor:
    """x turned by the angles of [T, F] or [B, T, F], or back by them."""
    (B, T, H, K), F = x_BTHK.shape, cos.shape[-1]
    x_BTHK, cos, sin = x_BTHK.contiguous(), cos.contiguous(), sin.contiguous()
    out = torch.empty_like(x_BTHK)
    options = {"H": H, "K": K, "F": F, "BF": triton.next_power_of_2(F), "R": TOKENS, "OWN": cos.ndim == 3, "BACK": back}
    launch(_turn, (divide_up(T, TOKENS), B), x_BTHK, cos, sin, out, T, **options, warps=WARPS)
    return out


differentiable = arrays.custom_gradient(forward, backward, outputs=1)


@triton.jit
def _turn(
    x, cos, sin, out, T,
    H: tl.constexpr, K: tl.constexpr, F: tl.constexpr, BF: tl.constexpr, R: tl.constexpr, OWN: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """OWN: every sequence has angles of its own."""
    t_R, f_F = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, BF)
    token_R = tl.program_id(1).to(tl.int64) * T + t_R
    there = (t_R < T)[:, None] & (f_F < F)[None, :]
    angle = (token_R if OWN else t_R)[:, None] * F + f_F[None, :]
    cos_RF, sin_RF = tl.load(cos + angle, there, other=0.0), tl.load(sin + angle, there, other=0.0)
    if BACK:
        sin_RF = -sin_RF
    place = token_R[:, None] * (H * K) + f_F[None, :]
    for head in tl.static_range(H):
        first, second = place + head * K, place + head * K + F
        a_RF = tl.load(x + first, there, other=0.0).to(tl.float32)
        b_RF = tl.load(x + second, there, other=0.0).to(tl.float32)
        tl.store(out + first, (a_RF * cos_RF - b_RF * sin_RF).to(out.dtype.element_ty), there)
        tl.store(out + second, (b_RF * cos_RF + a_RF * sin_RF).to(out.dtype.element_ty), there)
