"""A training run's checkpoints: `checkpoints/<step>.safetensors`, the last two kept; any attempt's newest that verifies is resumed.

A checkpoint's metadata says whose it is (the spec's key), after which step it was made, and how long the history's log was then.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from models import checkpoint

FOLDER = "checkpoints"
KEPT = 2
Others = Callable[[Path, dict[str, str]], int]


@dataclass(frozen=True)
class Checkpoint:
    """One that verified. out: the folder of the attempt that made it. history: the length of its log, in bytes."""

    out: Path
    step: int
    history: int
    state: dict[str, np.ndarray]


class Checkpoints:
    """The checkpoints of the run of `key`: written under `out`, read from any attempt's folder."""

    def __init__(self, out: Path, key: str) -> None:
        self.out, self.key = out, key
        self.kept: list[Path] = []

    def save(self, state: dict[str, np.ndarray], *, step: int, history: int, others: Others | None = None) -> None:
        """Write one, whole or not at all, then remove all but the last two.

        others: has other processes write what they have of the state, beside it; it counts once this one's, the last, is there.
        """
        path = _path(self.out, step)
        facts = {"key": self.key, "step": str(step), "history": str(history)}
        if others is not None:
            facts |= {checkpoint.SAVE: uuid.uuid4().hex}
            facts |= {checkpoint.PARTS: str(others(path, facts))}
        checkpoint.save(path, state, facts)
        self._keep(path)
        kept = {other.stem for other in self.kept}
        for other in path.parent.iterdir():
            if other.name.split(".")[0] not in kept:
                other.unlink()

    def usable(self, folders: Iterable[Path], note: Callable[[str], None]) -> Iterator[Checkpoint]:
        """This run's checkpoints under `folders`, newest first (at a tie, the folder named first). `note` is told of each that is passed over."""
        found = [
            (int(path.stem), -place, path)
            for place, folder in enumerate(folders)
            for path in (folder / FOLDER).glob("*.safetensors")
            if path.stem.isdigit()
        ]
        for step, _, path in sorted(found, reverse=True):
            try:
                state, facts = checkpoint.load_together(path)
                whose, stated, history = facts["key"], int(facts["step"]), int(facts["history"])
            except (ValueError, KeyError) as error:
                note(f"The checkpoint of step {step} is passed over: {error}")
                continue
            if whose != self.key or stated != step:
                note(f"The checkpoint {path} is passed over: it belongs to other parameters (key {whose[:12]}, not {self.key[:12]}).")
                continue
            yield Checkpoint(path.parent.parent, step, history, state)

    def resumed(self, found: Checkpoint) -> None:
        """Count a checkpoint of our own that the run goes on from among those to keep."""
        if found.out == self.out:
            self._keep(_path(self.out, found.step))

    def remove(self) -> None:
        """Remove all of them: the run is done."""
        shutil.rmtree(self.out / FOLDER, ignore_errors=True)

    def _keep(self, path: Path) -> None:
        self.kept = [*(other for other in self.kept if other != path), path][-KEPT:]


def _path(out: Path, step: int) -> Path:
    return out / FOLDER / f"{step:08d}.safetensors"
