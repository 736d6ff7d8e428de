"""Units: the parts of a stage's artifact that are made, kept and shared one by one.

A unit is a folder with its own `artifact.json`. It is made in a temporary folder beside its place and renamed, so that
what stands in place is complete.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Protocol

from stages import artifact, schemas

PARTIAL = ".partial-"


class Shelf(Protocol):
    """Where units are shared beyond one artifact: other studies', earlier attempts', larger budgets'."""

    def fetch(self, key: str, folder: Path) -> bool:
        """Put the unit of this key at `folder`, if the shelf has it."""

    def keep(self, key: str, folder: Path) -> None:
        """Take the complete unit at `folder`."""


_shelf: ContextVar[Shelf | None] = ContextVar("shelf", default=None)


@contextmanager
def shared(shelf: Shelf) -> Iterator[None]:
    """Inside, units come from `shelf` where it has them, and go to it when they are made."""
    token = _shelf.set(shelf)
    try:
        yield
    finally:
        _shelf.reset(token)


def complete(folder: Path, key: str) -> bool:
    """Whether `folder` holds the whole unit of this key, be it fetched from the shelf now.

    What stands there under another key, or damaged, does not count.
    """
    try:
        artifact.read(folder, key=key)
    except ValueError:
        shelf = _shelf.get()
        return shelf is not None and shelf.fetch(key, folder)
    return True


@contextmanager
def making(folder: Path, *, key: str, stage: str, inputs: dict[str, str]) -> Iterator[Path]:
    """Make a unit: yields an empty temporary folder; on success its files become `folder`, with their artifact.json.

    On an exception nothing stands at `folder` that did not stand there before.
    """
    partial = folder.with_name(PARTIAL + folder.name)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        names = [str(path.relative_to(partial)) for path in partial.rglob("*") if path.is_file()]
        known = {name: digest for name in names if name.endswith(".parquet") and (digest := schemas.recorded_digest(partial / name))}
        artifact.write(partial, key=key, stage=stage, files=names, inputs=inputs, known=known)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    if (shelf := _shelf.get()) is not None:
        shelf.keep(key, folder)


def keep_only(parent: Path, names: set[str]) -> None:
    """Remove the units under `parent` that this artifact does not have (left by an attempt under other parameters)."""
    for folder in parent.iterdir() if parent.is_dir() else ():
        if folder.is_dir() and folder.name not in names and ((folder / artifact.NAME).exists() or folder.name.startswith(PARTIAL)):
            shutil.rmtree(folder)
