"""The head of a language model and its loss: soft-capped logits and their cross-entropy, without all logits at once.

    l = 30 tanh(x E^T / 30)        nll_n = log sum_v exp(l_nv) - l_n,target        total = sum_n weight_n nll_n

torch alone: in JAX, XLA fuses what is element-wise into the products by itself.

Shapes: N tokens, D width, V vocabulary.
"""

from typing import Any

import kernels
from kernels import arrays, launch, shapes

Array = Any  # torch.Tensor

SOFT_CAP = 30.0
"""Logits are SOFT_CAP tanh(z / SOFT_CAP)."""


def _chunked(*arguments: Array) -> tuple[Array, Array]:
    from kernels.head_loss import chunked  # when it is first called: importing kernels loads no framework

    return chunked.head_loss(*arguments)


def _triton(*arguments: Array) -> tuple[Array, Array]:
    from kernels.head_loss import triton

    return triton.head_loss(*arguments)


def _reference(*arguments: Array) -> tuple[Array, Array]:
    from kernels.head_loss import reference

    return reference.head_loss(*arguments)


ARRAY_FORMS = {"chunked": _chunked, "reference": _reference}
IMPLEMENTATIONS = {**ARRAY_FORMS, "triton": _triton}
kernels.offer("head_loss", {**dict.fromkeys(ARRAY_FORMS), "triton": launch.refusal})


def head_loss(x_ND: Array, embedding_VD: Array, target_N: Array, weight_N: Array, *, backend: str | None = None) -> tuple[Array, Array]:
    """(sum over n of weight_n nll_n, nll_N), float32; nll carries no gradient. The gradient is computed with the loss.

    x: normalised stream, float32 or bfloat16. embedding: float32. target: int64, each below V. weight: float32.
    Raises ValueError for shapes that disagree and for a backend that does not exist.
    """
    given = {"x": (x_ND, "ND"), "embedding": (embedding_VD, "VD"), "target": (target_N, "N"), "weight": (weight_N, "N")}
    sizes, ops = shapes.check("head_loss", **given), arrays.of(x_ND)
    run = IMPLEMENTATIONS[kernels.choose("head_loss", sizes, ops.dtype_name(x_ND), ops.device(x_ND), backend)]
    return run(x_ND, embedding_VD, target_N, weight_N)
