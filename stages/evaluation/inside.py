"""A unit of what a model's layers do inside, on a few validation sequences: a file a kind of layer, see stages/heads.py."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from stages.evaluation import sequences
from stages.evaluation.parameters import VALIDATION, Parameters
from stages.evaluation.scorer import Scorer
from stages.evaluation.unit import write
from stages.heads import Heads, bins
from stages.spec import Spec

if TYPE_CHECKING:
    import pyarrow as pa

    from models.backbone import Model

FOLDER = "internals"


@dataclass(frozen=True)
class Inside:
    """The unit, of the first `count` validation rows."""

    count: int
    key: str
    name: str = FOLDER
    inputs: tuple[str, ...] = (VALIDATION,)

    def make(self, folder: Path, inputs: dict[str, Path], scorer: Scorer) -> None:
        """Look at the sequences, one at a time."""
        parameters, trainer = scorer.parameters, scorer.trainer
        spans = bins(parameters.sequence_length)
        heads = Heads(trainer.model, trainer.weights(), scorer.device, precision=parameters.precision, spans=spans)
        rows = sequences.rows(inputs[VALIDATION], length=parameters.sequence_length, reset=parameters.reset)
        for one in islice(rows, self.count):
            heads.add(one)
            scorer.seen(sequences=heads.count)
            scorer.poll()
        for table, rows in heads.rows().items():
            write(folder / f"{table}.parquet", table, self.key, rows)

    def tables(self, folder: Path) -> dict[str, pa.Table]:
        """Its files stay its own."""
        return {}


def inside_units(spec: Spec, parameters: Parameters, model: Model) -> list[Inside]:
    """The unit, where it is wanted, there are validation rows, and a layer has any internals."""
    from models import internals

    if not parameters.internals or VALIDATION not in spec.inputs or not internals.can(model):
        return []
    depends_on = {
        "weights": spec.inputs["weights"],
        "set": spec.inputs[VALIDATION],
        "internals": parameters.internals,
        "code": parameters.internals_code,
    }
    return [Inside(parameters.internals, spec.unit_key(**depends_on))]
