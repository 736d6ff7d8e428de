"""A model's blocks stacked for a scan, so that tracing and compiling it do not take longer the deeper it is.

A stack of layers is read as runs, each a pattern that repeats: fourteen times (gla), or seven times (hawk, mesa). The parameters at
one place of a run's pattern are one array, [times, ...], and one scan goes over a run. Files keep one array a block.

Shapes: B batch, T time, D width; R times a pattern repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.backbone import Model
from models.layers.layer import Layer, State
from models.parameters import Parameter, Table, behind

Params = dict[str, jax.Array]
Gather = Callable[[Parameter, jax.Array], jax.Array]


@dataclass(frozen=True)
class Run:
    """Blocks start, start + 1, ...: a pattern of layers, `times` times over."""

    start: int
    pattern: tuple[Layer, ...]
    times: int

    def blocks(self, place: int) -> range:
        """The blocks at one place of the pattern."""
        period = len(self.pattern)
        return range(self.start + place, self.start + period * self.times, period)


def runs(layers: Sequence[Layer]) -> list[Run]:
    """The layers as runs, first to last; each the repeated pattern that covers the most blocks from there on, or one block alone."""
    found: list[Run] = []
    start = 0
    while start < len(layers):
        rest = tuple(layers[start:])
        covered = {period: period * _times(rest, period) for period in range(1, len(rest) // 2 + 1)}
        period = max((period for period in covered if covered[period] > period), key=lambda period: (covered[period], -period), default=1)
        found.append(Run(start, rest[:period], _times(rest, period)))
        start += period * found[-1].times
    return found


def _times(layers: tuple[Layer, ...], period: int) -> int:
    times = 1
    while layers[times * period : (times + 1) * period] == layers[:period]:
        times += 1
    return times


@dataclass(frozen=True)
class Stack:
    """A model over stacked parameters, "runs.RUN.PLACE.NAME" beside "embedding" and "final_norm"."""

    model: Model

    @cached_property
    def runs(self) -> list[Run]:
        return runs(self.model.layers)

    @cached_property
    def members(self) -> dict[str, list[str]]:
        """For each stacked parameter the names, in the model's table, of what it is stacked of."""
        table, found = self.model.table, {}
        for number, run in enumerate(self.runs):
            for place in range(len(run.pattern)):
                for local in behind(f"blocks.{run.blocks(place)[0]}.", table):
                    found[f"runs.{number}.{place}.{local}"] = [f"blocks.{index}.{local}" for index in run.blocks(place)]
        return found

    @cached_property
    def table(self) -> Table:
        """Every stacked parameter by name, its first axis "block"; and those that belong to no block, as they are."""
        alone = {name: parameter for name, parameter in self.model.table.items() if not name.startswith("blocks.")}
        stacked = {}
        for name, members in self.members.items():
            one = self.model.table[members[0]]
            stacked[name] = replace(one, shape=(len(members), *one.shape), axes=("block", *one.axes))
        return {**alone, **stacked}

    def stack(self, values: Mapping[str, Any], *, join: Callable[[list[Any]], Any] = np.stack) -> dict[str, Any]:
        """Arrays by the names of the model's table, stacked."""
        return {name: join([values[m] for m in self.members[name]]) if name in self.members else values[name] for name in self.table}

    def unstack(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Stacked arrays by the names of the model's table, in its order."""
        alone = {member: values[name][i] for name, members in self.members.items() for i, member in enumerate(members)}
        return {name: alone[name] if name in alone else values[name] for name in self.model.table}

    def stream(
        self, params: Params, tokens: jax.Array, states: list[State] | None = None, segments: jax.Array | None = None, *, dtype: Any = None,
        keep_states: bool = False, rematerialise: bool = False, gather: Gather = lambda parameter, x: x,
    ) -> tuple[jax.Array, list[State] | None, dict[str, jax.Array]]:  # fmt: skip
        """As `Model.stream`, over stacked parameters and states (for each run, one for each place of its pattern, [R, ...] each).

        keep_states: whether the states after the last token are wanted. rematerialise: compute what is inside a block again in the
        backward pass. gather: (a block's parameter, what this device has of it) -> the whole of it; what belongs to no block is whole.
        """
        model = self.model

        def block(index: int, layer: Layer) -> Callable[[Params, jax.Array, State], tuple]:
            def apply(p: Params, x: jax.Array, state: State) -> tuple:
                p = {local: gather(model.table[f"blocks.{index}.{local}"], value) for local, value in p.items()}
                return model.block(layer, p, x, state, segments)

            return jax.checkpoint(apply, prevent_cse=False) if rematerialise else apply

        x = model.embed(params, tokens, dtype)
        after, scalars = [], {}
        for number, run in enumerate(self.runs):
            blocks = [block(run.start + place, layer) for place, layer in enumerate(run.pattern)]

            def pattern(x: jax.Array, given: tuple, blocks: list[Callable] = blocks) -> tuple:
                ended, records = [], []
                for apply, p, state in zip(blocks, *given, strict=True):
                    x, state, record = apply(p, x, state)
                    ended.append(state)
                    records.append(record)
                return x, (ended if keep_states else None, records)

            ps = [behind(f"runs.{number}.{place}.", params) for place in range(len(blocks))]
            x, (ended, records) = jax.lax.scan(pattern, x, (ps, states[number] if states else [None] * len(blocks)))
            after.append(ended)
            for name, values in (item for record in records for item in record.items()):
                scalars.setdefault(name, []).append(values)
        means = {name: jnp.concatenate(values).mean() for name, values in scalars.items()}
        return model.normalise(params, x), after if keep_states else None, means

    def reserve(self, states: list[State], tokens: int) -> list[State]:
        """States with room for `tokens` tokens in all, where room is what they need."""
        return [
            [jax.vmap(partial(layer.reserve, tokens=tokens))(state) for layer, state in zip(run.pattern, places, strict=True)]
            for run, places in zip(self.runs, states, strict=True)
        ]
