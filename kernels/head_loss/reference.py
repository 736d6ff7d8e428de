"""The loss as it is written down, all logits at once.

Shapes: N tokens, D width, V vocabulary.
"""

from typing import Any

from kernels import arrays
from kernels.head_loss import SOFT_CAP

Array = Any  # torch.Tensor or jax.Array


def head_loss(x_ND: Array, embedding_VD: Array, target_N: Array, weight_N: Array) -> tuple[Array, Array]:
    """See `kernels.head_loss.head_loss`."""
    ops = arrays.of(x_ND)
    score_NV = ops.einsum("nd,vd->nv", x_ND, ops.cast(embedding_VD, x_ND.dtype), accumulate=ops.working_dtype(x_ND))
    nll_N = ops.softmax_cross_entropy(SOFT_CAP * ops.tanh(score_NV / SOFT_CAP), target_N)
    return ops.sum(nll_N * weight_N, 0), ops.stop_gradient(nll_N)
