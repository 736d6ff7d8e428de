"""Data sources: which files a source's name stands for, wherever they are, and proof that they are the ones that were pinned.

A file is a path, a glob, a folder, or any URL that fsspec knows (hf://, s3://, gs://, https://, zip://...::...). Local files are
read where they are; others are fetched one at a time, so that every reader below sees a local file.

A pin is "sha256:<hex>" (over the files' sha256 hex digests, one a line, in the order of the files' names) or, for one
repository of the Hugging Face hub, "revision:<commit>".
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import Field, field_validator, model_validator

from stages.artifact import BLOCK
from stages.spec import Context, Strict

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

Role = Literal["training", "validation", "evaluation"]
Format = Literal["auto", "parquet", "jsonl", "text"]

ENDINGS = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".txt": "text", ".md": "text", ".text": "text"}
COMPRESSED = (".gz", ".zst")
PACKAGES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub", "http": "aiohttp requests", "https": "aiohttp requests",
    "abfs": "adlfs", "abfss": "adlfs", "az": "adlfs", "oss": "ossfs", "sftp": "paramiko", "ssh": "paramiko", "smb": "smbprotocol",
}  # fmt: skip
PIN = re.compile(r"sha256:[0-9a-f]{64}|revision:[0-9a-f]{40}")
HUB = re.compile(r"hf://((?:datasets/|spaces/)?[^/@]+/[^/@]+)(?:@[^/]+)?(/|$)")
TRIES = 3
SCRATCH = ".scratch-"


class Reading(Strict):
    """How documents are read from a source's files, and what the files must be: the source's part of a spec.

    column: of the text (a dot goes into a nested field), for Parquet and JSON lines. id: column of the documents' ids; None
    makes them of the file's digest and the row. where: only documents whose column has this value. document: what one is, a row,
    or a whole file, its rows joined by blank lines (WikiText's rows are lines). domain: column that says what kind of text a document
    is; a set that is evaluated then has losses by it, too. pin: see this module.
    """

    format: Format = "auto"
    column: str = "text"
    id: str | None = None
    where: dict[str, str | int | float | bool | None] = {}
    document: Literal["row", "file"] = "row"
    domain: str | None = None
    pin: str | None = None

    @field_validator("pin")
    @classmethod
    def _pin(cls, value: str | None) -> str | None:
        if value is not None and not PIN.fullmatch(value):
            raise ValueError(
                f"a pin is 'sha256:<64 hex digits>' or 'revision:<40 hex digits>', found {value!r}; `strata lock-data` writes it"
            )
        return value

    @model_validator(mode="after")
    def _one_domain(self) -> Reading:
        if self.domain is not None and self.document == "file":
            raise ValueError("domain is a column of rows, and `document: file` joins rows; give one of them")
        return self


class Identity(Reading):
    """A source as a spec holds it. files: where the pin is a revision, which names a whole repository; a digest needs no names."""

    files: list[str] = []


class Source(Reading):
    """`data.sources.<name>` of params.yaml. files: paths, globs, folders or URLs; relative ones are seen from the study's folder."""

    role: Role
    files: list[str] = Field(min_length=1)

    def identity(self) -> dict[str, Any]:
        """What a result depends on of it, as plain values; defaults are left out (docs/decisions.md)."""
        pinned_as_whole = self.pin is not None and self.pin.startswith("revision:")
        return self.model_dump(exclude={"role"} if pinned_as_whole else {"role", "files"}, exclude_defaults=True)


class Pinned(Protocol):
    """Whatever names files and pins them: a source of documents, a task's items."""

    files: list[str]
    pin: str | None
    format: str


@dataclass(frozen=True)
class File:
    """One file of a source."""

    fs: AbstractFileSystem
    path: str
    pinned: str | None = None  # a revision that already says what its content is

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    @property
    def local(self) -> Path | None:
        protocol = self.fs.protocol if isinstance(self.fs.protocol, str) else self.fs.protocol[0]
        return Path(self.path) if protocol in ("file", "local") else None

    def __str__(self) -> str:
        return self.path if self.local else self.fs.unstrip_protocol(self.path)


def expand(patterns: Iterable[str], pin: str | None = None, folder: Path = Path(".")) -> list[File]:
    """The files that paths, globs, folders and URLs stand for, each once, sorted by name (then by path).

    A revision pin is put into hf:// URLs. folder: what relative paths are seen from.
    Raises ValueError for a pattern that stands for nothing, and for a protocol whose package is missing.
    """
    revision = pin.removeprefix("revision:") if pin and pin.startswith("revision:") else None
    found: dict[str, File] = {}
    for pattern in patterns:
        url = pattern if "://" in pattern else str(folder / Path(pattern).expanduser())
        if revision and not HUB.match(url):
            raise ValueError(f"{pattern} is pinned by a revision, which only hf:// files have; `strata lock-data` writes a pin that fits.")
        if revision:
            url = HUB.sub(rf"hf://\1@{revision}\2", url)
        fs, path = opened(url)
        for one in _matches(fs, path, url):
            file = File(fs, one, f"{pin}:{one}" if revision else None)
            found[str(file)] = file
    return sorted(found.values(), key=lambda file: (file.name, file.path))


def opened(url: str, **options: Any) -> tuple[AbstractFileSystem, str]:
    """The file system of a URL, and the path in it. ValueError where fsspec does not know it, lacks a package for it, or cannot open it."""
    import fsspec

    protocols = re.findall(r"(?:^|::)([a-z0-9+.-]+)://", url)
    try:
        return fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        packages = " ".join(dict.fromkeys(PACKAGES[name] for name in protocols if name in PACKAGES))
        raise ValueError(f"{url} needs a package that is not installed ({error}): pip install {packages or 'it'}.") from error
    except ValueError as error:
        raise ValueError(f"{url} is no file, glob or URL that fsspec knows ({error}).") from error
    except OSError as error:
        raise ValueError(f"{url} cannot be opened ({error}).") from error


def _matches(fs: AbstractFileSystem, path: str, url: str) -> list[str]:
    web = url.startswith(("http://", "https://"))
    try:
        if "*" in path or "[" in path or ("?" in path and not web):
            found = [one for one, info in fs.glob(path, detail=True).items() if info["type"] == "file"]
        elif web:
            found = [path] if fs.exists(path) else []
        elif fs.isdir(path):
            found = [one for one in fs.find(path) if kind(PurePosixPath(one).name) is not None]
        else:
            found = [path] if fs.exists(path) else []
    except Exception as error:  # each protocol's package has errors of its own
        raise ValueError(f"{url} cannot be listed ({type(error).__name__}: {error}). Is it reachable from here?") from error
    if not found:
        raise ValueError(
            f"{url} stands for no file. Check data.sources and tasks in params.yaml (relative paths are seen from the study's folder)."
        )
    return found


def kind(name: str) -> str | None:
    """The format that a file's name tells, None where it tells none."""
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return ENDINGS.get(PurePosixPath(name).suffix.lower())


def listed(context: Context, names: Iterable[str]) -> dict[str, list[str]]:
    """Source name -> files, from context.settings["sources"]: a table, or a plain list where there is one source."""
    given, names = context.settings.get("sources") or {}, list(names)
    table = given if isinstance(given, dict) else {names[0]: list(given)} if len(names) == 1 and given else {}
    if missing := [name for name in names if not table.get(name)]:
        raise ValueError(
            f"No files were given for the source {missing[0]!r}; give them by --source FILE (one source), or run `strata run`."
        )
    return {name: table[name] for name in names}


# Content


def sha256(path: Path) -> str:
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            sha.update(block)
    return sha.hexdigest()


@contextmanager
def fetched(file: File, folder: Path) -> Iterator[Path]:
    """The file as a local one: itself, or a copy in `folder` that goes afterwards.

    A network that fails is tried again; ValueError when it keeps failing.
    """
    if file.local is not None:
        yield file.local
        return
    copy = folder / f"{hashlib.sha256(str(file).encode()).hexdigest()[:16]}-{file.name.split('?')[0]}"
    try:
        for left in reversed(range(TRIES)):
            try:
                file.fs.get_file(file.path, str(copy))
                break
            except Exception as error:  # each protocol's package has errors of its own
                if left == 0 or isinstance(error, FileNotFoundError):
                    raise ValueError(
                        f"{file} cannot be fetched ({type(error).__name__}: {error}). What is made is kept: run again."
                    ) from error
                time.sleep(TRIES - left)
        yield copy
    finally:
        copy.unlink(missing_ok=True)


@contextmanager
def scratch(out: Path) -> Iterator[Path]:
    """A folder inside `out` for copies of files. Those that killed attempts left there go."""
    for left in out.glob(f"{SCRATCH}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=SCRATCH) as folder:
        yield Path(folder)


def digests(files: Iterable[File]) -> list[str]:
    """sha256 (hex) of each file, several at a time."""

    def one(file: File) -> str:
        with tempfile.TemporaryDirectory() as folder, fetched(file, Path(folder)) as path:
            return sha256(path)

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(one, files))


def combine(sha256s: Iterable[str]) -> str:
    """The pin of files with these digests, in the files' order."""
    return "sha256:" + hashlib.sha256("".join(f"{one}\n" for one in sha256s).encode()).hexdigest()


def pin(files: Iterable[str | File], folder: Path = Path(".")) -> str:
    """The sha256 pin of files, patterns and URLs. Reads all of them."""
    found: list[File] = []
    for file in files:
        found += [file] if isinstance(file, File) else expand([file], folder=folder)
    unique = sorted({str(file): file for file in found}.values(), key=lambda file: (file.name, file.path))
    return combine(digests(unique))


def check(sha256s: Iterable[str], wanted: str | None, what: str) -> None:
    """ValueError where files with these digests are not the pinned ones. A revision, or no pin, asks nothing of them."""
    if wanted is None or not wanted.startswith("sha256:"):
        return
    if (found := combine(sha256s)) != wanted:
        raise ValueError(
            f"The files of {what} are not the pinned ones (found {found[:19]}, pinned {wanted[:19]}). "
            "Put the pinned files back, or accept these by `strata lock-data`, which makes what depends on them anew."
        )


def lock(source: Pinned, folder: Path = Path(".")) -> str:
    """The pin of what a source holds now: the commit for files of one hub repository, else their sha256."""
    repositories = {match[1] if (match := HUB.match(file)) else None for file in source.files}
    if len(repositories) == 1 and (repository := repositories.pop()) is not None:
        return f"revision:{_commit(repository)}"
    return pin(expand(source.files, folder=folder))


def _commit(repository: str) -> str:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ValueError(f"hf://{repository} needs a package that is not installed: pip install huggingface_hub.") from error
    kinds: dict[str, Any] = {"datasets": "dataset", "spaces": "space"}
    first, _, rest = repository.partition("/")
    name, repo_type = (rest, kinds[first]) if first in kinds else (repository, "model")
    try:
        return huggingface_hub.HfApi().repo_info(name, repo_type=repo_type).sha
    except Exception as error:  # the hub's own errors, and the network's
        raise ValueError(f"hf://{repository} cannot be asked for its commit ({type(error).__name__}: {error}).") from error


def reachable(source: Pinned, folder: Path = Path("."), *, kind: Callable[[str], str | None] = kind) -> str | None:
    """What stands against reading a source from here, in a sentence; None when nothing does. Reads no data. kind: the format that a name tells."""
    try:
        files = expand(source.files, source.pin, folder)
    except ValueError as error:
        return str(error)
    if source.format == "auto" and (unknown := [file for file in files if kind(file.name.split("?")[0]) is None]):
        return f"{unknown[0]} has a name that tells no format; give its `format`."
    return None
