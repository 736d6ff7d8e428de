"""Units: the parts of a stage's artifact that are made, kept and shared one by one.

A unit is a folder with its own `artifact.json`. It is made in a temporary folder beside its place and renamed, so that
what stands in place is complete.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stages import artifact

PARTIAL = ".partial-"


def complete(folder: Path, key: str) -> bool:
    """Whether `folder` holds the whole unit of this key. What stands there under another key, or damaged, does not count."""
    try:
        artifact.read(folder, key=key)
    except ValueError:
        return False
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
        artifact.write(partial, key=key, stage=stage, files=names, inputs=inputs)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def keep_only(parent: Path, names: set[str]) -> None:
    """Remove the units under `parent` that this artifact does not have (left by an attempt under other parameters)."""
    for folder in parent.iterdir() if parent.is_dir() else ():
        if folder.is_dir() and folder.name not in names and ((folder / artifact.NAME).exists() or folder.name.startswith(PARTIAL)):
            shutil.rmtree(folder)
