"""What the heads of a model's layers do on a few sequences: Mesa's solver (MesaNet, appendix O), Palimpsa's memory (arXiv 2602.09075).

A table a kind of layer: "internals" of Mesa's, "memory" of Palimpsa's. A row per block, head and bin of positions first..position,
over all sequences. What a token has, such as gates, is a mean over the bin's tokens; what a state has is of the state behind the bin's last token, a
mean over sequences: the condition of H_t + Lambda; the importance of Palimpsa's entries, and their ratio (most - least) / least.

Shapes: T time, P positions, H heads, K key size, V value size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stages import schemas

if TYPE_CHECKING:
    from models.backbone import Model
    from stages.evaluation.sequences import Sequence

Found = Mapping[str, np.ndarray]  # a layer's internals on one sequence, see its `internals`
Span = tuple[int, int]
Row = dict[str, Any]

TOLERANCE = 1e-3  # of a token's first residual, that solvers are asked for (MesaNet's)


@dataclass(frozen=True)
class Kind:
    """A kind of layer. table: its rows' schema. tokens: what every token has, [1, T, H]. states: -> column: [P, H] of the states behind
    positions. heads: -> column: [H], the same for all sequences. Columns that a layer has nothing for are null."""

    table: str
    tokens: tuple[str, ...]
    states: Callable[[Found], dict[str, np.ndarray]]
    heads: Callable[[Found], dict[str, np.ndarray]] = lambda found: {}


def _condition(found: Found) -> dict[str, np.ndarray]:
    eigenvalues_PHK = np.linalg.eigvalsh(found["system"][0].astype(np.float64))  # rising
    return {"condition": eigenvalues_PHK[..., -1] / eigenvalues_PHK[..., 0]}


def _lambda(found: Found) -> dict[str, np.ndarray]:
    lam_HK = found["lambda"]
    return {"lambda_low": lam_HK.min(-1), "lambda_mean": lam_HK.mean(-1), "lambda_high": lam_HK.max(-1)}


def _importance(found: Found) -> dict[str, np.ndarray]:
    if "importance" not in found:
        return {}
    entries_PHN = found["importance"][0].astype(np.float64)
    entries_PHN = entries_PHN.reshape(*entries_PHN.shape[:2], -1)
    low, mean, high = entries_PHN.min(-1), entries_PHN.mean(-1), entries_PHN.max(-1)
    return {"importance_low": low, "importance_mean": mean, "importance_high": high, "ratio": (high - low) / low}


MESA = Kind("internals", ("gamma", "beta", "steps", "cosine"), _condition, _lambda)
PALIMPSA = Kind("memory", ("log_window", "beta"), _importance)
KINDS = (MESA, PALIMPSA)


class Heads:
    """A model with some weights, looked at over sequences one at a time. spans: the bins of positions."""

    def __init__(self, model: Model, weights: Mapping[str, np.ndarray], device: str, *, precision: str, spans: list[Span]) -> None:
        self.model, self.spans, self.count = model, spans, 0
        self.params = model.framework.to_arrays(weights, device)
        self.dtype = model.ops.bfloat16 if precision == "bfloat16" else None
        self.blocks: dict[int, Block] = {}

    def add(self, one: Sequence) -> None:
        """Look at one more sequence."""
        from models import internals

        given = {"tolerance": TOLERANCE, "segments": None if one.segments is None else one.segments[None], "dtype": self.dtype}
        lasts = tuple(last for _, last in self.spans)
        for block, found in internals.look(self.model, self.params, one.tokens[None, :-1], lasts, **given).items():
            self.blocks.setdefault(block, Block(MESA if "system" in found else PALIMPSA)).add(found, self.spans)
        self.count += 1

    def rows(self) -> dict[str, list[Row]]:
        """Table -> its rows so far, of the kinds that the model has."""
        found: dict[str, list[Row]] = {}
        for kind in KINDS:
            for block, seen in self.blocks.items():
                if seen.kind is kind:
                    found.setdefault(kind.table, []).extend(seen.rows(block, self.spans, self.count))
        return found


class Block:
    """Sums over sequences of what a block's layer does."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.sums: dict[str, np.ndarray] = {}  # [P, H]
        self.heads: dict[str, np.ndarray] = {}

    def add(self, found: Found, spans: list[Span]) -> None:
        """One sequence's."""
        here = {name: found[name][0] for name in self.kind.tokens if name in found}
        means = {name: np.stack([x[first - 1 : last].mean(0, dtype=np.float64) for first, last in spans]) for name, x in here.items()}
        for name, value_PH in (means | self.kind.states(found)).items():
            self.sums[name] = self.sums.get(name, 0.0) + value_PH
        self.heads = self.kind.heads(found)

    def rows(self, block: int, spans: list[Span], count: int) -> list[Row]:
        """A row a head and bin."""
        columns = schemas.COLUMNS[self.kind.table]
        found = []
        for head in range(next(iter(self.sums.values())).shape[1]):
            for place, (first, last) in enumerate(spans):
                own = {"block": block, "head": head, "first": first, "position": last, "sequences": count}
                own |= {name: float(values[place, head]) / count for name, values in self.sums.items()}
                own |= {name: float(values[head]) for name, values in self.heads.items()}
                found.append(dict.fromkeys(columns) | own)
        return found


def bins(length: int) -> list[Span]:
    """(first, last) of positions 1..length, each last twice the one before, and the length."""
    lasts = [1 << power for power in range(length.bit_length()) if 1 << power < length] + [length]
    return list(zip([1, *(last + 1 for last in lasts[:-1])], lasts, strict=True))
