"""The delta rule, with and without decay: what the state holds for a key is replaced, not added to.

    S_t = exp(log_decay_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T        o_t = scale S_t^T q_t

MesaNet (arXiv 2506.05233) Table 1: DeltaNet (no decay) and Gated DeltaNet. Keys of unit norm and beta in [0, 1] keep it stable.

Shapes: B batch, T time, H heads, K key size, V value size.
"""

from typing import Any

import kernels
from kernels import arrays, launch, mosaic, shapes
from kernels.delta_rule import chunked, reference
from kernels.linear_attention.reference import State

__all__ = ["State", "delta_rule", "step"]

Array = Any  # torch.Tensor or jax.Array


def _triton(*arguments: Any, **options: Any) -> tuple[Array, State]:
    from kernels.delta_rule import triton  # when it is first called; an import statement, so that torch.compile can trace it

    return triton.delta_rule(*arguments, **options)


ARRAY_FORMS = {"chunked": chunked.delta_rule, "reference": reference.delta_rule}
IMPLEMENTATIONS = {**ARRAY_FORMS, "triton": _triton, "pallas": mosaic.implementation("delta_rule")}
refusal = launch.up_to(256)


FUSED = {"triton": refusal, "pallas": mosaic.refusal}
kernels.offer("delta_rule", {**dict.fromkeys(ARRAY_FORMS), **FUSED})


def delta_rule(
    q_BTHK: Array,
    k_BTHK: Array,
    v_BTHV: Array,
    beta_BTH: Array,
    log_decay_BTH: Array | None = None,
    *,
    scale: float = 1.0,
    state: State | None = None,
    segments: Array | None = None,
    backend: str | None = None,
) -> tuple[Array, State]:
    """o [B, T, H, V] in v's dtype, and the state after the last token.

    q, k, v: bfloat16, float32 or float64. beta: write strength. log_decay: at most 0, None for 0; -inf drops the state.
    state: what an earlier call returned; None is a fresh one. segments: int32 [B, T] document ids; a new id drops the state, -1 is
    padding (see `kernels.segmentation`). Gates and the state are float32 (float64 for float64 q). All but segments is differentiable.
    Raises ValueError for shapes that disagree and for a backend that does not exist.
    """
    sizes = shapes.check(
        "delta_rule",
        q=(q_BTHK, "BTHK"),
        k=(k_BTHK, "BTHK"),
        v=(v_BTHV, "BTHV"),
        beta=(beta_BTH, "BTH"),
        log_decay=(log_decay_BTH, "BTH"),
        state=(None if state is None else state.S_BHKV, "BHKV"),
        segments=(segments, "BT"),
    )
    ops = arrays.of(q_BTHK)
    run = IMPLEMENTATIONS[kernels.choose("delta_rule", sizes, ops.dtype_name(q_BTHK), ops.device(q_BTHK), backend)]
    return run(q_BTHK, k_BTHK, v_BTHV, beta_BTH, log_decay_BTH, scale=scale, state=state, segments=segments)


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
    """One token in constant memory: o [B, H, V] and the state after it. Arguments as `delta_rule`'s without the time axis.

    Where `delta_rule` runs as triton, one kernel, safe inside a CUDA graph; with a gradient, and inside torch.compile, array operations.
    """
    given = (q_BHK, k_BHK, v_BHV, beta_BH, log_decay_BH)
    run = launch.step_of("delta_rule", reference.step, given, state)
    return run(*given, scale=scale, state=state, segment_B=segment_B)
