"""Units of tasks: a task's items at a number of shots under a setting, asked as stages/tasks/ has it: tasks.parquet (an item and draw a row), scores.parquet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages import schemas
from stages.evaluation.parameters import TRAINED, Asked, Parameters, takes
from stages.evaluation.scorer import Scorer
from stages.evaluation.unit import labelled
from stages.spec import Spec
from stages.tasks.entry import SCHEMAS

if TYPE_CHECKING:
    import pyarrow as pa

    from models.backbone import Model


@dataclass(frozen=True)
class TaskUnit:
    """A task at a number of shots under a setting. given: the names of the spec's inputs that hold its items, and its examples where it has any of their own."""

    task: str
    asked: Asked
    shots: int
    setting: str
    options: dict[str, Any]
    given: tuple[str, ...]
    key: str

    @property
    def name(self) -> str:
        """Its folder's: no set's, which have no @."""
        return "-".join([f"{self.task}@{self.shots}", *([self.setting] if self.setting else [])])

    @property
    def inputs(self) -> tuple[str, ...]:
        return ("vocabulary", *self.given)

    def make(self, folder: Path, inputs: dict[str, Path], scorer: Scorer) -> None:
        """Ask the items."""
        from models.reader import reader
        from stages.tasks import unit
        from stages.tasks.engine import Engine

        def seen(items: int) -> None:
            scorer.seen(items=items)
            scorer.poll()

        items, examples = items_of(self.task)
        schema, window = SCHEMAS[self.asked.kind], self.asked.window or scorer.parameters.sequence_length
        unit.make(
            folder,
            name=self.task,
            key=self.key,
            scoring=self.asked,
            shots=self.shots,
            items=unit.load(inputs[items], schema),
            examples=unit.load(inputs[examples], schema) if examples in self.given else None,
            engine=Engine(
                reader(scorer.trainer, self.options or None), scorer.tokenizer(inputs["vocabulary"]), window, scorer.batch_tokens, seen
            ),
        )

    def tables(self, folder: Path) -> dict[str, pa.Table]:
        """Scores, with the names of the setting and the group."""
        scores = schemas.read(folder / "scores.parquet", "scores")
        return {"scores": labelled(labelled(scores, "setting", self.setting), "group", self.asked.group)}


def items_of(task: str) -> tuple[str, str]:
    """The inputs' names of a task's items and of its examples."""
    return f"items/{task}", f"items/{task}.examples"


def task_units(spec: Spec, parameters: Parameters, model: Model) -> list[TaskUnit]:
    """Every unit of an evaluation's tasks, by name, at each number of shots; as trained, then under the task's settings."""
    found = []
    for task, asked in sorted(parameters.tasks.items()):
        settings = {TRAINED: {}} | {
            name: parameters.settings[name].options() for name in asked.settings if takes(model, parameters.settings[name])
        }
        given = {name: spec.inputs[name] for name in items_of(task) if name in spec.inputs}
        scoring = asked.model_dump(exclude={"shots", "group", "settings"}, exclude_defaults=True)
        if not max(asked.shots):
            scoring = {name: value for name, value in scoring.items() if name != "draws"}
        if asked.window is None:
            scoring["window"] = parameters.sequence_length
        for shots in asked.shots:
            for setting, options in settings.items():
                key = spec.unit_key(weights=spec.inputs["weights"], task=task, items=given, scoring=scoring, shots=shots, setting=options)
                found.append(TaskUnit(task, asked, shots, setting, options, tuple(given), key))
    return found
