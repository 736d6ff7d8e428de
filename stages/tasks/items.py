"""A task's items out of its files, whatever their form, in the schema of its kind."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages import schemas, sources
from stages.tasks.entry import FIELDS, Files
from stages.tasks.originals import ORIGINALS

if TYPE_CHECKING:
    import pyarrow as pa

ENDINGS = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".arrow": "arrow"}


def form(name: str) -> str | None:
    """The form that a file's name tells, None where it tells none."""
    name = name.split("?")[0]
    for ending in sources.COMPRESSED:
        name = name.removesuffix(ending)
    return ENDINGS.get(Path(name).suffix.lower())


def read(paths: Iterable[Path], files: Files, schema: str, what: str) -> pa.Table:
    """Every item of `paths`, in order. what: the task, for messages.

    ValueError for a file that is not of its form, a row that is no item, an id that occurs twice, and where no item is left.
    """
    import pyarrow as pa

    columns: dict[str, list[Any]] = {name: [] for name in FIELDS[schema]}
    seen: dict[str, dict[str, Any]] = {}
    for path in paths:
        for number, row in enumerate(_rows(path, files.format)):
            if not all(_matches(_at(row, column, path, what), value) for column, value in files.where.items()):
                continue
            for item in _items(row, files, number):
                try:
                    made = _checked(item, schema)
                except (KeyError, TypeError, ValueError, IndexError) as error:
                    raise ValueError(f"{what}: row {number} of {path.name} is no {schema} item: {_reason(error)}.") from error
                if seen.get(made["id"]) == made:
                    continue  # the same item once more
                while made["id"] in seen:
                    made["id"] += "'"
                seen[made["id"]] = made
                for name, values in columns.items():
                    values.append(made[name])
    if not seen:
        raise ValueError(f"{what}: its files hold no item{' that `where` takes' if files.where else ''}.")
    return pa.table(columns, schema=schemas.schema(schema))


def _reason(error: Exception) -> str:
    return f"it lacks {error}" if isinstance(error, KeyError) else str(error)


def _rows(path: Path, kind: str) -> Iterator[dict[str, Any]]:
    import pyarrow as pa

    kind = form(path.name) if kind == "auto" else kind
    if kind is None:
        raise ValueError(f"{path} has a name that tells no form ({', '.join(ENDINGS)}); give `format`.")
    try:
        yield from {"parquet": _parquet, "jsonl": _json_lines, "arrow": _arrow}[kind](path)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, pa.ArrowException) as error:
        raise ValueError(f"{path} is not a whole {kind} file ({error}). Fetch it again.") from error


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=1024):
            yield from batch.to_pylist()


def _arrow(path: Path) -> Iterator[dict[str, Any]]:
    """Arrow's stream, as the datasets library writes it, or its file format."""
    import pyarrow as pa

    with pa.OSFile(str(path)) as file:
        magic = file.read(6)
        file.seek(0)
        if magic == b"ARROW1":
            reader = pa.ipc.open_file(file)
            batches: Iterable[pa.RecordBatch] = (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            batches = pa.ipc.open_stream(file)
        for batch in batches:
            yield from batch.to_pylist()


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    import fsspec

    compression = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix)
    with fsspec.open(str(path), "rb", compression=compression) as file:
        for line in io.TextIOWrapper(file, "utf-8"):
            if line.strip():
                yield json.loads(line)


def _at(row: dict[str, Any], column: str, path: Path, what: str) -> Any:
    if column not in row:
        raise ValueError(f"{what}: {path.name} has no column {column!r}; it has {', '.join(row)}.")
    return row[column]


def _matches(found: Any, wanted: Any) -> bool:
    return fnmatchcase(found, wanted) if isinstance(found, str) and isinstance(wanted, str) else found == wanted


def _items(row: dict[str, Any], files: Files, number: int) -> Iterator[dict[str, Any]]:
    """The row's items, each with an id."""
    if files.original is None:
        renamed = {field: row[column] for field, column in files.columns.items() if column in row}
        yield {"id": str(number), **row, **renamed}
        return
    try:
        made = ORIGINALS[files.original](row)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(f"Row {number} is not what the original {files.original!r} is made of: {_reason(error)}.") from error
    for item in [made] if isinstance(made, dict) else made:
        yield {"id": str(number), **item}


def _checked(item: dict[str, Any], schema: str) -> dict[str, Any]:
    """An item with the fields of its schema alone. KeyError, ValueError where it is none."""
    optional = {"context_options": None, "continuation": None, "question": None}
    made = {name: item.get(name, optional[name]) if name in optional else item[name] for name in FIELDS[schema]}
    made["id"] = str(made["id"])
    for name in ("context", "question", "target", "continuation"):
        if name in made and not isinstance(made[name], str) and not (made[name] is None and name in optional):
            raise ValueError(f"its {name} is {made[name]!r}, not a text")
    if schema == "multiple_choice":
        _check_choices(made)
    if schema == "recall":
        made["answers"] = _texts(made["answers"], "answers")
    if schema == "prompt_target" and not made["target"].strip():
        raise ValueError("its target is empty")
    return made


def _check_choices(made: dict[str, Any]) -> None:
    made["choices"], made["answer_index"] = _texts(made["choices"], "choices"), int(made["answer_index"])
    if not 0 <= made["answer_index"] < len(made["choices"]):
        raise ValueError(
            f"its answer_index is {made['answer_index']}, and it has {len(made['choices'])} choices (a test split without answers?)"
        )
    if made["context_options"] is not None:
        options = made["context_options"] = _texts(made["context_options"], "context_options")
        if len(options) != len(made["choices"]) or not (made["continuation"] or "").strip():
            raise ValueError("context_options go with one choice each and a continuation")
        if not all(option.endswith(choice) for option, choice in zip(options, made["choices"], strict=True)):
            raise ValueError("each of its context_options must end with its choice")


def _texts(values: Any, name: str) -> list[str]:
    found = list(values or [])
    if not found or not all(isinstance(value, str) and value.strip() for value in found):
        raise ValueError(f"its {name} are {found!r}, not texts")
    return found
