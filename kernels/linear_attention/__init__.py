"""Linear attention with one scalar decay per head and token.

    S_t = sign_t exp(log_decay_t) S_{t-1} + beta_t k_t v_t^T        o_t = scale S_t^T q_t

MesaNet (arXiv 2506.05233) Table 1: Mamba2 (beta = 1) and GLA; the same recurrence carries Mesa's statistics (Eq. 8).

Shapes: B batch, T time, H heads, K key size, V value size.
"""

from typing import Any

import kernels
from kernels import arrays, launch, mosaic, shapes
from kernels.linear_attention import chunked, reference
from kernels.linear_attention.reference import State

__all__ = ["State", "linear_attention", "step"]

Array = Any  # torch.Tensor or jax.Array


def _triton(*arguments: Any, **options: Any) -> tuple[Array, State]:
    from kernels.linear_attention import triton  # here: importing kernels loads no framework; a statement: torch.compile can trace it

    return triton.linear_attention(*arguments, **options)


ARRAY_FORMS = {"chunked": chunked.linear_attention, "reference": reference.linear_attention}
IMPLEMENTATIONS = {
    **ARRAY_FORMS,
    "triton": _triton,
    "pallas": mosaic.implementation("linear_attention"),
}
refusal = launch.up_to(256)


kernels.offer("linear_attention", {**dict.fromkeys(ARRAY_FORMS), "triton": refusal, "pallas": mosaic.refusal})


def linear_attention(
    q_BTHK: Array,
    k_BTHK: Array,
    v_BTHV: Array,
    log_decay_BTH: Array,
    beta_BTH: Array | None = None,
    *,
    sign: Array | None = None,
    scale: float = 1.0,
    state: State | None = None,
    segments: Array | None = None,
    backend: str | None = None,
) -> tuple[Array, State]:
    """o [B, T, H, V] in v's dtype, and the state after the last token.

    q, k, v: bfloat16, float32 or float64. log_decay: at most 0; 0 keeps the state, -inf drops it. beta: write strength, None for 1.
    sign: +1 or -1, the decay's sign, None for +1; it has no gradient. state: what an earlier call returned; None is a fresh one.
    segments: int32 [B, T] document ids; a new id drops the state, -1 is padding (see `kernels.segmentation`).
    Gates and the state are float32 (float64 for float64 q). Everything but sign and segments is differentiable, the state included.
    Raises ValueError for shapes that disagree and for a backend that does not exist.
    """
    sizes = shapes.check(
        "linear_attention",
        q=(q_BTHK, "BTHK"),
        k=(k_BTHK, "BTHK"),
        v=(v_BTHV, "BTHV"),
        log_decay=(log_decay_BTH, "BTH"),
        beta=(beta_BTH, "BTH"),
        sign=(sign, "BTH"),
        state=(None if state is None else state.S_BHKV, "BHKV"),
        segments=(segments, "BT"),
    )
    ops = arrays.of(q_BTHK)
    name = kernels.choose("linear_attention", sizes, ops.dtype_name(q_BTHK), ops.device(q_BTHK), backend)
    return IMPLEMENTATIONS[name](q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, sign=sign, scale=scale, state=state, segments=segments)


def step(
    q_BHK: Array,
    k_BHK: Array,
    v_BHV: Array,
    log_decay_BH: Array,
    beta_BH: Array | None = None,
    *,
    sign: Array | None = None,
    scale: float = 1.0,
    state: State | None = None,
    segment_B: Array | None = None,
) -> tuple[Array, State]:
    """One token in constant memory: o [B, H, V] and the state after it. Arguments as `linear_attention`'s without the time axis.

    Where `linear_attention` runs as triton, one kernel, safe inside a CUDA graph; with a gradient, and inside torch.compile, array operations.
    """
    given = (q_BHK, k_BHK, v_BHV, log_decay_BH, beta_BH)
    run = launch.step_of("linear_attention", reference.step, given, state)
    return run(*given, sign=sign, scale=scale, state=state, segment_B=segment_B)
