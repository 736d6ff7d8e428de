"""The RG-LRU's inputs and their gradients in Triton, each one pass: a program has some channels of a block for a span of tokens.

    y = 1 - a^2,  n = sqrt(y) (1 at a first token),  x = n i u         dlog_a <- dlog_a + dx i u slope (-2 a^2),  slope = min(1 / sqrt(4 y), steepest)

Backward computes the gates again. What biases and steps receive is summed over a span in registers, over spans afterwards.

Shapes: B batch, T time, N = B T tokens, L channels, H blocks of J; tiles of R tokens by C channels.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kernels import arrays
from kernels.launch import divide_up, launch

Array = Any  # torch.Tensor
TOKENS, CHANNELS, SPAN, WARPS = 32, 32, 1024, 4


def lru_input(u, f, g, f_bias, g_bias, steps, first, *, rate, steepest) -> tuple[Array, Array]:
    """See `kernels.lru_input.lru_input`."""
    return differentiable(u, f, g, f_bias.float(), g_bias.float(), steps.float(), first.to(torch.int32), rate=rate, steepest=steepest)


def _grid(u: torch.Tensor, f: torch.Tensor) -> tuple[tuple[int, int, int], dict[str, int]]:
    H, B, T, J = f.shape
    options = {"L": H * J, "J": J, "R": TOKENS, "C": CHANNELS, "SPAN": SPAN, "warps": WARPS}
    return (divide_up(J, CHANNELS), H, divide_up(B * T, SPAN)), options


def forward(u, f, g, f_bias, g_bias, steps, first, *, rate, steepest):
    u, f, g, first = (x.contiguous() for x in (u, f, g, first))
    grid, options = _grid(u, f)
    x, log_a = torch.empty_like(u), torch.empty_like(u, dtype=torch.float32)
    launch(_forward, grid, u, f, g, f_bias, g_bias, steps, first, x, log_a, first.numel(), rate, **options)
    return (x, log_a), ()


def backward(inputs, residuals, gradients, *, rate, steepest):
    u, f, g, f_bias, g_bias, steps, first = inputs
    u, f, g, first, dx, dlog_a = (x.contiguous() for x in (u, f, g, first, *gradients))
    grid, options = _grid(u, f)
    du, df, dg = (torch.empty_like(x) for x in (u, f, g))
    parts = u.new_empty((3, grid[2], options["L"]), dtype=torch.float32)
    given = (u, f, g, f_bias, g_bias, steps, first, dx, dlog_a, du, df, dg, parts)
    launch(_backward, grid, *given, first.numel(), rate, steepest, **options)
    return du, df, dg, *(part.sum(0) for part in parts), None


differentiable = arrays.custom_gradient(forward, backward, outputs=2)


@triton.jit
def _gates(f_RC, g_RC, f_bias_C, g_bias_C, steps_C, rate):
    """(r, i, log a, 1 - a^2)"""
    r_RC, i_RC = tl.sigmoid(f_RC + f_bias_C[None, :]), tl.sigmoid(g_RC + g_bias_C[None, :])
    log_a_RC = -rate * r_RC * steps_C[None, :]
    t_RC = 2 * log_a_RC
    near_RC = 1 + t_RC * (1 / 5 + t_RC * (1 / 30 + t_RC * (1 / 210)))  # 1 - exp(t) by its series, where it would cancel
    near_RC = -t_RC * (1 + t_RC * (1 / 2 + t_RC * (1 / 6 + t_RC * (1 / 24) * near_RC)))
    return r_RC, i_RC, log_a_RC, tl.where(t_RC > -0.5, near_RC, 1 - tl.exp(t_RC))


@triton.jit
def _channels(f_bias, g_bias, steps, J: tl.constexpr, C: tl.constexpr):
    """This program's block, its channels in the block and among all, which there are, and their biases and steps."""
    j_C, head = tl.program_id(0) * C + tl.arange(0, C), tl.program_id(1)
    channel_C, live_C = head * J + j_C, j_C < J
    f_bias_C, g_bias_C = tl.load(f_bias + channel_C, live_C, other=0.0), tl.load(g_bias + channel_C, live_C, other=0.0)
    return head, j_C, channel_C, live_C, f_bias_C, g_bias_C, tl.load(steps + channel_C, live_C, other=0.0)


@triton.jit
def _tile(u, f, g, first, n, N, head, j_C, channel_C, live_C, L: tl.constexpr, J: tl.constexpr, R: tl.constexpr):
    """Of R tokens from n: where they lie among u's and among f's and g's, which there are, u, f, g in float32, and whether a token is a first one."""
    token_R = (n + tl.arange(0, R)).to(tl.int64)
    there = (token_R < N)[:, None] & live_C[None, :]
    place, block = token_R[:, None] * L + channel_C[None, :], (head.to(tl.int64) * N + token_R)[:, None] * J + j_C[None, :]
    u_RC = tl.load(u + place, there, other=0.0).to(tl.float32)
    f_RC, g_RC = tl.load(f + block, there, other=0.0).to(tl.float32), tl.load(g + block, there, other=0.0).to(tl.float32)
    return place, block, there, u_RC, f_RC, g_RC, (tl.load(first + token_R, token_R < N, other=0) != 0)[:, None]


@triton.jit
def _forward(
    u, f, g, f_bias, g_bias, steps, first, x, log_a, N, rate,
    L: tl.constexpr, J: tl.constexpr, R: tl.constexpr, C: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    head, j_C, channel_C, live_C, f_bias_C, g_bias_C, steps_C = _channels(f_bias, g_bias, steps, J, C)
    start = tl.program_id(2) * SPAN
    for n in range(start, min(start + SPAN, N), R):
        place, block, there, u_RC, f_RC, g_RC, first_RC = _tile(u, f, g, first, n, N, head, j_C, channel_C, live_C, L, J, R)
        _, i_RC, log_a_RC, y_RC = _gates(f_RC, g_RC, f_bias_C, g_bias_C, steps_C, rate)
        new_RC = tl.where(first_RC, 1.0, tl.sqrt(y_RC))
        tl.store(x + place, (new_RC * i_RC * u_RC).to(x.dtype.element_ty), there)
        tl.store(log_a + place, log_a_RC, there)


@triton.jit
def _backward(
    u, f, g, f_bias, g_bias, steps, first, dx, dlog_a, du, df, dg, parts, N, rate, steepest,
    L: tl.constexpr, J: tl.constexpr, R: tl.constexpr, C: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    head, j_C, channel_C, live_C, f_bias_C, g_bias_C, steps_C = _channels(f_bias, g_bias, steps, J, C)
    df_RC, dg_RC, dsteps_RC = tl.zeros((R, C), tl.float32), tl.zeros((R, C), tl.float32), tl.zeros((R, C), tl.float32)
    start = tl.program_id(2) * SPAN
    for n in range(start, min(start + SPAN, N), R):
        place, block, there, u_RC, f_RC, g_RC, first_RC = _tile(u, f, g, first, n, N, head, j_C, channel_C, live_C, L, J, R)
        dx_RC, dlog_a_RC = tl.load(dx + place, there, other=0.0).to(tl.float32), tl.load(dlog_a + place, there, other=0.0)
        r_RC, i_RC, log_a_RC, y_RC = _gates(f_RC, g_RC, f_bias_C, g_bias_C, steps_C, rate)
        new_RC = tl.where(first_RC, 1.0, tl.sqrt(y_RC))
        slope_RC = tl.where(first_RC, 0.0, tl.minimum(tl.rsqrt(4 * tl.maximum(y_RC, 1e-30)), steepest))
        dlog_a_RC -= dx_RC * i_RC * u_RC * slope_RC * 2 * (1 - y_RC)
        dgate_RC = dlog_a_RC * (-rate) * steps_C[None, :] * r_RC * (1 - r_RC)
        dinput_RC = dx_RC * new_RC * u_RC * i_RC * (1 - i_RC)
        tl.store(du + place, (dx_RC * new_RC * i_RC).to(du.dtype.element_ty), there)
        tl.store(df + block, dgate_RC.to(df.dtype.element_ty), there)
        tl.store(dg + block, dinput_RC.to(dg.dtype.element_ty), there)
        df_RC, dg_RC, dsteps_RC = df_RC + dgate_RC, dg_RC + dinput_RC, dsteps_RC - dlog_a_RC * rate * r_RC
    part, size = parts + tl.program_id(2).to(tl.int64) * L + channel_C, tl.num_programs(2).to(tl.int64) * L
    tl.store(part, tl.sum(df_RC, 0), live_C)
    tl.store(part + size, tl.sum(dg_RC, 0), live_C)
    tl.store(part + 2 * size, tl.sum(dsteps_RC, 0), live_C)
