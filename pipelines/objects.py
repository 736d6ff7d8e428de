"""Small files by name, in a folder or in a bucket: what the store, the board and whoever approves a study keep their records in.

A name is a relative path with "/". Creation is exclusive on both: of several who create the same name at once, one does. On a
bucket that is the object store's own conditional write (If-None-Match on S3, if-generation-match on GCS), by fsspec's
`mode="create"`; a bucket that does not refuse a second one is refused itself.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar

from stages import artifact
from stages.sources import opened

PATIENCE_SECONDS = 300.0  # for a bucket that does not answer
PROBE = "conditional-writes"
T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """size: bytes. modified: seconds since 1970 on the clock of the place. mark: another one, another content."""

    size: int
    modified: float
    mark: Any


class Objects(Protocol):
    """Named bytes in one place."""

    where: str

    def read(self, name: str, start: int = 0) -> bytes | None:
        """The content from byte `start` on, or None where there is no such name."""

    def write(self, name: str, data: bytes) -> None:
        """Put this content there, whole or not at all, whatever stood there."""

    def create(self, name: str, data: bytes) -> bool:
        """Put this content there if the name is free. False where it is not."""

    def remove(self, names: Iterable[str]) -> None:
        """Take names away; those that are not there are no matter."""

    def list(self, prefix: str) -> dict[str, Entry]:
        """Every name under the folder `prefix`."""


def is_url(where: str | Path) -> bool:
    return "://" in str(where)


def normal(where: str | Path) -> str:
    """A store's place as everybody names it: a URL without a last slash, or an absolute path."""
    return str(where).rstrip("/") if is_url(where) else str(Path(where).expanduser().absolute())


def at(where: str | Path) -> Objects:
    """The objects of a folder or of a bucket's URL. ValueError for a URL that cannot be opened."""
    return bucket(normal(where)) if is_url(where) else Folder(Path(normal(where)))


class Folder:
    """Objects as files under a folder."""

    def __init__(self, root: Path) -> None:
        self.root, self.where = root, str(root)

    def read(self, name: str, start: int = 0) -> bytes | None:
        try:
            with (self.root / name).open("rb") as file:
                file.seek(start)
                return file.read()
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        artifact.write_atomically(self.root / name, data)

    def create(self, name: str, data: bytes) -> bool:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.link(draft, path)
        except FileExistsError:
            return False
        finally:
            os.unlink(draft)
        return True

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            (self.root / name).unlink(missing_ok=True)

    def list(self, prefix: str) -> dict[str, Entry]:
        found, start, folders = {}, len(str(self.root)) + 1, [str(self.root / prefix)]
        while folders:  # a driver looks through thousands of files ten times a second
            try:
                with os.scandir(folders.pop()) as entries:
                    for entry in entries:
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
                        elif not entry.name.startswith(".") and entry.is_file():
                            with contextlib.suppress(FileNotFoundError):
                                stat = entry.stat()
                                found[entry.path[start:]] = Entry(stat.st_size, stat.st_mtime, (stat.st_mtime_ns, stat.st_ino))
            except FileNotFoundError:
                continue
        return found


@functools.cache
def bucket(url: str) -> Bucket:
    """The bucket of a URL, one a process, shown to refuse what exists."""
    made = Bucket(url)
    made.probe()
    return made


class Bucket:
    """Objects under a URL that fsspec knows: s3://, gs://, memory:// (one process: for tests).

    A network that fails is tried again for some minutes, then OSError.
    """

    def __init__(self, url: str) -> None:
        self.where = url
        self.fs, path = opened(url, use_listings_cache=False)
        self.root = path.rstrip("/")

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def url(self, name: str) -> str:
        return f"{self.where}/{name}"

    def probe(self) -> None:
        """ValueError where this bucket cannot be reached, or would let two create one name."""
        try:
            again = self._create(PROBE, b"1") and self._create(PROBE, b"2")
        except (OSError, NotImplementedError) as error:
            raise ValueError(
                f"The store {self.where} cannot be used ({type(error).__name__}: {error}). Does the bucket exist, and do this machine's credentials write there?"
            ) from error
        if again:
            raise ValueError(
                f"The store {self.where} overwrites what should be created once: it has no conditional writes (If-None-Match), so two could publish one artifact. "
                "Use S3, GCS, a recent MinIO, or a shared folder, and a recent s3fs or gcsfs."
            )

    def read(self, name: str, start: int = 0) -> bytes | None:
        def get() -> bytes:
            if not start:
                return self.fs.cat_file(self.path(name))
            size = self.fs.info(self.path(name))["size"]
            return self.fs.cat_file(self.path(name), start=start, end=size) if size > start else b""

        try:
            return self._patiently(get)
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        self._patiently(lambda: self.fs.pipe_file(self.path(name), data))

    def create(self, name: str, data: bytes) -> bool:
        return self._patiently(lambda: self._create(name, data)) or self.read(name) == data  # ours after all: an answer was lost

    def _create(self, name: str, data: bytes) -> bool:
        try:
            self.fs.pipe_file(self.path(name), data, mode="create")
        except FileExistsError:
            return False
        return True

    def remove(self, names: Iterable[str]) -> None:
        paths = [self.path(name) for name in names]
        for start in range(0, len(paths), 1000):
            some = paths[start : start + 1000]
            try:
                self._patiently(lambda some=some: self.fs.rm(some))
            except FileNotFoundError:
                for path in some:
                    self._patiently(lambda path=path: self._remove(path))

    def _remove(self, path: str) -> None:
        try:
            self.fs.rm_file(path)
        except FileNotFoundError:
            pass

    def list(self, prefix: str) -> dict[str, Entry]:
        try:
            found = self._patiently(lambda: self.fs.find(self.path(prefix), detail=True))
        except FileNotFoundError:
            return {}
        cut = len(self.root) + 1
        return {path[cut:]: _entry(info) for path, info in found.items() if info["type"] == "file"}

    def info(self, name: str) -> Entry | None:
        try:
            return _entry(self._patiently(lambda: self.fs.info(self.path(name))))
        except FileNotFoundError:
            return None

    def upload(self, file: Path, name: str) -> None:
        """A file, in parts where it is large."""
        self._patiently(lambda: self.fs.put_file(str(file), self.path(name)))

    def download(self, name: str, file: Path) -> None:
        """Raises FileNotFoundError."""
        self._patiently(lambda: self.fs.get_file(self.path(name), str(file)))

    def blocks(self, name: str, size: int) -> Iterable[bytes]:
        """The content in blocks, never the whole in memory."""
        with self._patiently(lambda: self.fs.open(self.path(name), "rb", block_size=size, cache_type="readahead")) as file:
            while block := file.read(size):
                yield block

    def now(self) -> float:
        """The time on the clock that stamps the bucket's objects."""
        name = f"clock/{uuid.uuid4().hex}"
        self.write(name, b"")
        try:
            entry = self.info(name)
            assert entry is not None
            return entry.modified
        finally:
            self.remove([name])

    def _patiently(self, action: Callable[[], T]) -> T:
        """The action's result, tried again while the bucket is away. What the bucket answers (no such name, no permission) is not tried again."""
        began, pause = time.monotonic(), 0.5
        while True:
            try:
                return action()
            except (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError):
                raise
            except Exception as error:  # each protocol's package has errors of its own
                local = isinstance(error, OSError) and error.errno is not None and getattr(error, "filename", None) is not None
                if local or isinstance(error, TypeError | AssertionError | ValueError) or time.monotonic() - began > PATIENCE_SECONDS:
                    raise (
                        error
                        if isinstance(error, OSError | TypeError | AssertionError | ValueError)
                        else OSError(f"{self.where} does not answer ({type(error).__name__}: {error}).")
                    ) from error
                time.sleep(pause)
                pause = min(2 * pause, 20.0)


def _entry(info: dict[str, Any]) -> Entry:
    """What fsspec's file systems call by different names."""
    time_of = next(
        (info[name] for name in ("LastModified", "updated", "mtime", "last_modified", "created") if info.get(name) is not None), 0.0
    )
    if isinstance(time_of, str):
        time_of = datetime.fromisoformat(time_of)
    modified = time_of.timestamp() if isinstance(time_of, datetime) else float(time_of)
    mark = info.get("ETag") or info.get("etag") or info.get("generation") or str(time_of)
    return Entry(info["size"], modified, f"{mark}-{modified}-{info['size']}")
