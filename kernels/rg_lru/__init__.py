"""The real-gated linear recurrent unit: one decay per channel and token.

    h_t = exp(log_a_t) h_{t-1} + x_t        (Griffin, arXiv 2402.19427, Eq. 4; the layer scales x by sqrt(1 - a^2))

Shapes: B batch, T time, D channels.
"""

from typing import Any

import kernels
from kernels import arrays, launch, mosaic, shapes
from kernels.rg_lru import chunked, reference
from kernels.rg_lru.reference import State, step

__all__ = ["State", "rg_lru", "step"]

Array = Any  # torch.Tensor or jax.Array


def _triton(*arguments: Any, **options: Any) -> tuple[Array, State]:
    from kernels.rg_lru import triton  # when it is first called; an import statement, so that torch.compile can trace it

    return triton.rg_lru(*arguments, **options)


ARRAY_FORMS = {"chunked": chunked.rg_lru, "reference": reference.rg_lru}
IMPLEMENTATIONS = {**ARRAY_FORMS, "triton": _triton, "pallas": mosaic.implementation("rg_lru")}
FUSED = {"triton": launch.refusal, "pallas": mosaic.refusal}
kernels.offer("rg_lru", {**dict.fromkeys(ARRAY_FORMS), **FUSED})


def rg_lru(
    x_BTD: Array, log_a_BTD: Array, *, state: State | None = None, segments: Array | None = None, backend: str | None = None
) -> tuple[Array, State]:
    """h [B, T, D] in x's dtype, and the state after the last token.

    x: bfloat16, float32 or float64. log_a: at most 0; 0 keeps the state, -inf drops it. state: what an earlier call returned; None is a
    fresh one. segments: int32 [B, T] document ids; a new id drops the state, -1 is padding (see `kernels.segmentation`).
    The gate and the state are float32 (float64 for float64 x). All but segments is differentiable, the state included.
    Raises ValueError for shapes that disagree and for a backend that does not exist.
    """
    start = None if state is None else state.h_BD
    sizes = shapes.check("rg_lru", x=(x_BTD, "BTD"), log_a=(log_a_BTD, "BTD"), state=(start, "BD"), segments=(segments, "BT"))
    ops = arrays.of(x_BTD)
    run = IMPLEMENTATIONS[kernels.choose("rg_lru", sizes, ops.dtype_name(x_BTD), ops.device(x_BTD), backend)]
    return run(x_BTD, log_a_BTD, state=state, segments=segments)
