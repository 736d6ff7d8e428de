"""Causal softmax attention: full, or over a sliding window in which token t sees t - window + 1 .. t.

    o_t = sum_s softmax_s(scale q_t . k_s) v_s     over the tokens s <= t of t's own document, within the window

Shapes: B batch, T time, S cached tokens, H heads, K key size, V value size.
"""

from typing import Any

import kernels
from kernels import arrays, mosaic, shapes
from kernels.attention import library, reference
from kernels.attention.cache import State, place, positions, reserve, step

__all__ = ["State", "attention", "positions", "reserve", "step"]

Array = Any  # torch.Tensor or jax.Array
ARRAY_FORMS = {"library": library.attend, "reference": reference.attend}
IMPLEMENTATIONS = {**ARRAY_FORMS, "pallas": mosaic.implementation("attention", "attend")}
kernels.offer("attention", {**dict.fromkeys(ARRAY_FORMS), "pallas": mosaic.refusal})


def attention(
    q_BTHK: Array,
    k_BTHK: Array,
    v_BTHV: Array,
    *,
    window: int | None = None,
    scale: float | None = None,
    state: State | None = None,
    segments: Array | None = None,
    backend: str | None = None,
) -> tuple[Array, State]:
    """o [B, T, H, V] in v's dtype, and the cache after the last token.

    q, k, v: bfloat16, float32 or float64, with positions already in them (`positions` counts on from a state). window: how many tokens a
    token sees, itself included; None for all. scale: None for 1 / sqrt(K). state: what an earlier call returned; None is a fresh one.
    segments: int32 [B, T] document ids; -1 is padding (see `kernels.segmentation`).
    Everything but segments is differentiable, the state's keys and values included.
    Raises ValueError for shapes that disagree, a window below 1, a backend that does not exist.
    """
    sizes = shapes.check(
        "attention",
        q=(q_BTHK, "BTHK"),
        k=(k_BTHK, "BTHK"),
        v=(v_BTHV, "BTHV"),
        state=(None if state is None else state.v_BSHV, "BSHV"),
        segments=(segments, "BT"),
    )
    if window is not None and window < 1:
        raise ValueError(f"attention: window is {window}; a token sees at least itself, so it must be 1 or more, or None for all.")
    ops = arrays.of(q_BTHK)
    attend = IMPLEMENTATIONS[kernels.choose("attention", sizes, ops.dtype_name(q_BTHK), ops.device(q_BTHK), backend)]
    scale = q_BTHK.shape[-1] ** -0.5 if scale is None else scale
    seen, after = place(k_BTHK, v_BTHV, window, state, segments)
    o = attend(q_BTHK, seen, window=window, scale=scale)
    return o if segments is None else ops.where((segments >= 0)[..., None, None], o, 0.0), after
