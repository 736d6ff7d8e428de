"""Units of text: a set's losses at a length under a setting.

perplexity.parquet is over every window, domains.parquet by the documents' domains, in a set that has several. positions.parquet is over
the windows that start at their document's start (`start` 0 in nll.parquet), so that position k is the document's k-th token and the mean
so far (MesaNet, Eq. 54) that of its first L tokens. Position k of a window is the k-th token scored; a target that is BOS is not scored.
A loss that is not a number, from a model that fails there, counts as infinite.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stages import measures, schemas
from stages.evaluation import sequences
from stages.evaluation.parameters import TRAINED, VALIDATION, Parameters, takes
from stages.evaluation.scorer import Scorer, Solver
from stages.evaluation.sequences import Sequence
from stages.evaluation.unit import labelled, write
from stages.spec import Spec

if TYPE_CHECKING:
    import pyarrow as pa

    from models.backbone import Model

DOMAINS = "domains.parquet"


@dataclass(frozen=True)
class Texts:
    """A set at a length under a setting. input: the set's name among the spec's inputs."""

    input: str
    length: int
    setting: str
    options: dict[str, Any]
    key: str

    @property
    def set(self) -> str:
        return self.input.removeprefix("evaluation/")

    @property
    def name(self) -> str:
        """Its folder's."""
        return "-".join([self.set, str(self.length), *([self.setting] if self.setting else [])])

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.input,)

    def make(self, folder: Path, inputs: dict[str, Path], scorer: Scorer) -> None:
        """Score the set's sequences: nll, positions, perplexity and, where there are several, domains.parquet."""
        solver, everything, from_start = Solver(), Positions(), Positions()
        domains: dict[str, Domain] = {}
        number = 0

        def scored() -> Iterator[pa.RecordBatch]:
            nonlocal number
            for pool in sequences.pools(self._sequences(inputs[self.input], scorer.parameters)):
                nlls = scorer.losses(pool, longest=self.length, setting=self.options, solver=solver)
                everything.add(nlls)
                for nll, sequence in zip(nlls, pool, strict=True):
                    domains.setdefault(sequence.source, Domain()).add(nll)
                from_start.add([nll for nll, sequence in zip(nlls, pool, strict=True) if sequence.start == 0])
                columns = {
                    "set": [self.set] * len(pool),
                    "source": [sequence.source for sequence in pool],
                    "length": [self.length] * len(pool),
                    "sequence": range(number, number + len(pool)),
                    "start": [sequence.start for sequence in pool],
                    "nll": nlls,
                }
                number += len(pool)
                yield from schemas.batches([columns], schema)

        schema = schemas.schema("nll")
        schemas.write(folder / "nll.parquet", scored(), name="nll", key=self.key, schema=schema)
        length = len(from_start.count)
        write(folder / "positions.parquet", "positions", self.key, {
            "set": [self.set] * length,
            "length": [self.length] * length,
            "position": range(1, length + 1),
            "nll_sum": from_start.nll_sum,
            "count": from_start.count,
        })  # fmt: skip
        tokens = int(everything.count.sum())
        nll = float(everything.nll_sum.sum()) / tokens if tokens else float("nan")
        write(folder / "perplexity.parquet", "perplexity", self.key, {
            "set": [self.set],
            "length": [self.length],
            "setting": [TRAINED],
            "sequences": [number],
            "tokens": [tokens],
            "nll": [nll],
            "perplexity": [float(np.exp(np.float64(nll)))],
            "steps_taken": [solver.mean("cg_steps")],
            "residual": [solver.mean("cg_residual")],
        })  # fmt: skip
        if len(domains) > 1:
            own = {"set": self.set, "length": self.length, "setting": TRAINED}
            write(
                folder / DOMAINS,
                "domains",
                self.key,
                [own | {"source": name} | domain.record() for name, domain in sorted(domains.items())],
            )

    def _sequences(self, folder: Path, parameters: Parameters) -> Iterator[Sequence]:
        """What is scored, in the set's order."""
        if self.input == VALIDATION:
            return sequences.rows(folder, length=parameters.sequence_length, reset=parameters.reset)
        return sequences.windows(sequences.documents(folder), length=self.length, bos=parameters.bos)

    def tables(self, folder: Path) -> dict[str, pa.Table]:
        """Perplexity and domains with the setting's name; positions as trained."""
        names = ["perplexity", *(["domains"] if (folder / DOMAINS).exists() else [])]
        found = {name: labelled(schemas.read(folder / f"{name}.parquet", name), "setting", self.setting) for name in names}
        return found | ({"positions": schemas.read(folder / "positions.parquet", "positions")} if self.setting == TRAINED else {})


def texts(spec: Spec, parameters: Parameters, model: Model) -> list[Texts]:
    """Every unit of text of an evaluation: the validation rows, then the sets by name, at each length; as trained, then each setting where it is asked."""
    settings = {TRAINED: {}} | {name: setting.options() for name, setting in parameters.settings.items() if takes(model, setting)}
    sets = [(VALIDATION, parameters.sequence_length)] if VALIDATION in spec.inputs else []
    sets += [(name, length) for name in sorted(spec.inputs) if name.startswith("evaluation/") for length in parameters.lengths]
    if f"evaluation/{VALIDATION}" in spec.inputs:
        raise ValueError(f"A text set cannot be named {VALIDATION!r}: the packed validation rows are. Give it another name.")
    return [
        Texts(
            name,
            length,
            setting,
            options,
            spec.unit_key(weights=spec.inputs["weights"], set=spec.inputs[name], length=length, setting=options),
        )
        for name, length in sets
        for setting, options in settings.items()
        if setting == TRAINED or name == VALIDATION or parameters.settings_lengths is None or length in parameters.settings_lengths
    ]


@dataclass
class Domain:
    """Running sums of the losses of one kind of text."""

    sequences: int = 0
    tokens: int = 0
    nll_sum: float = 0.0

    def add(self, nll: np.ndarray) -> None:
        scored = nll[~np.isnan(nll)].astype(np.float64)
        self.sequences, self.tokens, self.nll_sum = self.sequences + 1, self.tokens + len(scored), self.nll_sum + float(scored.sum())

    def record(self) -> dict[str, float]:
        nll = self.nll_sum / self.tokens if self.tokens else float("nan")
        with np.errstate(over="ignore"):
            return {"sequences": self.sequences, "tokens": self.tokens, "nll": nll, "perplexity": float(np.exp(np.float64(nll)))}


@dataclass
class Positions:
    """Running sums of losses by position."""

    nll_sum: np.ndarray = field(default_factory=lambda: np.zeros(0))
    count: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def add(self, nlls: list[np.ndarray]) -> None:
        parts = [(self.nll_sum, self.count), measures.by_position(nlls)]
        length = max(len(count) for _, count in parts)
        self.nll_sum, self.count = (sum(np.pad(array, (0, length - len(array))) for array in arrays) for arrays in zip(*parts, strict=True))
