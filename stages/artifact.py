"""An artifact: a folder of files, and an `artifact.json`, written last, that says what they are.

The digest is over the data, not the files' bytes: two libraries that compress differently give the same digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stages.spec import fingerprint, inside

NAME = "artifact.json"
SEAL = "seal"  # the record's entry that is the fingerprint of all others
SCHEMA = 1
BLOCK = 1 << 22


def file_digest(path: Path) -> str:
    """Content digest of one file: Parquet by its values, safetensors and all else by its bytes. "sha256:<hex>"."""
    if path.suffix == ".parquet":
        from stages.schemas import data_digest

        return data_digest(path)
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            sha.update(block)
    return f"sha256:{sha.hexdigest()}"


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a small file so that a reader sees the old one or the new one, also after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write(
    out: Path, *, key: str, stage: str, files: Iterable[str], inputs: dict[str, str], known: dict[str, str] | None = None
) -> dict[str, Any]:
    """Write `out/artifact.json` over `files` (paths relative to `out`).

    inputs: input name -> digest of the artifact it was made from. known: digests already computed, by file name.
    Returns the record. Nothing in it depends on where or when it was made.
    """
    known = known or {}
    entries = {
        name: {"size": (out / name).stat().st_size, "digest": known.get(name) or file_digest(out / name)} for name in sorted(set(files))
    }
    record = {
        "key": key,
        "stage": stage,
        "schema": SCHEMA,
        "files": entries,
        "digest": fingerprint({name: entry["digest"] for name, entry in entries.items()}),
        "inputs": dict(sorted(inputs.items())),
    }
    write_atomically(out / NAME, json.dumps(record | {SEAL: fingerprint(record)}, indent=1, sort_keys=True) + "\n")
    return record


def read(folder: Path, *, key: str | None = None, content: bool = False, data: bool = True) -> dict[str, Any]:
    """The record of a complete artifact, its JSON files checked; with `content`, its data is read and checked too, and without `data` the record
    alone is looked at (where its files are elsewhere).

    Raises ValueError, with what is wrong and what to do, where the record is missing or damaged, was made under another
    key, lists a file that is not there whole, or (with `content`) one whose data is not what was recorded.
    """
    path = folder / NAME
    remedy = "Delete it and run again: what is missing is made anew."
    try:
        record = json.loads(path.read_text())
        seal = record.pop(SEAL, None)
        digest, files = record["digest"], record["files"]
        stated = fingerprint({name: entry["digest"] for name, entry in files.items()})
        whole = seal in (None, fingerprint(record))
    except FileNotFoundError as error:
        raise ValueError(f"{folder} has no {NAME}: it was never completed. {remedy}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}). {remedy}") from error
    if digest != stated or not whole:
        why = f"digest {str(digest)[:12]}, its files give {stated[:12]}" if digest != stated else "its seal is another record's"
        raise ValueError(f"{path} does not agree with itself ({why}). {remedy}")
    if key is not None and record["key"] != key:
        raise ValueError(f"{folder} was made under key {record['key'][:12]}, wanted {key[:12]}: it belongs to other parameters. {remedy}")
    for name, entry in files.items() if data else ():
        file = inside(folder, name)
        if not file.is_file() or file.stat().st_size != entry["size"]:
            found = f"{file.stat().st_size} bytes" if file.is_file() else "nothing"
            raise ValueError(f"{file} should have {entry['size']} bytes, found {found}. {remedy}")
        if (content or file.suffix == ".json") and file_digest(file) != entry["digest"]:
            raise ValueError(f"{file} does not hold the data that was recorded. {remedy}")
    return record
