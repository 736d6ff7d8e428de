"""The delta rule token by token: the recurrence itself, and its one-token step.

Shapes: B batch, T time, H heads, K key size, V value size.
"""

from typing import Any

from kernels import arrays, segmentation
from kernels.linear_attention.reference import State, fresh

Array = Any  # torch.Tensor or jax.Array


def step(
    q_BHK: Array,
    k_BHK: Array,
    v_BHV: Array,
    beta_BH: Array,
    log_decay_BH: Array | None = None,
    *,
    scale: float = 1.0,
    state: State | None = None,
    segment_B: Array | None = None,
) -> tuple[Array, State]:
    """One token in constant memory: o [B, H, V] and the state after it. Arguments as `delta_rule`'s without the time axis."""
    ops = arrays.of(q_BHK)
    state = fresh(q_BHK, v_BHV) if state is None else state
    q, k, v, beta = (ops.cast(x, state.S_BHKV.dtype) for x in (q_BHK, k_BHK, v_BHV, beta_BH))
    decay = ops.ones(beta.shape, beta.dtype, beta) if log_decay_BH is None else ops.exp(ops.cast(log_decay_BH, beta.dtype))

    reset_B, padding_B, segment_B = segmentation.one(segment_B, state.segment_B)
    each = lambda x_B: x_B[:, None, None, None]  # noqa: E731
    kept = ops.where(each(reset_B), 0.0, decay[..., None, None] * state.S_BHKV)
    held = ops.einsum("bhk,bhkv->bhv", k, kept, precision="highest")
    S = kept + k[..., :, None] * (beta[..., None] * (v - held))[..., None, :]
    S = ops.where(each(padding_B), state.S_BHKV, S)
    o = ops.where(padding_B[:, None, None], 0.0, scale * ops.einsum("bhk,bhkv->bhv", q, S, precision="highest"))
    return ops.cast(o, v_BHV.dtype), State(S, segment_B)


def delta_rule(q, k, v, beta, log_decay=None, *, scale=1.0, state=None, segments=None) -> tuple[Array, State]:
    """See `kernels.delta_rule.delta_rule`."""
    ops = arrays.of(q)
    given = {name: x for name, x in {"log_decay_BH": log_decay, "segment_B": segments}.items() if x is not None}

    def token(state, xs):
        q, k, v, beta, *rest = xs
        o, state = step(q, k, v, beta, **dict(zip(given, rest, strict=True)), scale=scale, state=state)
        return state, o

    by_time = tuple(ops.moveaxis(x, 1, 0) for x in (q, k, v, beta, *given.values()))
    state, o_TBHV = ops.scan(token, fresh(q, v) if state is None else state, by_time)
    return ops.moveaxis(o_TBHV, 0, 1), state
