"""Trees of hard links: one copy of the bytes, several places."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path


def link(source: Path, target: Path) -> None:
    """Make `target` the same file as `source`: a hard link, or a copy where the file system does not allow one. Whole at once: another process may
    be reading it, or putting the same there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{uuid.uuid4().hex}.link")
    try:
        try:
            os.link(source, draft)
        except OSError:
            shutil.copyfile(source, draft)
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)  # it stays where both are the same file already


def link_tree(source: Path, target: Path, wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Link every file under `source` whose relative path is `wanted` to the same place under `target`. ValueError for a symbolic link: it leads elsewhere."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source).as_posix()
        if path.is_symlink():
            raise ValueError(f"{path} is a symbolic link; an artifact holds files. Delete it and run again.")
        if path.is_file() and wanted(name):
            link(path, target / name)
