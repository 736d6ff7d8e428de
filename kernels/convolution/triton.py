"""The short convolution and what follows it in Triton, one pass forward and one back: a warp has some channels of a span of tokens, and goes
through them four at a time with the window in registers.

    z_t = bias + sum_j w_j x_{t-3+j}        y = silu(z)        out = y r,  r = (sum over a head of y^2 + eps^2)^(-1/2)
    dy  = r (dout - out (out . dout))       dz = dy silu'(z)   dx_s = sum_j w_j dz_{s+3-j}        dw_j = sum_t dz_t x_{t-3+j}

Backward computes z again, also of the three tokens behind its span. The weights' gradients are summed over a span in registers, over spans
and sequences afterwards. Windows shorter than four have zeros in front. With `segments` this is the array form.

Shapes: B batch, T time, D channels, W window, S spans; a program has a tile of G heads by K channels.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kernels import arrays
from kernels.convolution import chunked
from kernels.convolution.chunked import EPSILON, State
from kernels.launch import divide_up, launch
from kernels.tiles import prefetch_lines, sigmoid

SPAN, CHANNELS = 64, 256


def short_convolution(x, weight, bias=None, *, silu=False, heads=None, state=None, segments=None) -> tuple[Any, State]:
    """See `kernels.convolution.short_convolution`."""
    if segments is not None:
        return chunked.short_convolution(x, weight, bias, silu=silu, heads=heads, state=state, segments=segments)
    past = None if state is None else state.inputs_BWD.to(x.dtype)
    (out,) = differentiable(x, weight, bias, past, silu=silu, heads=heads)
    return out, chunked.state_after(x, weight.shape[0], state)


def _plain(*given):
    return tuple(None if y is None else y.contiguous() for y in given)


def _tiles(x, weight, silu, heads):
    """The grid of programs and what they are compiled for."""
    B, T, D = x.shape
    size = CHANNELS if heads is None else D // heads
    K = triton.next_power_of_2(size)
    G = 1 if heads is None else max(1, CHANNELS // K)
    options = {
        "W": weight.shape[0],
        "SILU": silu,
        "NORM": heads is not None,
        "EPSILON": EPSILON,
        "SIZE": size,
        "SPAN": SPAN,
        "G": G,
        "K": K,
    }
    return (divide_up(D, G * size), divide_up(T, SPAN), B), options


def forward(x, weight, bias, past, *, silu, heads):
    grid, options = _tiles(x, weight, silu, heads)
    x, past, weight, bias = _plain(x, past, weight, bias)
    out = torch.empty_like(x)
    launch(_forward, grid, x, past, weight, bias, out, x.shape[1], x.shape[2], **options, warps=1)
    return (out,), ()


def backward(inputs, residuals, gradients, *, silu, heads):
    x, weight, bias, past = inputs
    (dout,) = gradients
    B, T, D = x.shape
    grid, options = _tiles(x, weight, silu, heads)
    x, past, weight, bias, dout = _plain(x, past, weight, bias, dout)
    dx = torch.empty_like(x)
    dpast = None if past is None else torch.empty_like(past)
    parts = x.new_empty((B * grid[1], 5, D), dtype=torch.float32)
    launch(_backward, grid, x, past, weight, bias, dout, dx, dpast, parts, T, D, **options, warps=1)
    dbias = None if bias is None else parts[:, 4].sum(0).to(bias.dtype)
    return dx, parts[:, 4 - len(weight) : 4].sum(0).to(weight.dtype), dbias, dpast


differentiable = arrays.custom_gradient(forward, backward, outputs=1)


@triton.jit
def _tile(D, SIZE: tl.constexpr, G: tl.constexpr, K: tl.constexpr):
    """(channel_GK, live_GK) of this program."""
    head, k = tl.program_id(0) * G + tl.arange(0, G)[:, None], tl.arange(0, K)[None, :]
    channel = head * SIZE + k
    return channel, (k < SIZE) & (channel < D)


@triton.jit
def _before(x, past, batch, T, t, D, channel, live, W: tl.constexpr):
    """The input of token t of a sequence, which for t < 0 is the state's."""
    value = tl.load(x + (batch * T + t) * D + channel, live & (t >= 0), other=0.0).to(tl.float32)
    if past is not None:
        value += tl.load(past + (batch * (W - 1) + t + W - 1) * D + channel, live & (t < 0) & (t + W - 1 >= 0), other=0.0).to(tl.float32)
    return value


@triton.jit
def _weights(weight, bias, D, channel, live, W: tl.constexpr):
    """The last four weights, zeros in front, and the bias."""
    w_0 = tl.load(weight + (W - 4) * D + channel, live & (W >= 4), other=0.0).to(tl.float32)
    w_1 = tl.load(weight + (W - 3) * D + channel, live & (W >= 3), other=0.0).to(tl.float32)
    w_2 = tl.load(weight + (W - 2) * D + channel, live & (W >= 2), other=0.0).to(tl.float32)
    w_3 = tl.load(weight + (W - 1) * D + channel, live, other=0.0).to(tl.float32)
    b = tl.zeros_like(w_3)
    if bias is not None:
        b = tl.load(bias + channel, live, other=0.0).to(tl.float32)
    return w_0, w_1, w_2, w_3, b


@triton.jit
def _activate(z, SILU: tl.constexpr, NORM: tl.constexpr, EPSILON: tl.constexpr):
    if SILU:
        z *= sigmoid(z)
    if NORM:
        z *= tl.rsqrt(tl.sum(z * z, 1) + EPSILON * EPSILON)[:, None]
    return z


@triton.jit
def _activate_back(z, dout, SILU: tl.constexpr, NORM: tl.constexpr, EPSILON: tl.constexpr):
    y = z
    if SILU:
        s = sigmoid(z)
        y = z * s
    if NORM:
        r_G = tl.rsqrt(tl.sum(y * y, 1) + EPSILON * EPSILON)
        along_G = r_G * r_G * r_G * tl.sum(y * dout, 1)
        dout = r_G[:, None] * dout - along_G[:, None] * y
    if SILU:
        dout *= s + y * (1 - s)
    return dout


@triton.jit
def _forward(
    x, past, weight, bias, out, T, D,
    W: tl.constexpr, SILU: tl.constexpr, NORM: tl.constexpr, EPSILON: tl.constexpr, SIZE: tl.constexpr, SPAN: tl.constexpr, G: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    channel, live = _tile(D, SIZE, G, K)
    batch = tl.program_id(2).to(tl.int64)
    first = tl.program_id(1) * SPAN
    w_0, w_1, w_2, w_3, b = _weights(weight, bias, D, channel, live, W)
    a_0 = _before(x, past, batch, T, first - 3, D, channel, live, W)
    a_1 = _before(x, past, batch, T, first - 2, D, channel, live, W)
    a_2 = _before(x, past, batch, T, first - 1, D, channel, live, W)
    for t in range(first, min(first + SPAN, T), 4):
        row = x + (batch * T + t) * D + channel
        x_0 = tl.load(row, live, other=0.0)
        x_1 = tl.load(row + D, live & (t + 1 < T), other=0.0)
        x_2 = tl.load(row + 2 * D, live & (t + 2 < T), other=0.0)
        x_3 = tl.load(row + 3 * D, live & (t + 3 < T), other=0.0)
        x_0, x_1, x_2, x_3 = x_0.to(tl.float32), x_1.to(tl.float32), x_2.to(tl.float32), x_3.to(tl.float32)
        y_0 = _activate(b + w_0 * a_0 + w_1 * a_1 + w_2 * a_2 + w_3 * x_0, SILU, NORM, EPSILON)
        y_1 = _activate(b + w_0 * a_1 + w_1 * a_2 + w_2 * x_0 + w_3 * x_1, SILU, NORM, EPSILON)
        y_2 = _activate(b + w_0 * a_2 + w_1 * x_0 + w_2 * x_1 + w_3 * x_2, SILU, NORM, EPSILON)
        y_3 = _activate(b + w_0 * x_0 + w_1 * x_1 + w_2 * x_2 + w_3 * x_3, SILU, NORM, EPSILON)
        to = out + (batch * T + t) * D + channel
        tl.store(to, y_0.to(out.dtype.element_ty), live)
        tl.store(to + D, y_1.to(out.dtype.element_ty), live & (t + 1 < T))
        tl.store(to + 2 * D, y_2.to(out.dtype.element_ty), live & (t + 2 < T))
        tl.store(to + 3 * D, y_3.to(out.dtype.element_ty), live & (t + 3 < T))
        a_0, a_1, a_2 = x_1, x_2, x_3


@triton.jit
def _ask(x, batch, T, t, D, SIZE: tl.constexpr, G: tl.constexpr, K: tl.constexpr):
    """Have four tokens' channels of this program brought into the second cache: there are not the registers to load them early."""
    LINE: tl.constexpr = 1024 // x.dtype.element_ty.primitive_bitwidth  # elements
    LINES: tl.constexpr = (G * K + LINE - 1) // LINE
    i = tl.arange(0, 4 * LINES)
    channel = tl.program_id(0) * G * SIZE + i % LINES * LINE
    prefetch_lines(x + (batch * T + tl.minimum(t + i // LINES, T - 1)) * D + tl.minimum(channel, D - 1))


@triton.jit
def _give(value, dx, dpast, batch, T, s, first, last, D, channel, live, W: tl.constexpr):
    """The gradient of the input of token s, where it is this span's or the state's."""
    tl.store(dx + (batch * T + s) * D + channel, value.to(dx.dtype.element_ty), live & (s >= first) & (s < last))
    if dpast is not None:
        tl.store(
            dpast + (batch * (W - 1) + s + W - 1) * D + channel,
            value.to(dpast.dtype.element_ty),
            live & (first == 0) & (s < 0) & (s + W - 1 >= 0),
        )


@triton.jit
def _backward(
    x, past, weight, bias, dout, dx, dpast, parts, T, D,
    W: tl.constexpr, SILU: tl.constexpr, NORM: tl.constexpr, EPSILON: tl.constexpr, SIZE: tl.constexpr, SPAN: tl.constexpr, G: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    channel, live = _tile(D, SIZE, G, K)
    batch = tl.program_id(2).to(tl.int64)
    first = tl.program_id(1) * SPAN
    last = min(first + SPAN, T)
    w_0, w_1, w_2, w_3, b = _weights(weight, bias, D, channel, live, W)
    a_0 = _before(x, past, batch, T, first - 3, D, channel, live, W)
    a_1 = _before(x, past, batch, T, first - 2, D, channel, live, W)
    a_2 = _before(x, past, batch, T, first - 1, D, channel, live, W)
    c_0, c_1, c_2 = tl.zeros_like(w_0), tl.zeros_like(w_0), tl.zeros_like(w_0)  # dz of the three tokens before
    dw_0, dw_1, dw_2, dw_3, db = tl.zeros_like(w_0), tl.zeros_like(w_0), tl.zeros_like(w_0), tl.zeros_like(w_0), tl.zeros_like(w_0)
    for t in range(first, last + 3, 4):
        _ask(x, batch, T, t + 4, D, SIZE, G, K)
        _ask(dout, batch, T, t + 4, D, SIZE, G, K)
        place = (batch * T + t) * D + channel
        row, g_row = x + place, dout + place
        x_0 = tl.load(row, live & (t < T), other=0.0)
        x_1 = tl.load(row + D, live & (t + 1 < T), other=0.0)
        x_2 = tl.load(row + 2 * D, live & (t + 2 < T), other=0.0)
        x_3 = tl.load(row + 3 * D, live & (t + 3 < T), other=0.0)
        g_0 = tl.load(g_row, live & (t < T), other=0.0)
        g_1 = tl.load(g_row + D, live & (t + 1 < T), other=0.0)
        g_2 = tl.load(g_row + 2 * D, live & (t + 2 < T), other=0.0)
        g_3 = tl.load(g_row + 3 * D, live & (t + 3 < T), other=0.0)
        x_0, x_1, x_2, x_3 = x_0.to(tl.float32), x_1.to(tl.float32), x_2.to(tl.float32), x_3.to(tl.float32)
        d_0 = _activate_back(b + w_0 * a_0 + w_1 * a_1 + w_2 * a_2 + w_3 * x_0, g_0.to(tl.float32), SILU, NORM, EPSILON)
        _give(w_0 * d_0 + w_1 * c_2 + w_2 * c_1 + w_3 * c_0, dx, dpast, batch, T, t - 3, first, last, D, channel, live, W)
        d_1 = _activate_back(b + w_0 * a_1 + w_1 * a_2 + w_2 * x_0 + w_3 * x_1, g_1.to(tl.float32), SILU, NORM, EPSILON)
        _give(w_0 * d_1 + w_1 * d_0 + w_2 * c_2 + w_3 * c_1, dx, dpast, batch, T, t - 2, first, last, D, channel, live, W)
        d_2 = _activate_back(b + w_0 * a_2 + w_1 * x_0 + w_2 * x_1 + w_3 * x_2, g_2.to(tl.float32), SILU, NORM, EPSILON)
        _give(w_0 * d_2 + w_1 * d_1 + w_2 * d_0 + w_3 * c_2, dx, dpast, batch, T, t - 1, first, last, D, channel, live, W)
        d_3 = _activate_back(b + w_0 * x_0 + w_1 * x_1 + w_2 * x_2 + w_3 * x_3, g_3.to(tl.float32), SILU, NORM, EPSILON)
        _give(w_0 * d_3 + w_1 * d_2 + w_2 * d_1 + w_3 * d_0, dx, dpast, batch, T, t, first, last, D, channel, live, W)
        if t < last:
            dw_0 = dw_0 + a_0 * d_0 + a_1 * d_1 + a_2 * d_2 + x_0 * d_3
            dw_1 = dw_1 + a_1 * d_0 + a_2 * d_1 + x_0 * d_2 + x_1 * d_3
            dw_2 = dw_2 + a_2 * d_0 + x_0 * d_1 + x_1 * d_2 + x_2 * d_3
            dw_3 = dw_3 + x_0 * d_0 + x_1 * d_1 + x_2 * d_2 + x_3 * d_3
            if bias is not None:
                db += d_0 + d_1 + d_2 + d_3
        a_0, a_1, a_2 = x_1, x_2, x_3
        c_0, c_1, c_2 = d_1, d_2, d_3
    part = parts + (batch * tl.num_programs(1) + tl.program_id(1)) * 5 * D + channel
    tl.store(part, dw_0, live)
    tl.store(part + D, dw_1, live)
    tl.store(part + 2 * D, dw_2, live)
    tl.store(part + 3 * D, dw_3, live)
    if bias is not None:
        tl.store(part + 4 * D, db, live)
