"""Devices in a mesh, of one process or of several, and which part of each array a device has.

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
from jax.experimental import multihost_utils
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

    def rows_here(self, count: int) -> slice:
        """Which of `count` rows this process's devices need: the shortest range that holds them."""
        parts = [index[0].indices(count) for index in self._of_rows(count).addressable_devices_indices_map((count,)).values()]
        return slice(min(start for start, _, _ in parts), max(stop for _, stop, _ in parts))

    def put_rows(self, rows: np.ndarray, first: int, count: int) -> jax.Array:
        """A batch of `count` rows, each device having its own, from those that this process has, the first of which is the batch's `first`."""
        sharding = self._of_rows(count)
        return jax.make_array_from_callback((count, *rows.shape[1:]), sharding, lambda index: rows[_from(index[0], count, first)])

    def _of_rows(self, count: int) -> NamedSharding:
        return NamedSharding(self.mesh, self.rows(count))

    def put(self, values: Mapping[str, np.ndarray], table: Mapping[str, Parameter]) -> dict[str, jax.Array]:
        """Copies of a table's arrays, each device having its part."""
        return {name: self.place(value, table[name]) for name, value in values.items()}

    def place(self, value: np.ndarray, parameter: Parameter | None = None) -> jax.Array:
        """A copy of an array, each device having its part of the parameter (None: all)."""
        if self.here:
            return jax.device_put(np.array(value), self.sharding(parameter))
        return jax.make_array_from_callback(np.shape(value), self.sharding(parameter), lambda index: np.array(value[index]))

    @property
    def here(self) -> bool:
        """Whether all devices are this process's own."""
        return self.sharding().is_fully_addressable

    def whole(self, value: jax.Array) -> np.ndarray:
        """A copy on the host, of all that the processes have of it; all must ask."""
        if value.is_fully_addressable or value.is_fully_replicated:
            return np.array(value)
        return np.asarray(multihost_utils.process_allgather(value, tiled=True))

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


def _from(rows: slice, count: int, first: int) -> slice:
    """A range of a batch's rows among those from `first` on."""
    start, stop, _ = rows.indices(count)
    return slice(start - first, stop - first)
