"""`strata fetch`, `verify` and `gc`: what is in the store, brought here, read through, and cleared of what nobody needs.

What a collection takes: what killed processes left half-done, attempts beside a published one, and in a bucket the blobs that no artifact
and no unit names. Asked to, also whole artifacts that no study of this repository wants, if they are old enough; other repositories that share the
store are not seen, so that is never done unasked.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines import remote, workspace
from pipelines.cells import Specs, specs, version_table
from pipelines.files import link
from pipelines.mistakes import nearest
from pipelines.params import Params
from pipelines.reading import load
from pipelines.remote import RemoteStore
from pipelines.resolve import context
from pipelines.run import store_of
from pipelines.store import Busy, Store
from stages import artifact
from stages.artifact import BLOCK

SHORTEST_KEY = 6
LEFT_SECONDS = 24 * 3600.0  # a half-done thing this old is nobody's
DAY = 86400.0


def chosen(study: Specs, names: Iterable[str]) -> list[tuple[str, str]]:
    """The (stage, cell) that names say: cells (all their stages), sources, stages, "stage/cell", or beginnings of keys. ValueError for one that is
    nothing of the study's."""
    found: list[tuple[str, str]] = []
    for name in names:
        named = [
            (stage, cell)
            for (stage, cell), spec in study.items()
            if name in (stage, cell, f"{stage}/{cell}") or (len(name) >= SHORTEST_KEY and spec.key.startswith(name))
        ]
        if not named:
            raise ValueError(
                f"{name!r} is no cell, source, stage or key of this study; {nearest(name, sorted({cell for _, cell in study}))}"
            )
        found += named
    return list(dict.fromkeys(found))


def open_study(folder: Path) -> tuple[Params, Specs, Store]:
    params = load(folder)
    return params, specs(params, version_table()), store_of(context(params), folder)


# Fetch


def fetch(folder: Path, names: list[str], out: Path | None) -> Iterator[str]:
    """Bring artifacts' files to this machine, checked against their digests; with `out`, link or copy them to out/STAGE/CELL. A line for each."""
    _, study, store = open_study(folder)
    for stage, cell in chosen(study, names) if names else list(study):
        found = store.find(study[stage, cell].key)
        if found is None:
            yield f"{stage} {cell}: not made yet"
            continue
        record = artifact.read(found)
        names_of = _files_of(found)
        if out is not None:
            for name in names_of:
                link(found / name, artifact.inside(out / stage / cell, name))
        place = found if out is None else out / stage / cell
        yield f"{stage} {cell}: {_bytes(sum((found / name).stat().st_size for name in names_of))} at {place} ({record['digest'][:12]})"


def _files_of(folder: Path) -> list[str]:
    """What an artifact's folder holds beside what its making left there."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    kept = set(workspace.WORKING) - {workspace.HISTORY, "provenance.json"}
    return [name for name in names if name.split("/")[0] not in kept and not name.startswith(".")]


# Verify


@dataclass(frozen=True)
class Verified:
    """One artifact read through. problem: what is wrong with it, None where nothing is."""

    key: str
    size: int
    problem: str | None


def verify(store: Store, keys: Iterable[str], *, content: bool = True) -> Iterator[Verified]:
    """Read artifacts through, one file at a time. Without `content`, only that all files are there, whole by their sizes."""
    yield from (_verify_remote if isinstance(store, RemoteStore) else _verify_folder)(store, list(keys), content)  # type: ignore[arg-type]


def _verify_folder(store: Store, keys: list[str], content: bool) -> Iterator[Verified]:
    for key in keys:
        size = 0
        try:
            folder = store.find(key)
            if folder is None:
                continue
            for record in sorted(folder.rglob(artifact.NAME)):
                files = artifact.read(record.parent, content=content)["files"]
                size += sum(entry["size"] for entry in files.values())
        except ValueError as error:
            yield Verified(key, size, str(error))
        else:
            yield Verified(key, size, None)


def _verify_remote(store: RemoteStore, keys: list[str], content: bool) -> Iterator[Verified]:
    """Each blob once: its size by one listing, its digest by a stream that is kept nowhere."""
    sizes = {name.rpartition("/")[2]: entry.size for name, entry in store.bucket.list("blobs").items()}
    read: dict[str, str | None] = {}
    for key in keys:
        try:
            files = store.files(key)
        except ValueError as error:
            yield Verified(key, 0, str(error))
            continue
        problems = []
        for name, file in files.items():
            sha = file["sha256"]
            if sizes.get(sha) != file["size"]:
                found = f"{sizes[sha]} bytes" if sha in sizes else "nothing"
                problems.append(f"{name} should have {file['size']} bytes, found {found}")
            elif content:
                if sha not in read:
                    digest = hashlib.sha256()
                    for block in store.bucket.blocks(f"blobs/{sha[:2]}/{sha}", BLOCK):
                        digest.update(block)
                    read[sha] = None if digest.hexdigest() == sha else "does not hold what was put there"
                if read[sha] is not None:
                    problems.append(f"{name} {read[sha]}")
        yield Verified(key, sum(file["size"] for file in files.values()), "; ".join(problems[:3]) or None)


# Collection


@dataclass(frozen=True)
class Waste:
    """Something that a collection takes. what: in words. size: bytes that it holds alone."""

    what: str
    size: int


def gc(store: Store, *, dry_run: bool, unwanted: set[str] | None = None, older: float = 30.0) -> list[Waste]:
    """Clear the store. unwanted: keys to be forgotten, if they are published for longer than `older` days. Returns what went, or would go."""
    gone = [*_unwanted(store, unwanted or set(), older * DAY, dry_run)]
    return gone + list((_gc_remote if isinstance(store, RemoteStore) else _gc_folder)(store, dry_run))  # type: ignore[arg-type]


def wanted_by(root: Path, store: Store) -> set[str]:
    """The keys that this repository's studies with this store want, as their params.yaml stand."""
    found: set[str] = set()
    for path in (root / "params.yaml", *sorted((root / "pipelines").glob("*/params.yaml"))):
        if path.is_file():
            _, study, other = open_study(path.parent)
            if other.where == store.where:
                found |= {spec.key for spec in study.values()}
    return found


def _unwanted(store: Store, keys: set[str], older: float, dry_run: bool) -> Iterator[Waste]:
    for key in sorted(keys & set(store.keys())):
        if isinstance(store, RemoteStore):
            entry = store.bucket.info(f"published/{key}")
            age = store._now() - entry.modified if entry else 0.0
        else:
            age = store._now() - (store.folder(key) / "published").stat().st_mtime
        if age <= older:
            continue
        stage = str(_json(store.spec(key)).get("stage", "artifact"))
        size = 0 if isinstance(store, RemoteStore) else _tree(store.folder(key))
        try:
            if not dry_run:
                store.forget(key)
        except Busy:
            continue
        yield Waste(f"{stage} {key[:12]}, which no study of this repository wants", size)


def _gc_folder(store: Store, dry_run: bool) -> Iterator[Waste]:
    if not store.root.is_dir():
        return
    now = store._now()

    def take(path: Path, what: str) -> Iterator[Waste]:
        size = _tree(path)
        if not dry_run:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        yield Waste(f"{what}: {path.relative_to(store.root)}", size)

    def old(path: Path) -> bool:
        try:
            return now - path.stat().st_mtime > LEFT_SECONDS
        except FileNotFoundError:
            return False

    for pattern, what in (
        ("artifacts/*/.forgotten-*", "forgotten, and not removed whole"),
        ("units/*/.partial-*", "a half-made unit"),
        (".clock-*", "a look at the clock"),
        ("ray-train/*", "a training of several processes that was killed"),
    ):
        for path in sorted(store.root.glob(pattern)):
            if old(path):
                yield from take(path, what)
    for key in store.keys():
        try:
            published = store.find(key)
        except ValueError:
            continue  # damaged: `strata verify` names it
        for attempt in store.attempts(key):
            if attempt != published and old(attempt) and not (attempt / "heartbeat").exists():
                yield from take(attempt, "an attempt beside the published one")


def _gc_remote(store: RemoteStore, dry_run: bool) -> Iterator[Waste]:
    """Mark what manifests name, sweep the rest. An upload meanwhile sees the epoch change and looks again (see remote.py); young blobs stay."""
    bucket = store.bucket
    began = _json(bucket.read("gc"))
    if began.get("running") and not store._collection_died():
        raise ValueError(f"Another collection of {store.where} runs; try again later.")
    epoch = int(began.get("epoch", 0)) + 1

    def show(running: bool) -> None:
        bucket.write("gc", json.dumps({"epoch": epoch, "running": running}).encode())

    if not dry_run:
        show(True)
    try:
        yield from _swept(store, dry_run, lambda: None if dry_run else show(True))
    finally:
        if not dry_run:
            epoch += 1
            show(False)


def _swept(store: RemoteStore, dry_run: bool, alive: Any) -> Iterator[Waste]:
    bucket, now = store.bucket, store.bucket.now()
    blobs = {
        name: entry for name, entry in bucket.list("blobs").items() if now - entry.modified > remote.GRACE_SECONDS
    }  # before the manifests are read: what comes later is young
    published = {name.removeprefix("published/"): _json(bucket.read(name)) for name in bucket.list("published")}
    named: set[str] = set()
    dead: dict[str, int] = {}
    for name, entry in bucket.list("attempts").items():
        _, key, number, file = name.split("/", 3)
        stands = key in published and int(number) == published[key].get("attempt")
        fresh = now - entry.modified <= LEFT_SECONDS
        if key in published and not stands and not fresh:
            dead[name] = entry.size
        elif file == "files":
            named |= _shas(bucket.read(name))
    for name in bucket.list("units"):
        named |= _shas(bucket.read(name))
    swept = {name: entry.size for name, entry in blobs.items() if name.rpartition("/")[2] not in named}
    left = {
        name: entry.size
        for place in ("clock", "ray-train")
        for name, entry in bucket.list(place).items()
        if now - entry.modified > LEFT_SECONDS
    }
    for what, names in (
        ("attempts beside published ones", dead),
        ("blobs that no artifact names", swept),
        ("left by killed processes", left),
    ):
        if not names:
            continue
        if not dry_run:
            chosen = sorted(names)
            for start in range(0, len(chosen), 1000):
                alive()
                bucket.remove(chosen[start : start + 1000])
        yield Waste(f"{len(names)} objects: {what}", sum(names.values()))


def clear_cache(store: Store, *, dry_run: bool) -> list[Waste]:
    """Remove what this machine has of a bucket. ValueError where something is being made here."""
    if not isinstance(store, RemoteStore):
        raise ValueError(f"The store {store.where} is a folder: it has no cache.")
    working = [path.name for path in (store.root / "work").glob("*")] if store.root.is_dir() else []
    if busy := [key for key in working if store.alive(key)]:
        raise ValueError(f"{busy[0][:12]} is being made; the cache on this machine is in use. Wait, or stop it first.")
    size = _tree(store.root)
    if not dry_run:
        shutil.rmtree(store.root, ignore_errors=True)
    return [Waste(f"the cache {store.root}", size)] if size else []


def _shas(text: bytes | None) -> set[str]:
    """What a manifest names. Damaged, it names nothing that can be kept."""
    files = _json(text).get("files", {})
    return {str(file.get("sha256")) for file in files.values() if isinstance(file, dict)} if isinstance(files, dict) else set()


def _json(text: bytes | str | None) -> dict[str, Any]:
    try:
        value = json.loads(text) if text else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _tree(path: Path) -> int:
    """Bytes under a path that no other place links to."""
    files = [path] if path.is_file() else path.rglob("*")
    return sum(stat.st_size for file in files if not file.is_symlink() and file.is_file() and (stat := file.stat()).st_nlink == 1)


def _bytes(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def total(gone: Iterable[Waste]) -> str:
    return _bytes(sum(item.size for item in gone))


def show_verified(store: Store, keys: list[str], *, content: bool) -> int:
    """Print what is wrong; returns how many artifacts are damaged."""
    began, size, damaged, count = time.monotonic(), 0, 0, 0
    for one in verify(store, keys, content=content):
        count, size = count + 1, size + one.size
        if one.problem is not None:
            damaged += 1
            print(
                f"{one.key[:12]} is damaged: {one.problem.rstrip('.')}. `strata forget {one.key[:12]}` in its study, then `dvc repro`, makes it again."
            )
    how = "read through" if content else "looked at by size"
    print(f"{count} artifacts, {_bytes(size)} {how} in {time.monotonic() - began:.0f} s at {store.where}: {damaged or 'none'} damaged.")
    return damaged
