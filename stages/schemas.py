"""The Parquet schemas of every artifact, once; and the one way to write and read them.

A file's metadata holds its schema's name and version, the artifact's key, and the digest of its data: nothing that
depends on where or when it was made, so that the same inputs and library versions give the same bytes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 1

# name -> columns in pyarrow's own type names; "list<...>" and "fixed<...>" (length known when written) are the two nested kinds.
COLUMNS: dict[str, dict[str, str]] = {
    "tokens": {"id": "string", "source": "string", "tokens": "list<token>"},
    "packed": {"tokens": "fixed<token>", "segments": "list<int32>"},
    "history": {
        "step": "int64", "tokens": "int64", "loss": "float64", "learning_rate": "float64", "grad_norm": "float64", "seconds": "float64",
        "tokens_per_second": "float64", "mfu": "float64", "mfu_without_cg": "float64", "event": "string",
    },
    "nll": {"set": "string", "source": "string", "length": "int64", "sequence": "int64", "start": "int64", "nll": "list<float>"},
    "positions": {"set": "string", "length": "int64", "position": "int64", "nll_sum": "float64", "count": "int64"},
    # A set's losses by the domains of its documents.
    "domains": {
        "set": "string", "source": "string", "length": "int64", "setting": "string", "sequences": "int64", "tokens": "int64", "nll": "float64",
        "perplexity": "float64",
    },
    # Items of tasks, in three schemas (docs/tasks.md).
    "multiple_choice": {
        "id": "string", "context": "string", "choices": "list<string>", "answer_index": "int64", "context_options": "list<string>",
        "continuation": "string",
    },
    "prompt_target": {"id": "string", "context": "string", "target": "string"},
    "recall": {"id": "string", "context": "string", "question": "string", "answers": "list<string>"},
    # An evaluated item. scores, tokens, bytes: of each option its negative log likelihood, tokens, bytes (one option where there is no choice).
    "tasks": {
        "task": "string", "version": "int64", "shots": "int64", "draw": "int64", "item": "string", "scores": "list<double>",
        "tokens": "list<int64>", "bytes": "list<int64>", "prediction": "string", "target": "string", "hit": "bool", "score": "double",
        "shots_used": "int64", "truncated": "bool", "answer_cut": "bool",
    },
    # A task, under one number of shots and one draw of them.
    "scores": {
        "task": "string", "group": "string", "kind": "string", "version": "int64", "setting": "string", "shots": "int64", "draw": "int64",
        "items": "int64", "metric": "string", "score": "double", "chance": "double", "accuracy_tokens": "double", "accuracy_none": "double",
        "accuracy_bytes": "double", "nll": "double", "perplexity": "double", "truncated": "int64", "answers_cut": "int64", "shots_dropped": "int64",
    },
    # What a Mesa head and a Palimpsa head do, in a bin of positions first..position (stages/heads.py).
    "internals": {
        "block": "int64", "head": "int64", "first": "int64", "position": "int64", "sequences": "int64", "gamma": "float64", "beta": "float64",
        "steps": "float64", "cosine": "float64", "condition": "float64", "lambda_low": "float64", "lambda_mean": "float64", "lambda_high": "float64",
    },
    "memory": {
        "block": "int64", "head": "int64", "first": "int64", "position": "int64", "sequences": "int64", "log_window": "float64", "beta": "float64",
        "ratio": "float64", "importance_low": "float64", "importance_mean": "float64", "importance_high": "float64",
    },
    "perplexity": {
        "set": "string", "length": "int64", "setting": "string", "sequences": "int64", "tokens": "int64", "nll": "float64",
        "perplexity": "float64", "steps_taken": "float64", "residual": "float64",
    },
}  # fmt: skip

# The same of a model after some steps of its training (stages/course.py).
COLUMNS |= {f"{name}_course": {"step": "int64", "tokens": "int64"} | COLUMNS[name] for name in ("internals", "memory")}

FREE = "table"  # the analysis's tables: any columns, the same metadata


def _type(name: str, token: pa.DataType, length: int) -> pa.DataType:
    import pyarrow as pa

    plain = {"string": pa.string(), "int64": pa.int64(), "int32": pa.int32(), "float64": pa.float64(), "double": pa.float64(),
             "float": pa.float32(), "bool": pa.bool_(), "token": token}  # fmt: skip
    if name.startswith("list<"):
        return pa.list_(plain[name[5:-1]])
    if name.startswith("fixed<"):
        return pa.list_(plain[name[6:-1]], length)
    return plain[name]


def token_type(vocab_size: int) -> pa.DataType:
    """uint16 where every token id fits, else uint32."""
    import pyarrow as pa

    return pa.uint16() if vocab_size <= 1 << 16 else pa.uint32()


def schema(name: str, *, vocab_size: int = 1 << 16, length: int = 1, extra: Iterable[str] = ()) -> pa.Schema:
    """The schema `name`. vocab_size and length complete token columns; `extra` are a layer's own float64 scalars (history)."""
    import pyarrow as pa

    token = token_type(vocab_size)
    fields = [pa.field(column, _type(kind, token, length)) for column, kind in COLUMNS[name].items()]
    return pa.schema(fields + [pa.field(column, pa.float64()) for column in sorted(extra)])


def _plain_name(kind: pa.DataType) -> str:
    """A type's name without what Parquet readers rename (a list's item field)."""
    return f"list<{_plain_name(kind.value_type)}>" if hasattr(kind, "value_type") else str(kind)


class _Digest:
    """Digest of a stream of record batches that does not depend on where the batches are cut."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self.streams: dict[str, Any] = {}

    def _feed(self, stream: str, data: Any) -> None:
        self.streams.setdefault(stream, hashlib.sha256()).update(data)

    def _array(self, name: str, array: pa.Array) -> None:
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        kind = array.type
        self._feed(f"{name}:valid", np.ascontiguousarray(array.is_valid().to_numpy(zero_copy_only=False)).view(np.uint8))
        if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
            self._feed(
                f"{name}:length",
                np.ascontiguousarray(pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).astype("<i8")),
            )
            self._array(f"{name}.item", array.flatten())
        elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
            data = [value.encode() for value in pc.fill_null(array, "").to_pylist()]
            self._feed(f"{name}:length", np.array([len(item) for item in data], "<i8"))
            self._feed(f"{name}:bytes", b"".join(data))
        else:
            filled = pc.fill_null(array, False if pa.types.is_boolean(kind) else 0) if array.null_count else array
            self._feed(f"{name}:values", np.ascontiguousarray(filled.to_numpy(zero_copy_only=False)).view(np.uint8))

    def update(self, batch: pa.RecordBatch) -> None:
        for field, column in zip(self.schema, batch.columns, strict=True):
            self._array(field.name, column)

    def value(self) -> str:
        columns = ",".join(f"{field.name}:{_plain_name(field.type)}" for field in self.schema)
        parts = sorted((name, stream.hexdigest()) for name, stream in self.streams.items())
        return "data:" + hashlib.sha256(repr((columns, parts)).encode()).hexdigest()


def recorded_digest(path: Path) -> str | None:
    """The digest that a Parquet file says of itself, None if it says none. ValueError where the file is not readable."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        found = (pq.read_metadata(path).metadata or {}).get(b"strata.digest")
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path} is not a whole Parquet file ({error}). Delete it and run again.") from error
    return found.decode() if found else None


def data_digest(path: Path) -> str:
    """Digest ("data:<hex>") of a Parquet file's values, read in bounded memory. ValueError where the file is not readable."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            digest = _Digest(file.schema_arrow)
            for batch in file.iter_batches(batch_size=1024):
                digest.update(batch)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path} is not a whole Parquet file ({error}). Delete it and run again.") from error
    return digest.value()


def _encoding(schema: pa.Schema) -> dict[str, Any]:
    """Token columns with their bytes apart: smaller and faster than dictionaries of them."""
    import pyarrow.types as types

    split = {field.name for field in schema if hasattr(field.type, "value_type") and types.is_unsigned_integer(field.type.value_type)}
    if not split:
        return {}
    others = [
        f"{field.name}.list.element" if hasattr(field.type, "value_type") else field.name for field in schema if field.name not in split
    ]
    return {"use_dictionary": others, "column_encoding": {f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in sorted(split)}}


def write(path: Path, data: pa.Table | Iterable[pa.RecordBatch], *, name: str, key: str, schema: pa.Schema | None = None) -> str:
    """Write `data` (a table, or batches with their `schema`) to `path`, all at once or not at all. Returns the data's digest.

    The digest goes into the file's metadata beside the schema's name and version and the key.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if isinstance(data, pa.Table):
        schema = data.schema if schema is None else schema
        data = data.cast(schema).combine_chunks().to_batches()
    assert schema is not None and (name == FREE or name in COLUMNS)
    digest = _Digest(schema)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with pq.ParquetWriter(partial, schema, compression="zstd", write_page_checksum=True, **_encoding(schema)) as writer:
            for batch in data:
                digest.update(batch)
                writer.write_batch(batch)
            writer.add_key_value_metadata(
                {"strata.schema": name, "strata.schema_version": str(VERSION), "strata.key": key, "strata.digest": digest.value()}
            )
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return digest.value()


def read(path: Path, name: str) -> pa.Table:
    """Read a file of schema `name` whole. ValueError where it is damaged or holds something else."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, page_checksum_verification=True)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path} is not a whole Parquet file ({error}). Delete it and run again.") from error
    metadata(path, name)
    return table


def metadata(path: Path, name: str) -> dict[str, str]:
    """The `strata.*` metadata of a file of schema `name`, without reading its data. ValueError where it holds something else."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        raw = pq.read_metadata(path).metadata or {}
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path} is not a whole Parquet file ({error}). Delete it and run again.") from error
    found = {key.decode(): value.decode() for key, value in raw.items() if key.startswith(b"strata.")}
    if found.get("strata.schema") != name or found.get("strata.schema_version") != str(VERSION):
        kind = f"{found.get('strata.schema', 'no schema of ours')} version {found.get('strata.schema_version', '-')}"
        raise ValueError(f"{path} holds {kind}, wanted {name} version {VERSION}. Delete it and run again.")
    return found


def batches(table_rows: Iterable[dict[str, list[Any]]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Column dictionaries as record batches of `schema`."""
    import pyarrow as pa

    for columns in table_rows:
        yield pa.record_batch([pa.array(columns[field.name], field.type) for field in schema], schema=schema)
