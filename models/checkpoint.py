"""Weights and training states on disk: one safetensors file, whole or not there at all, and verified when it is read.

The file's metadata is one entry of canonical JSON (safetensors writes several in a random order): the caller's, and a digest of
every array's name, dtype, shape and bytes. So the same arrays and metadata give the same file. Nothing is ever unpickled.

Processes that hold a state together write a file each: PATH, and PATH's parts beside it, as many as its metadata says under "parts", all
with the same "save". A piece of an array is named NAME@AXIS:START:SIZE: where along which axis it begins, and how long the whole is there.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

ENTRY = "strata"
PARTS, SAVE = "parts", "save"  # of metadata


def digest(arrays: Mapping[str, np.ndarray]) -> str:
    """sha256 (hex) of the arrays' names, dtypes, shapes and bytes, in the order of their names."""
    sha = hashlib.sha256()
    for name in sorted(arrays):
        array = np.asarray(arrays[name], order="C")
        sha.update(json.dumps([name, array.dtype.str, array.shape]).encode())
        sha.update(array.reshape(-1).view(np.uint8).data)
    return sha.hexdigest()


def save(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> None:
    """Write arrays and text metadata to `path`: a reader sees the old file or the new one, also after a crash.

    Raises ValueError for metadata that is not text, and OSError (a full disk, say) with `path` as it was.
    """
    path = Path(path)
    metadata = dict(metadata or {})
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"metadata of {path} must be text; found {metadata}.")
    arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    entry = json.dumps({"metadata": metadata, "digest": digest(arrays)}, sort_keys=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        try:
            save_file(arrays, temporary, metadata={ENTRY: entry})
        except SafetensorError as error:
            raise OSError(f"{path} could not be written: {error}") from error
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make a rename in the folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def load(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays and the metadata that `save` was given.

    Raises ValueError naming the file where it is missing, truncated, changed, or not one that `save` wrote.
    """
    remedy = "Delete it and run again: training resumes from the checkpoint before it."
    try:
        with safe_open(path, framework="numpy") as file:
            entry = (file.metadata() or {}).get(ENTRY)
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is not a readable checkpoint ({error}). {remedy}") from error
    try:
        stated = json.loads(entry or "{}")
    except ValueError:
        stated = {}
    if stated.get("digest") != digest(arrays):
        raise ValueError(f"{path} does not hold the data that was written (digest {str(stated.get('digest'))[:12]}). {remedy}")
    return arrays, stated["metadata"]


def part(path: Path, number: int) -> Path:
    """Where the process of a number above 0 writes its part of the checkpoint `path`."""
    return path.with_suffix(f".{number}{path.suffix}")


def piece(name: str, axis: int, start: int, size: int) -> str:
    """What the piece of an array is called that begins at `start` along `axis`, where the whole is `size` long."""
    return f"{name}@{axis}:{start}:{size}"


def load_together(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """As `load`, of a checkpoint that one process wrote or several, however many: its arrays are whole."""
    arrays, metadata = load(path)
    for number in range(1, int(metadata.get(PARTS, 0)) + 1):
        more, facts = load(part(path, number))
        if facts.get(SAVE) != metadata.get(SAVE):
            raise ValueError(f"{part(path, number)} was not written together with {path}: it is not a part of that checkpoint.")
        arrays |= more
    return _joined(arrays, path), metadata


def _joined(arrays: dict[str, np.ndarray], path: Path) -> dict[str, np.ndarray]:
    """Arrays of which some are in pieces, whole."""
    found: dict[str, np.ndarray] = {}
    pieces: dict[str, list[tuple[int, int, int, np.ndarray]]] = {}
    for name, array in arrays.items():
        whole, mark, where = name.partition("@")
        if mark:
            axis, start, size = map(int, where.split(":"))
            pieces.setdefault(whole, []).append((start, axis, size, array))
        else:
            found[name] = array
    for name, parts in pieces.items():
        parts.sort(key=lambda one: one[0])
        _, axis, size, _ = parts[0]
        ends = [start + array.shape[axis] for start, _, _, array in parts]
        if [start for start, *_ in parts] != [0, *ends[:-1]] or ends[-1] != size:
            raise ValueError(f"{path} has pieces of {name!r} that do not make a whole.")
        found[name] = np.concatenate([array for *_, array in parts], axis=axis)
    return found
