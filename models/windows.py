"""How long each layer remembers: the median memory window, N_t = 1 / (1 - gamma_t), by which Palimpsa chooses the layers of a
trained model that it replaces (arXiv 2602.09075).

Shapes: B batch, T time, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from models.backbone import NORM_EPSILON, Model
from models.layers.layer import Array, Layer
from models.parameters import behind


def memory_windows(model: Model, params: Mapping[str, Array], tokens_BT: np.ndarray, segments_BT: np.ndarray | None = None) -> list[float]:
    """Tokens that each layer remembers: the median over sequences, positions and heads.

    params: by the names of the model's table. tokens_BT: integers. segments_BT: see Model.forward.
    Raises ValueError where a layer has no forget gate.
    """
    for layer in model.layers:
        if not layer.forgets:
            raise ValueError(f"Layer {layer.name!r} has no forget gate for each head, and so no memory window to go by.")
    medians: list[float] = []

    def measured(block: Callable, layer: Layer) -> Callable:
        def run(layer: Layer, p: Mapping[str, Array], x_BTD: Array, *rest: object) -> tuple:
            z_BTD = model.ops.rms_norm(x_BTD, p["mixer_norm"], eps=NORM_EPSILON)
            log_gamma_BTH = model.framework.to_numpy(layer.log_forget(behind("mixer.", p), z_BTD, ops=model.ops))
            with np.errstate(divide="ignore"):  # a gate that is wide open remembers for ever
                medians.append(float(np.median(1 / np.abs(np.expm1(log_gamma_BTH.astype(np.float64))))))
            return block(layer, p, x_BTD, *rest)

        return run

    model.stream(params, tokens_BT, segments=segments_BT, transform=measured)
    return medians


def longest(windows: list[float], count: int) -> list[int]:
    """The numbers of the `count` layers with the longest windows, in the order of the depth; of equal ones the earlier."""
    return sorted(sorted(range(len(windows)), key=lambda index: -windows[index])[:count])
