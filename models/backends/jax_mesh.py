"""Devices in a mesh, and which part of each array a device has.

Two axes, "data" and "fsdp". Rows of a batch are split over both. A parameter is split over "fsdp" along the axis that RULES names
(ZeRO, stage 3; Rajbhandari et al. 2020, arXiv 1910.02054): each block's weights are gathered when they are used, and AdamW's moments
and update stay split. With fsdp 1 every device has everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.parameters import Parameter

AXES = ("data", "fsdp")
RULES = {"width": "fsdp"}
"""The mesh's axis for each named axis of a parameter; axes that are not named here are whole on every device."""


@dataclass(frozen=True)
class Layout:
    """A mesh of devices."""

    mesh: Mesh

    @classmethod
    def of(cls, devices: list[jax.Device], *, fsdp: int = 1) -> Layout:
        """Raises ValueError where `fsdp` does not divide the devices."""
        if fsdp < 1 or len(devices) % fsdp:
            raise ValueError(f"fsdp is {fsdp}, which does not divide {len(devices)} devices; give a divisor of them.")
        return cls(Mesh(np.array(devices).reshape(-1, fsdp), AXES))

    @property
    def size(self) -> int:
        """How many devices."""
        return self.mesh.size

    def spec(self, parameter: Parameter) -> P:
        """How a parameter is split: along its first axis that has a rule and that the mesh's axis divides."""
        axis = self._axis(parameter)
        return P(*(RULES[name] if place == axis else None for place, name in enumerate(parameter.axes)))

    def _axis(self, parameter: Parameter) -> int | None:
        for place, (name, size) in enumerate(zip(parameter.axes, parameter.shape, strict=True)):
            if name in RULES and self.mesh.shape[RULES[name]] > 1 and size % self.mesh.shape[RULES[name]] == 0:
                return place
        return None

    def rows(self, count: int) -> P:
        """How `count` rows are split: over all devices where those divide them, else not at all."""
        return P(AXES) if count % self.size == 0 else P()

    def put(self, values: Mapping[str, np.ndarray], table: Mapping[str, Parameter]) -> dict[str, jax.Array]:
        """Copies of a table's arrays, each device having its part."""
        return {name: jax.device_put(np.array(value), self.sharding(table[name])) for name, value in values.items()}

    def sharding(self, parameter: Parameter | None = None) -> NamedSharding:
        """Of a parameter; None: of what every device has whole."""
        return NamedSharding(self.mesh, P() if parameter is None else self.spec(parameter))

    # Inside jax.shard_map
    def gather(self, parameter: Parameter, x: jax.Array) -> jax.Array:
        """The whole of a parameter, from every device's part. Its gradient is summed over "fsdp", and each device has its part of it."""
        axis = self._axis(parameter)
        return x if axis is None else jax.lax.all_gather(x, RULES[parameter.axes[axis]], axis=axis, tiled=True)

    def sum_gradient(self, parameter: Parameter, gradient: jax.Array) -> jax.Array:
        """A parameter's gradient over all rows, from that over each device's rows, where `gather` has not summed it."""
        summed = () if self._axis(parameter) is None else (RULES[parameter.axes[self._axis(parameter)]],)
        return jax.lax.psum(gradient, tuple(axis for axis in AXES if axis not in summed))

    def sum(self, values: Any) -> Any:
        """Over all devices."""
        return jax.lax.psum(values, AXES)

    def mean(self, values: Any) -> Any:
        """Over all devices."""
        return jax.lax.pmean(values, AXES)
