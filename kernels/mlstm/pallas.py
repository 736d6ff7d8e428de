"""mLSTM for TPUs: linear attention's kernel, with gates relative to the running maximum m and one more column of values, ones, for n.

With m known, C_t = exp(log_decay_t + m_{t-1} - m_t) C_{t-1} + exp(log_input_t - m_t) k_t v_t^T has a decay and a write strength of at most 1;
m is a constant to the gradient.

Shapes: B batch, T time, H heads, K key size, V value size, X = V + 1.
"""

from typing import Any

import jax
import jax.numpy as jnp

from kernels import mosaic
from kernels.linear_attention import pallas as linear
from kernels.mlstm import chunked
from kernels.mlstm.reference import NOTHING, State, normalised

Array = Any  # jax.Array


def mlstm(q, k, v, log_input, log_decay, *, state=None, segments=None, chunk: int | None = None) -> tuple[Array, State]:
    """See `kernels.mlstm.mlstm`; `chunk` is the chunk's length."""
    options = {"state": state, "segments": segments, "chunk": chunk or mosaic.chunk_length(q.shape[1])}
    return chunked.mlstm(q, k, v, log_input, log_decay, **options, run=through_linear_attention)


def through_linear_attention(q, k, v, log_input, log_decay, C_BHKV, n_BHK, m_BH, *, chunk) -> tuple[Array, Array, Array, Array]:
    """(o, and C, n and m after the last token)"""
    V = v.shape[-1]
    m_BTH = jax.lax.stop_gradient(maxima(log_input, log_decay, m_BH))
    before_BTH = jnp.concatenate((m_BH[:, None], m_BTH[:, :-1]), 1)
    values = jnp.pad(
        v.astype(jnp.float32), ((0, 0), (0, 0), (0, 0), (0, 1)), constant_values=1.0
    )  # float32, for what is read is not rounded
    S_BHKX = jnp.concatenate((C_BHKV, n_BHK[..., None]), -1)
    gates = log_decay + (before_BTH - m_BTH), jnp.exp(log_input - m_BTH)
    precise = 2 if q.dtype == jnp.bfloat16 else 3  # o is a quotient of two things read: 8 bits of each would be too few
    read, S_BHKX = linear.differentiable(q, k, values, *gates, None, S_BHKX, scale=1.0, chunk=chunk, precise=precise)
    return normalised(read[..., :V], read[..., V], m_BTH), S_BHKX[..., :V], S_BHKX[..., V], m_BTH[:, -1]


def maxima(log_input_BTH: Array, log_decay_BTH: Array, m_BH: Array) -> Array:
    """m [B, T, H]: m_t = max(log_decay_t + m_{t-1}, log_input_t), at least `NOTHING`. By doubling: XLA takes long over an associative scan."""
    T = log_input_BTH.shape[1]
    sums, own, reach = log_decay_BTH, jnp.maximum(log_input_BTH, NOTHING), 1
    earlier = lambda x, fill: jnp.pad(x[:, :-reach], ((0, 0), (reach, 0), (0, 0)), constant_values=fill)  # noqa: E731
    while reach < T:
        own, sums = jnp.maximum(own, earlier(own, -jnp.inf) + sums), sums + earlier(sums, 0.0)
        reach *= 2
    return jnp.maximum(jnp.maximum(own, sums + m_BH[:, None]), NOTHING)
