"""What a token can see: the keys and values of its own document, kept between calls; and the one-token step over them.

With a window the cache is a ring of `window` slots, token n of a row in slot n mod window. Without one it has a slot for every token;
a step that finds it full makes it twice as large, which a traced (jax.jit) step cannot: reserve room first, or its output is NaN.

Shapes: B batch, T time, S slots, H heads, K key size, V value size, A all that can be seen (slots, then the call's own tokens).
"""

from typing import Any, NamedTuple

from kernels import arrays, launch, segmentation

Array = Any  # torch.Tensor or jax.Array


class State(NamedTuple):
    """Keys and values, each slot's position [B, S] (-1: empty), tokens seen [B], and the id of their segment [B] (-1: none yet)."""

    k_BSHK: Array
    v_BSHV: Array
    position_BS: Array
    seen_B: Array
    segment_B: Array


class Rule(NamedTuple):
    """Which query sees which key: one of its own document (by number), not ahead of it, within the window; padding is nobody's key.

    position [B]: in the row, a key's -1 where there is none. whole: no documents, no padding and no cache; then only the order counts.
    """

    position_BT: Array
    number_BT: Array
    real_BT: Array
    key_BA: Array
    key_number_BA: Array
    whole: bool


class Seen(NamedTuple):
    """Keys and values in sight, and which query sees which of them (None: causal, nothing else)."""

    k_BAHK: Array
    v_BAHV: Array
    rule: Rule | None


def visible(rule: Rule, window: int | None, query: Any, key: Any) -> Array:
    """Whether the queries at an index see the keys at another. Padding sees all, as a softmax over nothing is NaN; its output is dropped."""
    behind = rule.position_BT[query] - rule.key_BA[key]
    seen = (behind >= 0) & (rule.key_BA[key] >= 0) & (rule.number_BT[query] == rule.key_number_BA[key])
    return (seen if window is None else seen & (behind < window)) | ~rule.real_BT[query]


def mask(rule: Rule, window: int | None) -> Array:
    """[B, T, A]: which query sees which key, written out."""
    every = slice(None)
    return visible(rule, window, (every, every, None), (every, None, every))


def fresh(k: Array, v: Array, slots: int) -> State:
    """An empty cache, for k [B, ..., H, K] and v [B, ..., H, V]."""
    ops, B = arrays.of(k), k.shape[0]
    keys, values = (ops.zeros((B, slots, *x.shape[-2:]), x.dtype, x) for x in (k, v))
    return State(keys, values, ops.full((B, slots), -1, ops.int32, k), ops.zeros((B,), ops.int32, k), ops.full((B,), -1, ops.int32, k))


def reserve(state: State, slots: int) -> State:
    """The cache of full attention with room for `slots` tokens in all."""
    ops = arrays.of(state.k_BSHK)
    more = max(slots - state.position_BS.shape[1], 0)
    k, v = (ops.pad(x, 1, 0, more) for x in (state.k_BSHK, state.v_BSHV))
    return state._replace(k_BSHK=k, v_BSHV=v, position_BS=ops.pad(state.position_BS, 1, 0, more, -1))


def positions(like_BT: Array, state: State | None = None, segments: Array | None = None) -> Array:
    """int32 [B, T]: where each token stands in its row, counted on from the state; padding is not counted. For RoPE."""
    ops = arrays.of(like_BT)
    B, T = like_BT.shape[:2]
    if segments is None:
        rank_BT = ops.broadcast_to(ops.arange(T, like_BT)[None], (B, T))
    else:
        rank_BT = ops.cumsum(ops.cast(segments >= 0, ops.int32), 1) - 1
    return rank_BT if state is None else rank_BT + state.seen_B[:, None]


def place(k_BTHK: Array, v_BTHV: Array, window: int | None, state: State | None, segments: Array | None) -> tuple[Seen, State]:
    """What the call's tokens see, and the cache after them."""
    ops = arrays.of(k_BTHK)
    T = k_BTHK.shape[1]
    start = fresh(k_BTHK, v_BTHV, 0) if state is None else state
    position_BT = positions(k_BTHK, state, segments)
    alone = state is None and segments is None
    if alone and window is None:
        seen_B, segment_B = start.seen_B + T, segmentation.unsegmented(start.segment_B)
        return Seen(k_BTHK, v_BTHV, None), State(k_BTHK, v_BTHV, position_BT, seen_B, segment_B)

    # Documents by number, the cache's own being 0; a key that is padding has position -1.
    if segments is None:
        number_BT, real_BT, last_B = position_BT * 0, position_BT >= 0, segmentation.unsegmented(start.segment_B)
    else:
        reset_BT, padding_BT, last_B = segmentation.marks(segments, start.segment_B)
        number_BT, real_BT = ops.cumsum(ops.cast(reset_BT, ops.int32), 1), ~padding_BT
    k, v = (ops.concatenate((ops.cast(x, y.dtype), y), 1) for x, y in ((start.k_BSHK, k_BTHK), (start.v_BSHV, v_BTHV)))
    key_BA = ops.concatenate((start.position_BS, ops.where(real_BT, position_BT, -1)), 1)
    number_BA = ops.concatenate((start.position_BS * 0, number_BT), 1)

    if alone and window >= T:
        seen = Seen(k_BTHK, v_BTHV, None)
    else:
        seen = Seen(k, v, Rule(position_BT, number_BT, real_BT, key_BA, number_BA, whole=alone))

    own_BA = number_BA == number_BT[:, -1:]
    keep_BA = (key_BA >= 0) & own_BA
    seen_B = start.seen_B + ops.sum(ops.cast(real_BT, ops.int32), 1)
    return seen, _stored(start, k, v, key_BA, keep_BA, seen_B, last_B, window)


def _stored(start: State, k, v, key_BA, keep_BA, seen_B, last_B, window: int | None) -> State:
    """The cache with what may still be seen; everything else goes to a slot that is cut off."""
    ops = arrays.of(k)
    slots = window or key_BA.shape[1]
    if window is not None:
        keep_BA = keep_BA & (key_BA >= seen_B[:, None] - window)
    slot_BA = ops.where(keep_BA, key_BA if window is None else key_BA % window, slots)

    def stored(x_BA, value):
        empty = ops.full((x_BA.shape[0], slots + 1, *x_BA.shape[2:]), value, x_BA.dtype, x_BA)
        return ops.update(empty, slot_BA, x_BA)[:, :slots]

    return State(stored(k, 0), stored(v, 0), stored(ops.where(keep_BA, key_BA, -1), -1), seen_B, last_B)


def step(
    q_BHK: Array,
    k_BHK: Array,
    v_BHV: Array,
    *,
    window: int | None = None,
    scale: float | None = None,
    state: State | None = None,
    segment_B: Array | None = None,
) -> tuple[Array, State]:
    """One token: o [B, H, V] and the cache after it. Arguments as `attention`'s without the time axis."""
    ops = arrays.of(q_BHK)
    state = fresh(k_BHK, v_BHV, window or 1) if state is None else state
    reset_B, padding_B, last_B = segmentation.one(segment_B, state.segment_B)
    slots = state.position_BS.shape[1]
    if window is None:
        most = ops.largest_if_known(state.seen_B)
        if most is not None and most >= slots:
            state = reserve(state, 2 * (most + 1))
            slots = state.position_BS.shape[1]

    slot_B = state.seen_B if window is None else state.seen_B % window
    room_B = slot_B < slots
    write_BS = (ops.arange(slots, q_BHK)[None] == slot_B[:, None]) & ~padding_B[:, None]
    k, v = ((x, ops.cast(new, x.dtype)) for x, new in ((state.k_BSHK, k_BHK), (state.v_BSHV, v_BHV)))
    if launch.in_place() and segment_B is None:
        k, v = (ops.update(cache, slot_B, x, in_place=True) for cache, x in (k, v))
    else:
        k, v = (ops.where(write_BS[..., None, None], x[:, None], cache) for cache, x in (k, v))
    position_BS = ops.where(reset_B[:, None], -1, state.position_BS)
    position_BS = ops.where(write_BS, state.seen_B[:, None], position_BS)
    seen_B = state.seen_B + ops.cast(~padding_B, ops.int32)

    scale = q_BHK.shape[-1] ** -0.5 if scale is None else scale
    visible_BS = (position_BS >= 0) | padding_B[:, None]
    if ops.dtype_name(q_BHK) == "bfloat16" and ops.device(q_BHK) == "cuda":
        o = ops.dot_product_attention(q_BHK[:, None], k, v, visible=visible_BS[:, None], scale=scale)[:, 0]
    else:
        work = ops.working_dtype(q_BHK)
        scores_BHS = ops.einsum("bhk,bshk->bhs", q_BHK, k, accumulate=work, precision="highest") * scale
        weights_BHS = ops.softmax(ops.where(visible_BS[:, None], scores_BHS, -float("inf")), -1)
        o = ops.cast(ops.einsum("bhs,bshv->bhv", weights_BHS, ops.cast(v, work), precision="highest"), v_BHV.dtype)
    o = ops.where(padding_B[:, None, None], 0.0, ops.where(room_B[:, None, None], o, float("nan")))
    return o, State(k, v, position_BS, seen_B, last_B)
