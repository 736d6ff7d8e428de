"""The recurrence and its gradient in Triton, each one pass over time: a program has a few channels of one sequence, and their state in registers.

    h_t = a_t h_{t-1} + x_t        dx_t = dh_t + a_{t+1} dx_{t+1}        dlog_a_t = dx_t a_t h_{t-1},  h_{t-1} as it was returned

Tokens come in tiles; a thread has all tokens of its channels, so that the scan over a tile is a loop in registers, and the next tile is
on its way meanwhile. A decay of exactly 0 takes nothing from what is behind it, be that NaN or infinite.

Shapes: B batch, T time, D channels; tiles of C tokens and a block of channels.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kernels import arrays
from kernels.launch import divide_up, launch
from kernels.rg_lru import chunked
from kernels.rg_lru.reference import State

CHANNELS = 32
TOKENS, STAGES, WARPS = 128, 3, 4
RESIDENT = 264
"""Backward programs with whole tiles that an H200 has at once."""


def rg_lru(x: Any, log_a: Any, *, state: State | None = None, segments: Any = None) -> tuple[Any, State]:
    """See `kernels.rg_lru.rg_lru`."""
    return chunked.rg_lru(x, log_a, state=state, segments=segments, run=differentiable)


def forward(x, log_a, h_BD):
    B, T, D = x.shape
    x, log_a, h_BD = x.contiguous(), log_a.contiguous(), h_BD.contiguous()
    out, last = torch.empty_like(x), torch.empty_like(h_BD)
    launch(_forward, (divide_up(D, CHANNELS), B), x, log_a, h_BD, out, last, T, D, C=TOKENS, BLOCK=CHANNELS, STAGES=STAGES, warps=WARPS)
    return (out, last), ()


def backward(inputs, residuals, gradients):
    x, log_a, h_BD = inputs
    (out,), (dout, dlast) = residuals, gradients
    B, T, D = x.shape
    given = tuple(y.contiguous() for y in (dout, dlast, log_a, out, h_BD))
    dx, dlog_a, dh_BD = (torch.empty_like(y) for y in (given[3], *given[2::2]))
    grid = (divide_up(D, CHANNELS), B)
    few_wait = RESIDENT < grid[0] * B <= 1.5 * RESIDENT  # with half a tile, all of them fit at once
    C = TOKENS // 2 if few_wait else TOKENS
    launch(_backward, grid, *given, dx, dlog_a, dh_BD, T, D, C=C, BLOCK=CHANNELS, STAGES=STAGES, warps=WARPS)
    return dx, dlog_a, dh_BD


differentiable = arrays.custom_gradient(forward, backward, outputs=2, saved=1)


@triton.jit
def _after(a_1, x_1, a_2, x_2):
    """h -> a_1 h + x_1, then h -> a_2 h + x_2."""
    return a_1 * a_2, tl.where(a_2 == 0, x_2, a_2 * x_1 + x_2)


@triton.jit
def _walk(a_CD, x_CD, h_D):
    """(h_CD, the last of them) from h behind the tile's first row on."""
    row = tl.arange(0, a_CD.shape[0])[:, None]
    x_CD += tl.where((row == 0) & (a_CD != 0), a_CD * h_D[None, :], 0.0)
    _, h_CD = tl.associative_scan((a_CD, x_CD), 0, _after)
    return h_CD, tl.sum(tl.where(row == a_CD.shape[0] - 1, h_CD, 0.0), 0)


@triton.jit
def _forward(x, log_a, start, out, last, T, D, C: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    batch = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, C)[:, None]
    place = row * D + channel[None, :]
    inside = (channel < D)[None, :]
    h = tl.load(start + batch * D + channel, channel < D, other=0.0)
    for t in tl.range(0, T, C, num_stages=STAGES):
        tile, mask = (batch * T + t) * D, inside & (row < T - t)
        x_CD = tl.load(x + tile + place, mask, other=0.0)
        log_a_CD = tl.load(log_a + tile + place, mask, other=0.0)  # past the end x is 0 and a 1, which keep h
        h_CD, h = _walk(tl.exp(log_a_CD), x_CD.to(tl.float32), h)
        tl.store(out + tile + place, h_CD.to(out.dtype.element_ty), mask)
    tl.store(last + batch * D + channel, h, channel < D)


@triton.jit
def _backward(dout, dlast, log_a, out, start, dx, dlog_a, dstart, T, D, C: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    batch = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (channel < D)[None, :]
    g = tl.load(dlast + batch * D + channel, channel < D, other=0.0)
    h_0 = tl.load(start + batch * D + channel, channel < D, other=0.0)
    into_0 = h_0
    last = (T - 1) // C * C
    row = C - 1 - tl.arange(0, C)[:, None]  # time runs backwards
    place = row * D + channel[None, :]
    for passed in tl.range(0, T, C, num_stages=STAGES):
        t = last - passed
        tile, mask = (batch * T + t) * D, inside & (row < T - t)
        g_CD = tl.load(dout + tile + place, mask, other=0.0).to(tl.float32)
        log_a_CD = tl.load(log_a + tile + place, mask, other=0.0)
        log_a1_CD = tl.load(log_a + tile + D + place, inside & (row < T - t - 1), other=0.0)
        h_CD = tl.load(out + tile - D + place, mask & (row + t > 0), other=0.0).to(tl.float32)
        g_CD, g = _walk(tl.exp(log_a1_CD), g_CD, g)
        a_CD = tl.exp(log_a_CD)
        through_CD = tl.where(a_CD != 0, a_CD * g_CD, 0.0)
        h_CD = tl.where(row + t == 0, h_0[None, :], h_CD)
        tl.store(dx + tile + place, g_CD.to(dx.dtype.element_ty), mask)
        tl.store(dlog_a + tile + place, tl.where(a_CD != 0, through_CD * h_CD, 0.0), mask)
        into_0 = tl.sum(tl.where(row == 0, through_CD, 0.0), 0)
    tl.store(dstart + batch * D + channel, into_0, channel < D)
