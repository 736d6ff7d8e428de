"""The real-gated linear recurrent unit for TPUs: time along sublanes, channels along lanes; all tokens of a tile at once, tiles in order.

With y_t = a_t dx_t the gradient is the same recurrence backwards, y_t = a_t (dh_t + y_{t+1}), and

    dx_t = dh_t + y_{t+1}        dlog_a_t = dx_t (a_t h_{t-1})        dstate = y_1

Shapes: B batch, T time, D channels, G = B x (D / W), N chunks, C chunk length, W channels of a program, R tokens of a tile.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels import arrays, mosaic
from kernels.mosaic import Block, new
from kernels.rg_lru import chunked
from kernels.rg_lru.reference import State

Array = Any  # jax.Array
TILE = 16
"""Tokens in one tile of bfloat16."""
CHUNK = 256
"""Tokens of a program: 256 x 512 numbers of each array."""
LANES = 128


def rg_lru(x, log_a, *, state=None, segments=None) -> tuple[Array, State]:
    """See `kernels.rg_lru.rg_lru`."""
    return chunked.rg_lru(x, log_a, state=state, segments=segments, run=differentiable)


def forward(x, log_a, h_BD):
    (B, T, D), f32 = x.shape, jnp.float32
    cut = _Cut(B, T, D)
    chunk, row = cut.chunk, cut.row
    outputs = [chunk(new(cut.shape, x.dtype)), chunk(new(cut.shape, f32)), row(new(cut.ends, f32))]
    inputs = [chunk(cut.pad(x)), chunk(cut.pad(log_a)), row(cut.pad_ends(h_BD))]
    h, kept, last = cut.launch(_forward, inputs, outputs, like=x)
    return (h[:, :T, :D], last[:, 0, :D]), (kept,)


def backward(inputs, residuals, gradients):
    x, log_a, h_BD = inputs
    (kept,), (dh, dlast) = residuals, gradients
    (B, T, D), f32 = x.shape, jnp.float32
    cut = _Cut(B, T, D)
    chunk, row = cut.chunk, cut.row
    outputs = [chunk(new(cut.shape, x.dtype)), chunk(new(cut.shape, f32)), row(new(cut.ends, f32))]
    given = [chunk(cut.pad(log_a)), chunk(kept), chunk(cut.pad(dh)), row(cut.pad_ends(dlast))]
    dx, dlog_a, dstate = cut.launch(_backward, given, outputs, like=x, reverse=True)
    return dx[:, :T, :D], dlog_a[:, :T, :D], dstate[:, 0, :D]


differentiable = arrays.custom_gradient(forward, backward, outputs=2)


class _Cut:
    """How [B, T, D] is cut: whole chunks and whole lanes; the padding keeps the state (log_a = 0, x = 0)."""

    def __init__(self, B: int, T: int, D: int) -> None:
        self.C = min(CHUNK, -(-T // TILE) * TILE)
        N, lanes = -(-T // self.C), -(-D // LANES)
        self.W = LANES * next(n for n in (4, 3, 2, 1) if lanes % n == 0)
        self.shape, self.ends = (B, N * self.C, lanes * LANES), (B, 1, lanes * LANES)
        self.grid, self.across = (B * lanes * LANES // self.W, N), lanes * LANES // self.W

    def chunk(self, x: Any) -> Block:
        return Block(x, (None, self.C, self.W), lambda g, n: (jax.lax.div(g, self.across), n, jax.lax.rem(g, self.across)))

    def row(self, x: Any) -> Block:
        return Block(x, (None, 1, self.W), lambda g, n: (jax.lax.div(g, self.across), 0, jax.lax.rem(g, self.across)))

    def pad(self, x_BTD: Array) -> Array:
        B, T, D = x_BTD.shape
        return jnp.pad(x_BTD, ((0, 0), (0, self.shape[1] - T), (0, self.shape[2] - D)))

    def pad_ends(self, x_BD: Array) -> Array:
        return jnp.pad(x_BD, ((0, 0), (0, self.shape[2] - x_BD.shape[1])))[:, None]

    def launch(self, kernel: Any, inputs: list[Block], outputs: list[Block], **options: Any) -> list[Array]:
        numbers = self.C * self.W
        return mosaic.launch(kernel, *self.grid, inputs, outputs, products=10 * numbers, exponentials=numbers, **options)


def _forward(x_ref, log_a_ref, start_ref, h_ref, kept_ref, last_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        last_ref[:] = start_ref[:]

    def tile(i: Array, h_1W: Array) -> Array:
        where = pl.ds(pl.multiple_of(i * TILE, TILE), TILE)
        a, x = jnp.exp(log_a_ref[where, :]), x_ref[where, :].astype(jnp.float32)
        h = _scan(a, x, h_1W, ahead=1)
        h_ref[where, :] = h.astype(h_ref.dtype)
        kept_ref[where, :] = a * _shift(h, h_1W, 1)
        return h[TILE - 1 :, :]

    last_ref[:] = jax.lax.fori_loop(0, x_ref.shape[0] // TILE, tile, last_ref[:])


def _backward(log_a_ref, kept_ref, dh_ref, dlast_ref, dx_ref, dlog_a_ref, dstate_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        dstate_ref[:] = dlast_ref[:]

    tiles = dh_ref.shape[0] // TILE

    def tile(i: Array, y_1W: Array) -> Array:
        where = pl.ds(pl.multiple_of((tiles - 1 - i) * TILE, TILE), TILE)
        a, dh = jnp.exp(log_a_ref[where, :]), dh_ref[where, :].astype(jnp.float32)
        y = _scan(a, a * dh, y_1W, ahead=-1)
        dx = dh + _shift(y, y_1W, -1)
        dx_ref[where, :] = dx.astype(dx_ref.dtype)
        dlog_a_ref[where, :] = dx * kept_ref[where, :]
        return y[:1, :]

    dstate_ref[:] = jax.lax.fori_loop(0, tiles, tile, dstate_ref[:])


def _scan(a_RW: Array, x_RW: Array, start_1W: Array, *, ahead: int) -> Array:
    """h_t = a_t h_{t-1} + x_t over a tile from h = start, by doubling; ahead=-1: h_t = a_t h_{t+1} + x_t."""
    reach = 1
    while reach < TILE:
        a_before = _shift(a_RW, jnp.ones_like(start_1W), ahead * reach)
        x_RW = x_RW + a_RW * _shift(x_RW, jnp.zeros_like(start_1W), ahead * reach)
        a_RW = a_RW * a_before
        reach *= 2
    return x_RW + a_RW * start_1W


def _shift(x_RW: Array, fill_1W: Array, by: int) -> Array:
    """Every token's entry `by` tokens before it (after it for a negative one), `fill` where there is none."""
    R = x_RW.shape[0]
    place = jax.lax.broadcasted_iota(jnp.int32, x_RW.shape, 0)
    inside = place >= by if by > 0 else place < R + by
    return jnp.where(inside, pltpu.roll(x_RW, by % R, 0), fill_1W)
