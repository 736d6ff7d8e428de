"""Initial weights drawn where they are wanted, and Mesa's gates as training leaves them: for times, which no result depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from models.backbone import Model

if TYPE_CHECKING:
    import torch

GATES = ("trained", "initial", "full")
"""trained: 2 of 12 heads remember for hundreds of tokens and more, gamma at least 0.997, the rest spread over 0.5 to 0.99. initial: as they begin.
full: as trained, eps 0 and Lambda from 0.3 to 8 over the key's dimensions, so that every token takes all the steps that there are."""


@dataclass(frozen=True)
class Drawn(Model):
    """A model whose initial values the device draws: a billion take a GPU milliseconds and numpy a quarter of a minute. Distributions are the model's own."""

    device: str = "cpu"

    def init(self, seed: int) -> dict[str, torch.Tensor]:
        """See Model.init."""
        import torch

        stream, blocks = _Stream(seed, self.device), len(self.layers)
        values = {name: parameter.init(stream, parameter.shape, blocks) for name, parameter in self.table.items()}
        return {name: torch.as_tensor(value, device=self.device) for name, value in values.items()}


def drawn(model: Model, device: str) -> Drawn:
    """The model with its values drawn on a device."""
    return Drawn(**{field.name: getattr(model, field.name) for field in fields(model)}, device=device)


class _Stream:
    """numpy's generator, but for normal numbers, which are the device's."""

    def __init__(self, seed: int, device: str) -> None:
        import torch

        self.generator, self.plain = torch.Generator(device).manual_seed(seed), np.random.default_rng(seed)

    def standard_normal(self, shape: tuple[int, ...], dtype: Any) -> torch.Tensor:
        import torch

        return torch.randn(shape, generator=self.generator, device=self.generator.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


def setting(gates: str | None) -> dict[str, Any] | None:
    """What the solver is set to under such gates."""
    return {"eps": 0.0} if gates == "full" else None


def set_gates(layers: Mapping[str, Any], params: Mapping[str, torch.Tensor], gates: str | None) -> None:
    """Sets those of Mesa's layers among `layers`, which are named by what stands before their parameters' names. Forget gates are constant, by their
    biases; gamma is theirs before its bound, which moves it by at most 0.0025."""
    import torch

    if gates in (None, "initial"):
        return
    for prefix, layer in layers.items():
        if layer.name != "mesa":
            continue
        slow = max(1, layer.heads // 6)
        gamma = np.concatenate([np.linspace(0.998, 0.9995, slow), np.linspace(0.5, 0.99, layer.heads - slow)])
        with torch.no_grad():
            params[f"{prefix}forget"].zero_()
            params[f"{prefix}forget_bias"].copy_(torch.tensor(np.log(gamma / (1 - gamma))))
            if gates == "full":
                above = np.geomspace(0.3, 8, layer.key_size) - layer.lambda_minimum
                params[f"{prefix}lambda"].copy_(torch.tensor(np.log(np.expm1(above))).expand(layer.heads, -1))


def mixers(model: Model) -> dict[str, Any]:
    """A model's layers by what stands before their parameters' names."""
    return {f"blocks.{index}.mixer.": layer for index, layer in enumerate(model.layers)}
