"""Functions that Pallas kernels of several operations share: what Mosaic lowers, on arrays of two axes in fast memory.

Mosaic has no running sums: they are products with triangles of ones. Per-token numbers are columns [C, 1]; gates arrive as rows [1, C].
Shapes: C tokens of one chunk, K key size, V value size.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array

GONE = -104.0
"""exp of less is 0 in float32: such a decay drops the state, whatever is behind it."""

NN, NT, TN = ((1,), (0,)), ((1,), (1,)), ((0,), (0,))  # a b, a b^T, a^T b


def parts(x: Array, count: int) -> list[Array]:
    """x as a sum of bfloat16 arrays, each the rounding of what those before it left: 8 bits of x a part. A bfloat16 x is its own only part."""
    if x.dtype == jnp.bfloat16:
        return [x]
    found = []
    for _ in range(count):
        found.append(x.astype(jnp.bfloat16))
        x = x - found[-1].astype(jnp.float32)
    return found


def dot(a: Array | list[Array], b: Array | list[Array], contract: tuple = NN, *, precise: int) -> Array:
    """A product in float32, of arrays or of the parts that they were cut into.

    precise: into how many bfloat16 parts float32 operands are cut: 1 rounds them, 3 is float32 throughout.
    """
    if precise == 3 and all(isinstance(x, Array) and x.dtype == jnp.float32 for x in (a, b)):
        return jax.lax.dot_general(a, b, (contract, ((), ())), precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    total = None
    for i, x in enumerate(a if isinstance(a, list) else parts(a, precise)):
        for j, y in enumerate(b if isinstance(b, list) else parts(b, precise)):
            if i + j < precise:
                term = jax.lax.dot_general(x, y, (contract, ((), ())), preferred_element_type=jnp.float32)
                total = term if total is None else total + term
    return total


def token(C: int, axis: int) -> Array:
    """[C, C]: the row's (axis 0) or the column's number."""
    return jax.lax.broadcasted_iota(jnp.int32, (C, C), axis)


def column(x_1C: Array) -> Array:
    """[1, C] -> [C, 1], exactly."""
    C = x_1C.shape[1]
    return jnp.sum(jnp.where(token(C, 0) == token(C, 1), x_1C, 0.0), axis=1, keepdims=True)


def row(x_C1: Array) -> Array:
    """[C, 1] -> [1, C], exactly."""
    C = x_C1.shape[0]
    return jnp.sum(jnp.where(token(C, 0) == token(C, 1), x_C1, 0.0), axis=0, keepdims=True)


class Decay(NamedTuple):
    """Decays, signs included: from s to t (weight[t, s], 0 for s > t), from the chunk's start to t, from s to its end, over all of it."""

    weight_CC: Array
    since_start_C1: Array
    to_end_C1: Array
    through_11: Array


def decay(log_decay_1C: Array, sign_1C: Array | None) -> Decay:
    """As `kernels.chunks.decay`: each is the sum of its own log decays; a token that drops the state counts, and is no summand."""
    C = log_decay_1C.shape[1]
    t, s = token(C, 0), token(C, 1)
    causal = s <= t
    cut_1C = log_decay_1C < GONE
    kept_1C = jnp.where(cut_1C, 0.0, log_decay_1C)
    drop_1C = jnp.where(cut_1C, 1.0, 0.0)
    drops_C1 = jnp.sum(jnp.where(causal, drop_1C, 0.0), axis=1, keepdims=True)
    drops_1C = jnp.sum(jnp.where(t <= s, column(drop_1C), 0.0), axis=0, keepdims=True)
    ones = jnp.where(causal, 1.0, 0.0).astype(jnp.bfloat16)
    between_CC = dot(ones, jnp.where(t > s, column(kept_1C), 0.0), precise=3)
    weight_CC = jnp.where(causal & (drops_C1 == drops_1C), jnp.exp(jnp.where(causal, between_CC, 0.0)), 0.0)
    since_start_C1 = jnp.exp(jnp.sum(jnp.where(causal, kept_1C, 0.0), axis=1, keepdims=True))
    since_start_C1 = jnp.where(drops_C1 == 0.0, since_start_C1, 0.0)
    if sign_1C is not None:
        negative_1C = jnp.where(sign_1C < 0.0, 1.0, 0.0)
        sign_C1 = _alternate(jnp.sum(jnp.where(causal, negative_1C, 0.0), axis=1, keepdims=True))
        sign_1C = _alternate(jnp.sum(jnp.where(t <= s, column(negative_1C), 0.0), axis=0, keepdims=True))
        weight_CC, since_start_C1 = weight_CC * sign_C1 * sign_1C, since_start_C1 * sign_C1
    to_end_C1 = column(weight_CC[C - 1 :, :])
    return Decay(weight_CC, since_start_C1, to_end_C1, since_start_C1[C - 1 :, :])


def no_decay(C: int) -> Decay:
    """That of gates that are all 1."""
    ones = jnp.ones((C, 1), jnp.float32)
    return Decay(jnp.where(token(C, 1) <= token(C, 0), 1.0, 0.0), ones, ones, ones[:1])


def _alternate(count: Array) -> Array:
    """1 for even counts, -1 for odd ones."""
    return 1.0 - 2.0 * (count - 2.0 * jnp.floor(count * 0.5))


def decay_gradient(pairs_CC: Array, since_start_C1: Array, to_end_C1: Array, through_11: Array) -> Array:
    """As `kernels.chunks.decay_gradient`, a row [1, C]: token i is in the decay from s to t when s < i <= t."""
    C = pairs_CC.shape[0]
    t, s = token(C, 0), token(C, 1)
    before = jnp.where(t < s, 1.0, 0.0).astype(jnp.bfloat16)  # [s, i]: s < i
    across = dot(pairs_CC, before, precise=3) + since_start_C1
    return jnp.sum(jnp.where(t >= s, across, to_end_C1), axis=0, keepdims=True) + through_11


def total(x: Array) -> Array:
    """The sum of all, [1, 1]."""
    return jnp.sum(jnp.sum(x, axis=1, keepdims=True), axis=0, keepdims=True)


def inverse_unit_lower(x_CC: Array, *, precise: int) -> Array:
    """The inverse of a unit lower triangle; only what lies below the diagonal is read.

    Blocks on the diagonal are inverted, their size doubling: [[P, 0], [R, Q]] has the inverse [[P^-1, 0], [-Q^-1 R P^-1, Q^-1]]. As stable as
    substitution, where powers of x would not be.
    """
    C = x_CC.shape[0]
    t, s = token(C, 0), token(C, 1)
    inverse = jnp.where(t == s, 1.0, 0.0)
    size = 1
    while size < C:
        beside = (
            (jax.lax.div(t, 2 * size) == jax.lax.div(s, 2 * size)) & (jax.lax.rem(t, 2 * size) >= size) & (jax.lax.rem(s, 2 * size) < size)
        )
        below = jnp.where(beside, x_CC, 0.0)
        if size > 1:
            below = dot(dot(inverse, below, precise=precise), inverse, precise=precise)
        inverse = inverse - below
        size *= 2
    return inverse
