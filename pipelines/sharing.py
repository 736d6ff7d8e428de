"""What workers elsewhere cannot see is put where they can: a study's own artifacts that the store lacks, and data files of this machine.

Once: an artifact under its key, a file under its digest. A study that was pulled with DVC, its store fresh, so goes on on a cluster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelines import workspace
from pipelines.files import link
from pipelines.objects import Bucket
from pipelines.remote import RemoteStore
from pipelines.store import Busy, Store
from pipelines.work import Request
from stages import artifact, provenance
from stages.sources import File, expand, sha256
from stages.spec import Spec, canonical

SOURCES = "sources"


def shared(
    request: Request, context: dict[str, Any], store: Store, folder: Path = Path("."), *, say: Callable[[str], None] = print
) -> Request:
    """The request as a worker on another machine can run it: what it reads is put where that sees it."""
    for key in {key for key, _ in request.makers.values()}:
        if not store.published(key) and (name := adopt(key, context, store, folder)):
            say(f"{name} of this study's folder was put in the store {store.where}.")
    if not reads_here(request, store):
        return request
    assert isinstance(store, RemoteStore)
    given = request.settings["sources"]
    if isinstance(given, dict):
        sources: Any = {name: uploaded(files, store.bucket, folder) for name, files in given.items()}
    else:
        sources = uploaded(given, store.bucket, folder)
    return replace(request, settings=request.settings | {"sources": sources})


def reads_here(request: Request, store: Store) -> bool:
    """Whether it reads data files of this machine while its store is a bucket. With a shared folder, the data lie on one, too."""
    given = request.settings.get("sources") or []
    files = [file for part in given.values() for file in part] if isinstance(given, dict) else given
    return isinstance(store, RemoteStore) and any("://" not in file for file in files)


def adopt(key: str, context: dict[str, Any], store: Store, folder: Path = Path(".")) -> str | None:
    """Publish what a study's folder has of an artifact. Returns its stage and cell, or None where it is not there whole, or somebody makes it."""
    for file in sorted((folder / "specs").glob("*/*.json")):
        spec, cell = Spec.load(file), file.stem
        if spec.key == key:
            break
    else:
        return None
    place = folder / workspace.output(spec.stage, cell, context["roles"].get(cell))
    extra = {provenance.NAME: folder / workspace.provenance_file(spec.stage, cell)}
    if spec.stage == "train":
        extra[workspace.HISTORY] = folder / workspace.history_file(cell)
    try:
        artifact.read(place, key=key)
        for record in place.glob(f"*/**/{artifact.NAME}"):
            artifact.read(record.parent)
        if not all(path.is_file() for path in extra.values()):
            return None
        lease = store.acquire(key, canonical(spec.model_dump()))
    except (ValueError, Busy):
        return None
    with lease.beating():
        for path in place.rglob("*"):
            if path.is_file():
                link(path, lease.folder / path.relative_to(place))
        for name, path in extra.items():
            link(path, lease.folder / name)
        for record in sorted(lease.folder.glob(f"*/**/{artifact.NAME}")):
            store.keep(artifact.read(record.parent)["key"], record.parent)
        lease.publish()
    lease.release({"status": "succeeded", "error": None, "kind": None, "folder": str(lease.folder)})
    store.tidy(key, lease.number)
    return f"{spec.stage} {cell}"


def uploaded(patterns: list[str], bucket: Bucket, folder: Path = Path(".")) -> list[str]:
    """The same files, those of this machine as URLs in the bucket. Their order, which pins go by, stays."""
    here = [pattern for pattern in patterns if "://" not in pattern]
    files = expand(here, folder=folder) if here else []
    twice = {name for name, count in Counter(file.name for file in files).items() if count > 1}
    return [pattern for pattern in patterns if "://" in pattern] + [
        _uploaded(file, number, file.name in twice, bucket) for number, file in enumerate(files)
    ]


def _uploaded(file: File, number: int, ambiguous: bool, bucket: Bucket) -> str:
    path = file.local
    assert path is not None
    digest = sha256(path)
    name = f"{SOURCES}/{f'{number:06d}-' if ambiguous else ''}{digest}/{file.name}"
    entry = bucket.info(name)
    if entry is None or entry.size != path.stat().st_size:
        bucket.upload(path, name)
    return bucket.url(name)
