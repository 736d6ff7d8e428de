"""A profile of a few steps of a training, where its context asks for one: `profile/` beside the run's other files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.backbone import Model

FOLDER = "profile"
FIRST, STEPS = 4, 3  # the first ones compile


class Profile:
    """Profiles the steps from the fourth on that are taken in this process, or what there is of them; of no model, nothing."""

    def __init__(self, out: Path, model: Model | None) -> None:
        self.folder, self.model = out / FOLDER, model
        self.turns = 0
        self.end: Callable[[], None] | None = None

    def turn(self) -> None:
        """A step is about to be taken."""
        self.turns += 1
        if self.model is not None and self.turns == FIRST:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.end = self.model.framework.start_profile(self.folder)
        elif self.turns == FIRST + STEPS:
            self._stop()

    def _stop(self) -> None:
        if self.end is not None:
            end, self.end = self.end, None
            end()

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
