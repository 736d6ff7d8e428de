"""The short convolution in front of a recurrence: causal, a window for each channel, then SiLU and unit heads where asked.

    y_t = bias + sum_j weight_j x_{t-W+1+j} within the segment of t        y = silu(y)        y = y / |y| per head

Shapes: B batch, T time, D channels, W window, H heads of D / H channels.
"""

from typing import Any

import kernels
from kernels import arrays, launch, shapes
from kernels.convolution import chunked, reference
from kernels.convolution.chunked import State
from kernels.convolution.reference import step

__all__ = ["State", "short_convolution", "step"]

Array = Any  # torch.Tensor or jax.Array


def _triton(*arguments: Any, **options: Any) -> tuple[Array, State]:
    from kernels.convolution import triton  # when it is first called; an import statement, so that torch.compile can trace it

    return triton.short_convolution(*arguments, **options)


def _refusal(shape: dict[str, int], dtype: str, device: str) -> str | None:
    if shape.get("W", 4) > 4:
        return f"its triton kernel has windows of up to 4, this one is {shape['W']}"
    if shape.get("K", 1) > 512:
        return f"its triton kernel takes the norm of heads of up to 512 channels, these have {shape['K']}"
    return launch.refusal(shape, dtype, device)


def _fused_by_xla(shape: dict[str, int], dtype: str, device: str) -> str | None:
    return None if device == "tpu" else "that is the array form where XLA makes one kernel of it, on a TPU"


ARRAY_FORMS = {"chunked": chunked.short_convolution, "reference": reference.short_convolution}
IMPLEMENTATIONS = {**ARRAY_FORMS, "library": chunked.short_convolution, "triton": _triton}
OFFERED = {**dict.fromkeys(ARRAY_FORMS), "library": _fused_by_xla, "triton": _refusal}
kernels.offer("convolution", OFFERED)


def short_convolution(
    x_BTD: Array, weight_WD: Array, bias_D: Array | None = None, *, silu: bool = False, heads: int | None = None,
    state: State | None = None, segments: Array | None = None, backend: str | None = None,
) -> tuple[Array, State]:  # fmt: skip
    """y [B, T, D] in x's dtype, and the state after the last token.

    x: bfloat16, float32 or float64. weight: the last row meets x_t. silu: SiLU follows. heads: then each head's y is scaled to unit length.
    state: what an earlier call returned; None is a fresh one. segments: int32 [B, T] document ids; a new id drops the state, -1 is padding:
    such tokens are skipped, their output is 0 and they leave the state as it was. With segments, a GPU runs the array form too.
    All but segments is differentiable, the state included.
    Raises ValueError for shapes that disagree and for a backend that does not exist.
    """
    past, last = (None, None) if state is None else state
    sizes = shapes.check(
        "convolution", x=(x_BTD, "BTD"), weight=(weight_WD, "WD"), bias=(bias_D, "D"), state=(last, "B"), segments=(segments, "BT")
    )
    B, D, W = sizes["B"], sizes["D"], sizes["W"]
    if past is not None and tuple(past.shape) != (B, W - 1, D):
        raise ValueError(f"convolution: the state's inputs have shape {list(past.shape)}; for these arguments it must be {[B, W - 1, D]}.")
    if heads is not None:
        if D % heads:
            raise ValueError(f"convolution: {heads} heads do not divide {D} channels; the number of heads must.")
        sizes = sizes | {"H": heads, "K": D // heads}
    ops = arrays.of(x_BTD)
    run = IMPLEMENTATIONS[kernels.choose("convolution", sizes, ops.dtype_name(x_BTD), ops.device(x_BTD), backend)]
    return run(x_BTD, weight_WD, bias_D, silu=silu, heads=heads, state=state, segments=segments)
