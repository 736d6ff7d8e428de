"""What the RG-LRU takes, from its gates before their activation (Griffin, arXiv 2402.19427, section 2.4):

    r = sigmoid(f + f_bias)    i = sigmoid(g + g_bias)    log a = -rate r steps    x = sqrt(1 - a^2) i u,  i u at a document's first token

The derivative of sqrt(y) is bounded by `steepest`, as RecurrentGemma has it.

Shapes: B batch, T time, L channels, H blocks of J = L / H channels.
"""

from typing import Any

import kernels
from kernels import arrays, launch, shapes

Array = Any  # torch.Tensor or jax.Array


def bounded_sqrt(x: Array, steepest: float) -> Array:
    """sqrt(x), its derivative 1 / sqrt(4 x) at most `steepest`."""
    ops = arrays.of(x)
    slope = ops.stop_gradient(ops.rsqrt(ops.maximum(4 * x, steepest**-2)))
    return ops.stop_gradient(ops.sqrt(ops.maximum(x, 0.0)) - slope * x) + slope * x


def _library(u_BTL, f_HBTJ, g_HBTJ, f_bias_L, g_bias_L, steps_L, first_BT, *, rate: float, steepest: float) -> tuple[Array, Array]:
    ops = arrays.of(u_BTL)
    wide = ops.working_dtype(u_BTL)

    def gate(x_HBTJ: Array, bias_L: Array) -> Array:
        x_BTL = ops.transpose(x_HBTJ, (1, 2, 0, 3)).reshape(u_BTL.shape)
        return ops.sigmoid(ops.cast(x_BTL, wide) + ops.cast(bias_L, wide))

    r_BTL, i_BTL = gate(f_HBTJ, f_bias_L), gate(g_HBTJ, g_bias_L)
    log_a_BTL = -rate * r_BTL * ops.cast(steps_L, wide)
    new_BTL = ops.where(first_BT[..., None], 1.0, bounded_sqrt(-ops.expm1(2 * log_a_BTL), steepest))
    return ops.cast(new_BTL * i_BTL * ops.cast(u_BTL, wide), u_BTL.dtype), log_a_BTL


def _triton(*arguments: Any, **options: Any) -> tuple[Array, Array]:
    from kernels.lru_input import triton  # here: importing kernels loads no framework; a statement: torch.compile can trace it

    return triton.lru_input(*arguments, **options)


IMPLEMENTATIONS = {"library": _library, "triton": _triton}
kernels.offer("lru_input", {"library": None, "triton": launch.refusal})


def lru_input(
    u_BTL: Array, f_HBTJ: Array, g_HBTJ: Array, f_bias_L: Array, g_bias_L: Array, steps_L: Array, first_BT: Array, *,
    rate: float, steepest: float, backend: str | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """x [B, T, L] in u's dtype, and log a [B, T, L] in float32 (float64 for float64 u).

    u, f, g: of one dtype, bfloat16, float32 or float64; f and g as products of blocks leave them. biases, steps: float32; steps is the softplus of the
    decay's parameter. first: bool. All but first is differentiable.
    Raises ValueError for shapes that disagree and for a backend that does not exist.
    """
    given = {"u": (u_BTL, "BTL"), "f": (f_HBTJ, "HBTJ"), "g": (g_HBTJ, "HBTJ"), "f_bias": (f_bias_L, "L"), "g_bias": (g_bias_L, "L")}
    sizes, ops = shapes.check("lru_input", **given, steps=(steps_L, "L"), first=(first_BT, "BT")), arrays.of(u_BTL)
    options = {"rate": rate, "steepest": steepest}
    if ops.name == "jax":  # XLA makes it part of what is around it
        return _library(u_BTL, f_HBTJ, g_HBTJ, f_bias_L, g_bias_L, steps_L, first_BT, **options)
    name = kernels.choose("lru_input", sizes, ops.dtype_name(u_BTL), ops.device(u_BTL), backend)
    return IMPLEMENTATIONS[name](u_BTL, f_HBTJ, g_HBTJ, f_bias_L, g_bias_L, steps_L, first_BT, **options)
