"""Softmax attention for TPUs by JAX's own splash attention, which skips what a mask hides: causal order, a window, documents.

Queries over a cache (the first tokens of a generation that goes on) are the library's.
Shapes: B batch, T time, A all that can be seen, H heads, K key size, V value size; P = T filled up to whole blocks.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from kernels.arrays import jax as ops
from kernels.attention import library
from kernels.attention.cache import Rule, Seen

Array = Any  # jax.Array
BLOCKS = (512, 256, 128)
"""Queries, and keys, of a block: the largest that cuts T without more padding than the smallest needs."""


def attend(q_BTHK: Array, seen: Seen, *, window: int | None, scale: float) -> Array:
    """o [B, T, H, V] for queries over what they see."""
    T, rule = q_BTHK.shape[1], seen.rule
    if seen.k_BAHK.shape[1] != T:
        return library.attend(q_BTHK, seen, window=window, scale=scale)
    given = (q_BTHK.astype(jnp.float32) * scale).astype(q_BTHK.dtype), seen.k_BAHK, seen.v_BAHV
    if rule is None or rule.whole:
        return _splash(*given, None, window)
    number_BT = jnp.where(rule.real_BT, rule.number_BT, -1)  # padding sees padding; its output is dropped
    if window is None:
        return _splash(*given, number_BT, None)
    order_BT, place_BT = _real_first(rule)
    given = (ops.take_along(x, order_BT[..., None, None], 1) for x in given)
    o = _splash(*given, ops.take_along(number_BT, order_BT, 1), window)
    return ops.take_along(o, place_BT[..., None, None], 1)


def _real_first(rule: Rule) -> tuple[Array, Array]:
    """Padding to the end, as a window counts tokens and not places: (which token stands at a place, at which place a token stands)."""
    order_BT = ops.argsort((~rule.real_BT).astype(jnp.int32))
    return order_BT, ops.argsort(order_BT)


def _splash(q_BTHK: Array, k_BTHK: Array, v_BTHV: Array, number_BT: Array | None, window: int | None) -> Array:
    T, H = q_BTHK.shape[1:3]
    P = -(-T // BLOCKS[-1]) * BLOCKS[-1]
    q, k, v = (jnp.pad(jnp.moveaxis(x, 2, 1), ((0, 0), (0, 0), (0, P - T), (0, 0))) for x in (q_BTHK, k_BTHK, v_BTHV))
    ids = None if number_BT is None else jnp.pad(number_BT, ((0, 0), (0, P - T)), constant_values=-1)
    run = _kernel(P, H, window, ops.device(q) == "cpu")
    precision = "highest" if q.dtype == jnp.float32 else "default"
    with jax.default_matmul_precision(precision):
        o = jax.vmap(lambda q, k, v, ids: run(q, k, v, None if ids is None else splash.SegmentIds(ids, ids)))(q, k, v, ids)
    return jnp.moveaxis(o, 1, 2)[:, :T]


@functools.lru_cache(maxsize=32)
def _kernel(P: int, H: int, window: int | None, interpret: bool) -> Callable:
    size = next(size for size in BLOCKS if P % size == 0)
    one = masks.CausalMask((P, P)) if window is None else masks.LocalMask((P, P), (window - 1, 0), 0)
    blocks = splash.BlockSizes(
        block_q=size, block_kv=size, block_kv_compute=size, block_q_dkv=size, block_kv_dkv=size, block_kv_dkv_compute=size, block_q_dq=size,
        block_kv_dq=size,
    )  # fmt: skip
    with jax.ensure_compile_time_eval():
        return splash.make_splash_mha_single_device(masks.MultiHeadMask([one] * H), block_sizes=blocks, interpret=interpret)
