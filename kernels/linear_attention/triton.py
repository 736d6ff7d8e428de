"""Linear attention in Triton: a walk over the chunks for the states between them (`walks.py`), then every chunk by itself (`inside.py`).

The backward pass walks the other way for the states' gradients. States between chunks are kept for it, in the inputs' dtype.

Shapes: B batch, T time, H heads, K key size, V value size, N chunks.
"""

from typing import Any

import torch

from kernels import arrays
from kernels.linear_attention import chunked, inside, walks
from kernels.linear_attention.reference import State
from kernels.linear_attention.walks import Gates, chunk_end_gradients, chunk_starts

__all__ = ["chunk_end_gradients", "chunk_starts", "linear_attention"]

Array = Any  # torch.Tensor


CHUNK = 64


def linear_attention(q, k, v, log_decay, beta=None, *, sign=None, scale=1.0, state=None, segments=None) -> tuple[Array, State]:
    """See `kernels.linear_attention.linear_attention`."""
    options = {"sign": sign, "scale": scale, "state": state, "segments": segments, "chunk": CHUNK}
    return chunked.linear_attention(q, k, v, log_decay, beta, **options, run=by_parts)


def by_parts(q, k, v, log_decay, beta, sign, S_BHKV, *, scale, chunk) -> tuple[Array, Array]:
    """`differentiable` with as many values at once as a program of the gradients holds: every column of the state is its own."""
    places = inside.parts(q, k, v)
    if len(places) == 1:
        return differentiable(q, k, v, log_decay, beta, sign, S_BHKV, scale=scale, chunk=chunk)
    run = lambda at: differentiable(q, k, v[..., at], log_decay, beta, sign, S_BHKV[..., at], scale=scale, chunk=chunk)  # noqa: E731
    parts = [run(at) for at in places]
    return tuple(torch.cat(xs, -1) for xs in zip(*parts, strict=True))


def forward(q, k, v, log_decay, beta, sign, S_BHKV, *, scale, chunk):
    dtype = v.dtype
    q, k, v = inside.operands(q, k, v)
    (beta,) = walks.contiguous(beta)
    gates = walks.gates(log_decay, sign, chunk)
    starts, last = walks.walk(k, v, gates, beta, S_BHKV, chunk=chunk, dtype=q.dtype, reverse=False)
    o = inside.read(q, k, v, gates, beta, starts, scale=scale, chunk=chunk)
    return (o.to(dtype), last), (starts, *gates)


def backward(inputs, residuals, gradients, *, scale, chunk):
    q, k, v, log_decay, beta, sign, S_BHKV = inputs
    dtypes = q.dtype, k.dtype, v.dtype
    starts, gates, (do, dlast) = residuals[0], Gates(*residuals[1:]), gradients
    q, k, v, do = inside.operands(q, k, v, do)
    (beta,) = walks.contiguous(beta)
    dends, dS = walks.walk(q, do, gates, None, dlast, chunk=chunk, dtype=q.dtype, reverse=True, scale=scale)
    dq, dk, dv, dlog_decay, dbeta = inside.gradients(q, k, v, do, gates, beta, starts, dends, scale=scale, chunk=chunk)
    dq, dk, dv = (x.to(dtype) for x, dtype in zip((dq, dk, dv), dtypes, strict=True))
    return dq, dk, dv, dlog_decay, dbeta, None, dS


differentiable = arrays.custom_gradient(forward, backward, outputs=2)
