"""`evaluation:` of params.yaml, and what an evaluation's spec holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, StringConstraints, model_validator

from stages import engine
from stages.spec import Strict
from stages.tasks.entry import Scoring

if TYPE_CHECKING:
    from models.backbone import Model

VALIDATION = "validation"
TRAINED = ""  # the setting that is none: solved as in training
BATCH_TOKENS = 1 << 15

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]


class Setting(Strict):
    """How a layer's solver runs in inference; what is not given is as in training.

    steps: its cap. eps: its tolerance. criterion: what that is relative to (see the layer). solve: False reads out without it.
    """

    steps: int | None = Field(default=None, ge=0)
    eps: float | None = Field(default=None, ge=0)
    criterion: str | None = None
    solve: bool | None = None

    @model_validator(mode="after")
    def _something(self) -> Setting:
        if not self.options():
            raise ValueError("a setting gives at least one of steps, eps, criterion, solve")
        return self

    def options(self) -> dict[str, Any]:
        """What it changes, by the names of the layer's own options."""
        return self.model_dump(exclude_none=True)


class Evaluation(Strict):
    """`evaluation:` of params.yaml.

    lengths: of the windows that documents are cut into. settings: name -> how solvers run, each evaluated besides as trained.
    settings_lengths: of the lengths, those at which it is; null: all. Validation rows have their own.
    internals: validation sequences on which layers that can are looked at inside; 0: none.
    batch_tokens: tokens scored at once; never in a spec (nor in `model_dump`), since it changes no result beyond rounding.
    """

    lengths: list[Annotated[int, Field(ge=1)]] = Field(min_length=1)
    settings: dict[Name, Setting] = {}
    settings_lengths: list[int] | None = None
    internals: int = Field(default=0, ge=0)
    batch_tokens: int = Field(default=BATCH_TOKENS, ge=1, exclude=True)

    @model_validator(mode="after")
    def _one_of_each(self) -> Evaluation:
        if twice := sorted({length for length in self.lengths if self.lengths.count(length) > 1}):
            raise ValueError(f"length {twice[0]} is listed twice")
        if strangers := sorted(set(self.settings_lengths or []) - set(self.lengths)):
            raise ValueError(f"settings_lengths has {strangers[0]}, which is none of the lengths {', '.join(map(str, self.lengths))}")
        return self


class Asked(Scoring):
    """A task as a spec has it. code: its kind's version. group: the mean that its score goes into. settings: it is evaluated under besides."""

    code: int = 1
    group: str | None = None
    settings: list[Name] = []


class Parameters(Strict):
    """What an evaluation's spec holds: its cell's model, what it was trained with, and what is evaluated."""

    model: dict[str, Any]
    scale: dict[str, int]
    vocab_size: int = Field(ge=1)
    bos: int = Field(ge=0)
    sequence_length: int = Field(ge=1)
    reset: bool = False
    precision: engine.Precision = "float32"
    lengths: list[Annotated[int, Field(ge=1)]]
    settings: dict[Name, Setting] = {}
    settings_lengths: list[int] | None = None
    internals: int = Field(default=0, ge=0)
    internals_code: int = 1  # the version of what is looked at
    tasks: dict[str, Asked] = {}


def takes(model: Model, setting: Setting) -> bool:
    """Whether some layer of the model has what a setting sets."""
    return any(set(setting.options()) <= set(layer.options()) for layer in model.layers)
