"""What heads do while a model is trained: looks at them (stages/heads.py) before the first step, after every so many, and after the last.

A look reads the first validation rows by the weights as they are then, beside the training, which it changes in nothing. It is a line of the
history's log, and so there exactly once, whatever ends the training. At the end they are a table a kind of layer in the weights' artifact:
internals_course.parquet of Mesa's heads, memory_course.parquet of Palimpsa's, with a row per look, block and head, over all positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages import artifact, schemas
from stages.evaluation import sequences
from stages.evaluation.parameters import VALIDATION
from stages.evaluation.unit import write
from stages.heads import KINDS, Heads, Row
from stages.history import LOOK
from stages.spec import Spec
from stages.training import Internals, Parameters

if TYPE_CHECKING:
    from models.backbone import Model

COURSES = {kind.table: f"{kind.table}_course" for kind in KINDS}  # table -> the one of its course


def hand_on(weights: Path, out: Path, key: str) -> dict[str, str]:
    """Write the tables that a weights' artifact has into the evaluation of these weights, which is what an analysis reads. Returns file -> digest."""
    found = {}
    for table in COURSES.values():
        if (file := f"{table}.parquet") in artifact.read(weights)["files"]:
            found[file] = schemas.write(out / file, schemas.read(weights / file, table), name=table, key=key)
        else:
            (out / file).unlink(missing_ok=True)
    return found


class Course:
    """The looks of one training run; `last` is after how many steps the newest was. folder: of the validation rows."""

    def __init__(self, wanted: Internals, parameters: Parameters, spec: Spec, folder: Path | None, model: Model, device: str) -> None:
        from models import internals

        if not internals.can(model):
            raise ValueError("training.internals: no layer of this model has anything to look at; leave it out.")
        if folder is None or VALIDATION not in spec.inputs:
            raise ValueError(f"training.internals looks at validation rows, and none were given: --input {VALIDATION}=packed/validation.")
        self.wanted, self.parameters, self.model, self.device = wanted, parameters, model, device
        self.digests = {VALIDATION: artifact.read(folder, key=spec.inputs[VALIDATION], content=True)["digest"]}
        self.sequences = list(islice(sequences.rows(folder, length=parameters.sequence_length, reset=parameters.reset), wanted.rows))
        if not self.sequences:
            raise ValueError(f"{folder} has no rows for training.internals to look at: give the validation source some text.")
        self.last = -1

    def due(self, step: int) -> bool:
        """Whether a look after this many steps is wanted and was not made."""
        return step > self.last and self._wants(step)

    def _wants(self, step: int) -> bool:
        return step % self.wanted.every == 0 or step == self.parameters.steps

    def start(self) -> None:
        """Begin without any looks."""
        self.last = -1

    def resume(self, looks: Iterable[Row], step: int) -> None:
        """Go on behind the looks of a run's first `step` steps. ValueError where they are not these."""
        found = [look[LOOK] for look in looks]
        if found != [one for one in range(step + 1) if self._wants(one)]:
            raise ValueError(f"its log does not hold the looks inside of its {step} steps")
        self.last = found[-1]

    def look(self, trainer: Any, step: int) -> Row:
        """What the trainer's weights do after this many steps, as a line of the log."""
        p = self.parameters
        heads = Heads(self.model, trainer.weights(), self.device, precision=p.precision, spans=[(1, p.sequence_length)])
        for one in self.sequences:
            heads.add(one)
        self.last = step
        return {LOOK: step, "tokens": step * p.batch * p.sequence_length, "tables": heads.rows()}

    @staticmethod
    def write(out: Path, looks: Iterable[Row], key: str) -> list[str]:
        """Write the tables of these looks. Returns their files' names."""
        found: dict[str, list[Row]] = {}
        for look in looks:
            for table, rows in look["tables"].items():
                found.setdefault(COURSES[table], []).extend({"step": look[LOOK], "tokens": look["tokens"]} | row for row in rows)
        for table, rows in found.items():
            write(out / f"{table}.parquet", table, key, rows)
        return [f"{table}.parquet" for table in found]
