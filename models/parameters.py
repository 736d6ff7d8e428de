"""The table of a model's parameters: shapes, initialisation, decay. Counts, memory and FLOPs follow from it, without a framework.

Initial values are made by numpy, each from a stream of its own: (seed, sha256 of the parameter's name). So they are the
same whatever the framework, and adding a parameter changes no other.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

MANY = 1 << 24
"""Parameters that are worth drawing by several threads."""

Initialiser = Callable[[np.random.Generator, tuple[int, ...], int], np.ndarray]
"""(random stream, shape, number of blocks) -> float32 values."""


def normal(deviation: float) -> Initialiser:
    """N(0, deviation^2)."""
    return lambda random, shape, blocks: random.standard_normal(shape, np.float32) * np.float32(deviation)


def constant(value: float) -> Initialiser:
    """The same value everywhere."""
    return lambda random, shape, blocks: np.full(shape, value, np.float32)


def fan_in(random: np.random.Generator, shape: tuple[int, ...], blocks: int) -> np.ndarray:
    """N(0, 1 / fan_in) for weights [..., in, out]; a depthwise convolution's [window, channels] has fan-in `window` (MesaNet, G.2)."""
    return normal(shape[-2] ** -0.5)(random, shape, blocks)


def fan_in_transposed(random: np.random.Generator, shape: tuple[int, ...], blocks: int) -> np.ndarray:
    """N(0, 1 / fan_in) for weights [out, in]: the embedding [vocabulary, width], which is the head transposed."""
    return normal(shape[-1] ** -0.5)(random, shape, blocks)


def residual(random: np.random.Generator, shape: tuple[int, ...], blocks: int) -> np.ndarray:
    """Fan-in normal with its variance times 2 / blocks: for matrices that write to the residual stream (MesaNet, G.2)."""
    return normal((2 / blocks / shape[-2]) ** 0.5)(random, shape, blocks)


zeros, ones = constant(0.0), constant(1.0)


@dataclass(frozen=True)
class Parameter:
    """One array of a model.

    shape: as stored, float32. init: how it begins. decay: whether AdamW's weight decay applies.
    axes: a name for each dimension ("width", "inner", "heads", "key", "mlp", "vocabulary", "window", ...), which sharding goes by.
    """

    shape: tuple[int, ...]
    init: Initialiser = fan_in
    decay: bool = True
    axes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.axes) == len(self.shape), (self.shape, self.axes)

    @property
    def size(self) -> int:
        """Number of scalars."""
        return math.prod(self.shape)


Table = dict[str, Parameter]


def count(table: Mapping[str, Parameter]) -> int:
    """Scalars in a table."""
    return sum(parameter.size for parameter in table.values())


def prefixed(prefix: str, table: Mapping[str, Parameter]) -> Table:
    """The same table, each name behind `prefix.`."""
    return {f"{prefix}.{name}": parameter for name, parameter in table.items()}


def behind(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The entries whose names start with the prefix, named without it."""
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def initialise(table: Mapping[str, Parameter], *, seed: int, blocks: int) -> dict[str, np.ndarray]:
    """float32 initial values of every parameter of a model with `blocks` blocks."""

    def stream(name: str) -> np.random.Generator:
        return np.random.default_rng([seed, int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "big")])

    def initial(name: str) -> np.ndarray:
        return table[name].init(stream(name), table[name].shape, blocks)

    if count(table) < MANY:
        return {name: initial(name) for name in table}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(table, pool.map(initial, table), strict=True))
