"""What a stage is given: its spec, which is its identity, and its context, which is not."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator


class Strict(BaseModel):
    """Parameters and specs: unknown keys are mistakes, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Stopped(Exception):
    """The stage was asked to stop and has saved what it had."""


class LeaseLost(Exception):
    """Another attempt took over this stage: nothing more may be written."""


def canonical(value: Any) -> str:
    """JSON with sorted keys and no spaces: the same value gives the same text. Raises on what JSON has no form for."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def fingerprint(value: Any) -> str:
    """sha256 (hex) of a value's canonical JSON."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def inside(folder: Path, name: str) -> Path:
    """The file `name` of a folder. ValueError for a name that leads out of it: names in records are not to be trusted."""
    parts = name.split("/")
    if not name or name.startswith("/") or "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{name!r} is no name of a file in {folder}: it leads elsewhere.")
    return folder / name


class Spec(Strict):
    """Exactly what an artifact depends on, as specs/<stage>/<cell>.json holds it.

    stage: which stage makes it. versions: of the code that does, from stages/versions.yaml.
    inputs: input name -> key of the artifact it is made from. parameters: the stage's own, as plain JSON.
    """

    stage: str
    versions: dict[str, int]
    inputs: dict[str, str] = {}
    parameters: dict[str, Any]

    @field_validator("inputs")
    @classmethod
    def _names(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            inside(Path("inputs"), name)
        return value

    @cached_property
    def key(self) -> str:
        """The artifact's name in the store, known before anything runs."""
        return fingerprint(self.model_dump())

    def unit_key(self, **depends_on: Any) -> str:
        """The key of a part of this stage's artifact: its versions and what the part depends on, nothing else."""
        return fingerprint({"stage": self.stage, "versions": self.versions, "unit": depends_on})

    @classmethod
    def load(cls, path: Path) -> Spec:
        """Read a spec file; a ValueError names a file that is not one."""
        try:
            return cls.model_validate(json.loads(Path(path).read_text()))
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is not a readable spec ({error}); `strata run resolve` writes it anew.") from error


@dataclass
class Context:
    """Where and how a stage runs: nothing here may change what it computes.

    sources: tokenize's source name -> list of files or URLs. inputs' folders are given beside it.
    """

    threads: int | None = None
    device: str = "auto"
    resume_from: list[Path] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    progress_file: Path | None = None
    fence: Callable[[], None] = lambda: None
    stop_requested: Callable[[], bool] = lambda: False
    on_progress: Callable[[dict[str, Any]], None] | None = None

    def progress(self, **facts: Any) -> None:
        """Append a line of facts (step, of, tokens_per_second, loss ...) to the progress file; a torn last line is harmless."""
        line = {"time": round(time.time(), 3), **facts}
        if self.progress_file is not None:
            with self.progress_file.open("a") as file:
                file.write(json.dumps(line) + "\n")
        if self.on_progress is not None:
            self.on_progress(line)
