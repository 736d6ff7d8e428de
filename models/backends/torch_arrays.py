"""Torch: numpy arrays as tensors, and back."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch


def to_arrays(values: Mapping[str, np.ndarray], device: str = "cpu") -> dict[str, torch.Tensor]:
    """numpy arrays as tensors on a device."""
    return {name: torch.from_numpy(np.array(value)).to(device) for name, value in values.items()}


def to_numpy(value: torch.Tensor) -> np.ndarray:
    """A copy on the host."""
    return value.detach().to("cpu", copy=True).numpy()
