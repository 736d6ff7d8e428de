"""Palimpsa: linear attention whose entries each know how sure they are, by a diagonal Bayesian regression of values on keys.

    M_t = exp(log_decay_t) M_{t-1} + k_t v_t^T          o_t = scale [M_t / (prior + J_t)]^T q_t
    J_t = exp(log_decay_t) J_{t-1} + k_t^2 beta_t^T                                              (Palimpsa, arXiv 2602.09075)

The division is by entry; prior + J is the paper's importance I. Where J stays far below the prior this is linear attention with
v / prior (its Mamba2 limit). With the same beta for every value it reads q / (prior + diag(H)): Mesa's Jacobi start.

Shapes: B batch, T time, H heads, K key size, V value size.
"""

from typing import Any

import kernels
from kernels import arrays, launch, mosaic, shapes
from kernels.palimpsa import chunked, cuda, reference
from kernels.palimpsa.reference import State

__all__ = ["State", "palimpsa", "step"]

Array = Any  # torch.Tensor or jax.Array


def _triton(*arguments: Any, **options: Any) -> tuple[Array, State]:
    from kernels.palimpsa import triton  # when it is first called; an import statement, so that torch.compile can trace it

    return triton.palimpsa(*arguments, **options)


ARRAY_FORMS = {"chunked": chunked.palimpsa, "reference": reference.palimpsa}
IMPLEMENTATIONS = {**ARRAY_FORMS, "triton": _triton, "pallas": mosaic.implementation("palimpsa")}
FUSED = {"triton": cuda.refusal, "pallas": mosaic.refusal}
kernels.offer("palimpsa", {**dict.fromkeys(ARRAY_FORMS), **FUSED})


def palimpsa(
    q_BTHK: Array,
    k_BTHK: Array,
    v_BTHV: Array,
    beta_BTHV: Array,
    log_decay_BTH: Array,
    prior_H: Array,
    *,
    scale: float = 1.0,
    state: State | None = None,
    segments: Array | None = None,
    backend: str | None = None,
) -> tuple[Array, State]:
    """o [B, T, H, V] in v's dtype, and the state after the last token.

    q, k, v: bfloat16, float32 or float64. beta: precision of each value, at least 0. log_decay: at most 0; 0 keeps the state, -inf drops
    it. prior: importance of an entry that nothing was written to, above 0. state: what an earlier call returned; None is a fresh one.
    segments: int32 [B, T] document ids; a new id drops the state, -1 is padding (see `kernels.segmentation`).
    beta, decay, prior and the state are float32 (float64 for float64 q). All but segments is differentiable, the state included.
    Raises ValueError for shapes that disagree and for a backend that does not exist.
    """
    sizes = shapes.check(
        "palimpsa",
        q=(q_BTHK, "BTHK"),
        k=(k_BTHK, "BTHK"),
        v=(v_BTHV, "BTHV"),
        beta=(beta_BTHV, "BTHV"),
        log_decay=(log_decay_BTH, "BTH"),
        prior=(prior_H, "H"),
        state=(None if state is None else state.M_BHKV, "BHKV"),
        segments=(segments, "BT"),
    )
    ops = arrays.of(q_BTHK)
    run = IMPLEMENTATIONS[kernels.choose("palimpsa", sizes, ops.dtype_name(q_BTHK), ops.device(q_BTHK), backend)]
    return run(q_BTHK, k_BTHK, v_BTHV, beta_BTHV, log_decay_BTH, prior_H, scale=scale, state=state, segments=segments)


def step(
    q_BHK: Array,
    k_BHK: Array,
    v_BHV: Array,
    beta_BHV: Array,
    log_decay_BH: Array,
    prior_H: Array,
    *,
    scale: float = 1.0,
    state: State | None = None,
    segment_B: Array | None = None,
) -> tuple[Array, State]:
    """One token in constant memory: o [B, H, V] and the state after it. Arguments as `palimpsa`'s without the time axis.

    Where `palimpsa` runs as triton, one kernel, safe inside a CUDA graph; with a gradient, and inside torch.compile, array operations.
    """
    given = (q_BHK, k_BHK, v_BHV, beta_BHV, log_decay_BH, prior_H)
    run = launch.step_of("palimpsa", reference.step, given, state)
    return run(*given, scale=scale, state=state, segment_B=segment_B)
