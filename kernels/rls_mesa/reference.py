"""RLS Mesa token by token, each solve by elimination: the equations themselves, and the one-token step.

Shapes: B batch, T time, H heads, K key size, V value size.
"""

import math
from typing import Any, NamedTuple

from kernels import arrays, segmentation

Array = Any  # torch.Tensor or jax.Array

NOTHING_LEFT = -23 * math.log(2)
"""A log decay at or below this leaves less of H than float32's rounding: H begins again."""

GUARD = 8
"""Roundings of H's trace, relative to Lambda, that Lambda's weight in a solve never falls below: then every solve has a solution."""


class State(NamedTuple):
    """G [B, H, K, V], the keys' part of H [B, H, K, K] (symmetric), what is left of Lambda in it [B, H], and their segment's id [B] (-1: none yet).

    float32, float64 for float64 inputs. The whole H is H + weight Lambda.
    """

    G_BHKV: Array
    H_BHKK: Array
    weight_BH: Array
    segment_B: Array


def fresh(q: Array, v: Array) -> State:
    """The state before the first token, for q [B, ..., H, K] and v [B, ..., H, V]: H is Lambda."""
    ops = arrays.of(q)
    (B, *_, H, K), dtype = q.shape, ops.working_dtype(q)
    G, H_BHKK = (ops.zeros((B, H, K, size), dtype, q) for size in (v.shape[-1], K))
    return State(G, H_BHKK, ops.ones((B, H), dtype, q), ops.full((B,), -1, ops.int32, q))


def renewals(log_decay: Array) -> tuple[Array, Array]:
    """Where H begins again, and the log decay where it does not (0 there)."""
    again = log_decay <= NOTHING_LEFT
    return again, arrays.of(log_decay).where(again, 0.0, log_decay)


def step(
    q_BHK: Array,
    k_BHK: Array,
    v_BHV: Array,
    log_decay_BH: Array,
    beta_BH: Array,
    lam_HK: Array,
    *,
    state: State | None = None,
    segment_B: Array | None = None,
) -> tuple[Array, State]:
    """One token in constant memory: o [B, H, V] and the state after it. Arguments as `rls_mesa`'s without the time axis."""
    ops = arrays.of(q_BHK)
    state = fresh(q_BHK, v_BHV) if state is None else state
    q, k, v, log_decay, beta, lam = (ops.cast(x, state.H_BHKK.dtype) for x in (q_BHK, k_BHK, v_BHV, log_decay_BH, beta_BH, lam_HK))
    reset_B, padding_B, segment_B = segmentation.one(segment_B, state.segment_B)
    again_BH, log_decay = renewals(log_decay)
    again_BH, gamma = again_BH | reset_B[:, None], ops.exp(log_decay)

    def next_of(S: Array, written: Array) -> Array:
        kept = ops.where(again_BH[..., None, None], 0.0, gamma[..., None, None] * S)
        return ops.where(padding_B[:, None, None, None], S, kept + (beta[..., None] * k)[..., :, None] * written[..., None, :])

    weight = ops.where(padding_B[:, None], state.weight_BH, gamma * ops.where(again_BH, 1.0, state.weight_BH))
    state = State(next_of(state.G_BHKV, v), next_of(state.H_BHKK, k), weight, segment_B)
    K = q.shape[-1]
    diagonal = ops.cast(ops.arange(K, q)[:, None] == ops.arange(K, q)[None], q.dtype) * lam[:, :, None]
    least = ops.stop_gradient(GUARD * ops.epsilon(lam) * ops.sum(ops.einsum("bhkk->bhk", state.H_BHKK) / lam, -1))
    H = (state.H_BHKK + ops.swapaxes(state.H_BHKK, -1, -2)) / 2 + ops.maximum(weight, least)[..., None, None] * diagonal
    o = ops.einsum("bhk,bhkv->bhv", ops.solve(H, q), state.G_BHKV, precision="highest")
    return ops.cast(ops.where(padding_B[:, None, None], 0.0, o), v_BHV.dtype), state


def rls_mesa(q, k, v, log_decay, beta, lam, *, state=None, segments=None) -> tuple[Array, State]:
    """See `kernels.rls_mesa.rls_mesa`."""
    ops = arrays.of(q)
    given = () if segments is None else (segments,)

    def token(state, xs):
        *xs, segment_B = xs if given else (*xs, None)
        o, state = step(*xs, lam, state=state, segment_B=segment_B)
        return state, o

    by_time = tuple(ops.moveaxis(x, 1, 0) for x in (q, k, v, log_decay, beta, *given))
    state, o_TBHV = ops.scan(token, fresh(q, v) if state is None else state, by_time)
    return ops.moveaxis(o_TBHV, 0, 1), state
