"""mLSTM in Triton: linear attention whose gates are relative to the running maximum m, with one more column of values, ones, for n.

With m known, C_t = exp(log_decay_t + m_{t-1} - m_t) C_{t-1} + exp(log_input_t - m_t) k_t v_t^T is `kernels.linear_attention` with a decay
and a write strength of at most 1; m is a constant to the gradient. The normaliser n . q is read, and o divided, in the same kernel.

Shapes: B batch, T time, H heads, K key size, V value size, N chunks.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kernels import arrays
from kernels.launch import divide_up, launch
from kernels.linear_attention import inside, walks
from kernels.linear_attention.inside import Normaliser, NormaliserGradient, operands
from kernels.linear_attention.triton import CHUNK
from kernels.linear_attention.walks import Column, Gates, contiguous, tile
from kernels.mlstm import chunked
from kernels.mlstm.reference import NOTHING, State

Array = Any  # torch.Tensor


def mlstm(q, k, v, log_input, log_decay, *, state=None, segments=None) -> tuple[Array, State]:
    """See `kernels.mlstm.mlstm`."""
    return chunked.mlstm(q, k, v, log_input, log_decay, state=state, segments=segments, chunk=CHUNK, run=by_parts)


def by_parts(q, k, v, log_input, log_decay, C_BHKV, n_BHK, m_BH, *, chunk) -> tuple[Array, ...]:
    """`differentiable` with as many values at once as a program of the gradients holds; n and m are the same for each part."""
    places = inside.parts(q, k, v)
    if len(places) == 1:
        return differentiable(q, k, v, log_input, log_decay, C_BHKV, n_BHK, m_BH, chunk=chunk)
    run = lambda at: differentiable(q, k, v[..., at], log_input, log_decay, C_BHKV[..., at], n_BHK, m_BH, chunk=chunk)  # noqa: E731
    parts = [run(at) for at in places]
    return (*(torch.cat(xs, -1) for xs in zip(*[part[:2] for part in parts], strict=True)), *parts[0][2:])


def forward(q, k, v, log_input, log_decay, C_BHKV, n_BHK, m_BH, *, chunk):
    dtype = v.dtype
    q, k, v = operands(q, k, v)
    m_BTH, log_keep_BTH, write_BTH, m_BH = relative(log_input, log_decay, m_BH)
    gates = walks.gates(log_keep_BTH, None, chunk)
    options = {"chunk": chunk, "dtype": q.dtype, "reverse": False, "column": Column(write_BTH, n_BHK.contiguous())}
    starts, C, n_starts, n = walks.walk(k, v, gates, write_BTH, C_BHKV, **options)
    o, lost, weight = inside.read(q, k, v, gates, write_BTH, starts, scale=1.0, chunk=chunk, normaliser=Normaliser(n_starts, m_BTH))
    return (o.to(dtype), C, n, m_BH), (starts, n_starts, *gates, write_BTH, m_BTH, weight, *(() if lost is None else (lost,)))


def backward(inputs, residuals, gradients, *, chunk):
    q, k, v = inputs[:3]
    dtypes = q.dtype, k.dtype, v.dtype
    o, starts, n_starts, sums, tags, firsts, write_BTH, m_BTH, weight, *lost = residuals
    gates, (do, dC, dn, _) = Gates(sums, tags, firsts), gradients
    q, k, v, do, o = operands(q, k, v, do, o)
    factor, dweight = normaliser_gradients(do, o, *(lost or [None]), weight, m_BTH)
    column = Column(dweight, dn.contiguous())
    dends, dC, dn_ends, dn = walks.walk(q, do, gates, factor, dC, chunk=chunk, dtype=q.dtype, reverse=True, column=column)
    normaliser = NormaliserGradient(factor, dweight, n_starts, dn_ends)
    options = {"scale": 1.0, "chunk": chunk, "normaliser": normaliser}
    dq, dk, dv, dlog_decay, dwrite = inside.gradients(q, k, v, do, gates, write_BTH, starts, dends, **options)
    dq, dk, dv = (x.to(dtype) for x, dtype in zip((dq, dk, dv), dtypes, strict=True))
    return dq, dk, dv, dwrite * write_BTH, dlog_decay, dC, dn, None


differentiable = arrays.custom_gradient(forward, backward, outputs=4, saved=1)


def relative(log_input_BTH: torch.Tensor, log_decay_BTH: torch.Tensor, m_BH: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(m [B, T, H], log_decay_t + m_{t-1} - m_t, exp(log_input_t - m_t), the last m [B, H]) for m_t = max(log_decay_t + m_{t-1}, log_input_t),
    at least `NOTHING`."""
    log_input_BTH, log_decay_BTH, m_BH = contiguous(log_input_BTH, log_decay_BTH, m_BH)
    B, T, H = log_input_BTH.shape
    m_BTH, log_keep_BTH, write_BTH, last_BH = (torch.empty_like(x) for x in (*[log_input_BTH] * 3, m_BH))
    given = (log_input_BTH, log_decay_BTH, m_BH, m_BTH, log_keep_BTH, write_BTH, last_BH, T)
    launch(_relative, (B * H,), *given, H=H, L=tile(T, 512), NOTHING=NOTHING)
    return m_BTH, log_keep_BTH, write_BTH, last_BH


def normaliser_gradients(do_BTHV, o_BTHV, lost_BTHV, weight_BTH, m_BTH) -> tuple[torch.Tensor, torch.Tensor]:
    """(each token's factor of do, the gradient of weight = n . q), both [B, T, H], for o = read / max(|weight|, exp(-m)).

    lost: what o's rounding to bfloat16 lost, or None; where |weight| is least, do . o is large and without it 2e-2 off.
    """
    *rows, V = do_BTHV.shape
    factor, dweight = torch.empty_like(weight_BTH), torch.empty_like(weight_BTH)
    tokens = weight_BTH.numel()
    launch(
        _normaliser_gradients,
        (divide_up(tokens, 32),),
        *(do_BTHV, o_BTHV, lost_BTHV, weight_BTH, m_BTH, factor, dweight, tokens),
        **{"V": V, "BV": tile(V, 256), "L": 32},
    )
    return factor, dweight


@triton.jit
def _later(sum_a, m_a, sum_b, m_b):
    return sum_a + sum_b, tl.maximum(m_a + sum_b, m_b)


@triton.jit
def _relative(
    log_input, log_decay, m_first, m, log_keep, write, m_last, T, H: tl.constexpr, L: tl.constexpr, NOTHING: tl.constexpr
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    row = head // H * T * H + head % H
    m_before = tl.load(m_first + head)
    for first in range(0, T, L):
        t_L = first + tl.arange(0, L)
        place_L, inside_L = row + t_L * H, t_L < T
        log_decay_L = tl.load(log_decay + place_L, mask=inside_L, other=0.0)
        log_input_L = tl.load(log_input + place_L, mask=inside_L, other=-float("inf"))
        sum_L, m_L = tl.associative_scan((log_decay_L, log_input_L), 0, _later)
        m_L = tl.maximum(tl.maximum(m_L, sum_L + m_before), NOTHING)
        tl.store(m + place_L, m_L, mask=inside_L)
        tl.debug_barrier()  # the token before is another thread's
        before_L = tl.load(m + place_L - H, mask=inside_L & (t_L > first), other=0.0)
        before_L = tl.where(t_L > first, before_L, m_before)
        tl.store(log_keep + place_L, log_decay_L + (before_L - m_L), mask=inside_L)
        tl.store(write + place_L, tl.exp(log_input_L - m_L), mask=inside_L)
        m_before = tl.sum(tl.where(tl.arange(0, L) == L - 1, m_L, 0.0), 0)
    tl.store(m_last + head, m_before)


@triton.jit
def _normaliser_gradients(do, o, lost, weight, m, factor, dweight, tokens, V: tl.constexpr, BV: tl.constexpr, L: tl.constexpr):
    row_L, v_V = tl.program_id(0).to(tl.int64) * L + tl.arange(0, L), tl.arange(0, BV)
    place_LV, inside_LV = row_L[:, None] * V + v_V[None, :], (row_L < tokens)[:, None] & (v_V < V)[None, :]
    do_LV, o_LV = tl.load(do + place_LV, mask=inside_LV, other=0.0), tl.load(o + place_LV, mask=inside_LV, other=0.0).to(tl.float32)
    if lost is not None:
        o_LV += tl.load(lost + place_LV, mask=inside_LV, other=0.0).to(tl.float32)
    weight_L, m_L = tl.load(weight + row_L, mask=row_L < tokens, other=0.0), tl.load(m + row_L, mask=row_L < tokens, other=0.0)
    floor_L = tl.exp(-m_L)
    factor_L = 1 / tl.maximum(tl.abs(weight_L), floor_L)
    slope_L = tl.where(tl.abs(weight_L) < floor_L, 0.0, tl.where(weight_L < 0, factor_L, -factor_L))
    tl.store(factor + row_L, factor_L, mask=row_L < tokens)
    tl.store(dweight + row_L, slope_L * tl.sum(do_LV.to(tl.float32) * o_LV, 1), mask=row_L < tokens)
