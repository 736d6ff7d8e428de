"""The head of a language model and its loss: soft-capped logits and their cross-entropy, without all logits at once."""

import importlib
from typing import Any

Array = Any  # torch.Tensor

SOFT_CAP = 30.0
"""Logits are SOFT_CAP tanh(z / SOFT_CAP)."""


def head_loss(x_ND: Array, embedding_VD: Array, target_N: Array, weight_N: Array) -> tuple[Array, Array]:
    """(sum over n of weight_n nll_n, nll_N), float32; nll carries no gradient.

    x: normalised stream, float32 or bfloat16. embedding: float32. target: int64. weight: float32. torch.
    """
    return importlib.import_module("kernels.head_loss.chunked").HeadLoss.apply(x_ND, embedding_VD, target_N, weight_N)
