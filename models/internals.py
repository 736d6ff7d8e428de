"""What a model's layers do inside, block by block, on given sequences: for layers that can say so (`internals`), such as Mesa.

Shapes: B batch, T time, P positions, H heads, K key size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from models.backbone import NORM_EPSILON, Model
from models.layers.layer import Layer
from models.parameters import behind

Array = Any


def can(model: Model) -> bool:
    """Whether some layer of the model has internals."""
    return any(hasattr(layer, "internals") for layer in model.layers)


def look(
    model: Model, params: Mapping[str, Array], tokens_BT: Array, positions: tuple[int, ...], *, tolerance: float, segments: Array | None = None, dtype: Any = None
) -> dict[int, dict[str, np.ndarray]]:  # fmt: skip
    """{block: its layer's internals, as numpy arrays}, of the blocks whose layer has any. See the layer's `internals`.

    params: by the names of `model.table`. positions: tokens, counted from 1, behind which states are looked at. dtype: of the activations.
    """
    ops, blocks = model.ops, iter(range(len(model.layers)))
    found: dict[int, dict[str, np.ndarray]] = {}

    def watched(block: Callable, layer: Layer) -> Callable:
        index = next(blocks)

        def through(layer: Layer, p: Mapping[str, Array], x: Array, state: Any, segments: Array | None) -> Any:
            if hasattr(layer, "internals"):
                z = ops.rms_norm(x, p["mixer_norm"], eps=NORM_EPSILON)
                seen = layer.internals(behind("mixer.", p), z, positions, segments, tolerance=tolerance, ops=ops)
                found[index] = {name: model.framework.to_numpy(value) for name, value in seen.items()}
            return block(layer, p, x, state, segments)

        return through

    with model.framework.aside():
        model.through_blocks(params, tokens_BT, None, segments, dtype=dtype, transform=watched)
    return found
