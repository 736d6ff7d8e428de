"""Documents out of one file, in its order: Parquet, JSON lines (plain, .gz, .zst), or text (one document a file).

They come in Arrow batches of bounded size, whose cuts depend on the documents alone. A bad document is left out and counted by
kind in a Tally: empty, null, not_utf8, not_text (a number, say), broken_json, too_long (over a GiB). Documents that are kept but
unusual are noted: huge (the encoder gets it in parts), special_token (holds the text of one, which stays ordinary text).
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.sources import ENDINGS, Reading, kind

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

BATCH = 8 << 20  # bytes of text: a batch ends with the document that reaches it
ROWS = 4096  # at most, read from Parquet at once
HUGE = 1 << 20  # bytes of text; more are given to the encoder in parts
LIMIT = 1 << 30
SPECIAL = b"<|endoftext|>"


@dataclass
class Tally:
    """What was met. documents and bytes: kept. filtered: not selected by `where`. bad: left out, by kind. noted: kept but unusual, by kind."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0
    filtered: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)

    def record(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in ("documents", "tokens", "bytes", "filtered")}
        return counts | {name: dict(sorted(getattr(self, name).items())) for name in ("bad", "noted")}

    def add(self, record: dict[str, Any]) -> None:
        for name in ("documents", "tokens", "bytes", "filtered"):
            setattr(self, name, getattr(self, name) + record[name])
        self.bad.update(record["bad"])
        self.noted.update(record["noted"])


def documents(path: Path, reading: Reading, *, prefix: str, tally: Tally) -> Iterator[pa.RecordBatch]:
    """The good documents of `path` as batches of columns id (string), text (large_binary, UTF-8, not empty) and, where the reading names one,
    domain (string); the others go to `tally`.

    prefix: of made-up ids, "<prefix>:<row>". ValueError where the file is no whole file of its format, or lacks a column.
    """
    import pyarrow as pa

    form = kind(path.name) if reading.format == "auto" else reading.format
    if form is None:
        raise ValueError(f"{path} has a name that tells no format ({', '.join(ENDINGS)}); give the source a `format`.")
    raw = {"parquet": _parquet, "jsonl": _json_lines, "text": _text}[form]
    rows = raw(path, reading, prefix, tally)
    try:
        yield from _cut(_sift(_joined(rows, prefix) if reading.document == "file" else rows, tally))
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path} is not a whole {form} file ({error}). Fetch it again, or take it out of the source.") from error


def _batch(ids: Any, text: Any, domains: Any = None) -> pa.RecordBatch:
    import pyarrow as pa

    columns = {"id": pa.array(ids, pa.string()), "text": pa.array(text, pa.large_binary())}
    return pa.record_batch(columns | ({} if domains is None else {"domain": pa.array(domains, pa.string())}))


def _joined(rows: Iterator[pa.RecordBatch], prefix: str) -> Iterator[pa.RecordBatch]:
    """All rows as one document, blank lines between them; an empty row is an empty line."""
    texts = [text or b"" for batch in rows for text in batch["text"].to_pylist()]
    yield _batch([prefix], [b"\n\n".join(texts)])


# Formats: batches (id, text) as they come, text null where there is none.


def _parquet(path: Path, reading: Reading, prefix: str, tally: Tally) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, buffer_size=1 << 20) as file:
        columns = [name for name in (reading.column, reading.id, reading.domain, *reading.where) if name is not None]
        for name in columns:
            if not any(one == name or one.startswith(f"{name}.") for one in _paths(file.schema_arrow)):
                raise ValueError(f"{path} has no column {name!r}; it has {', '.join(file.schema_arrow.names)}.")
        row = 0
        for group in range(file.num_row_groups):
            facts = file.metadata.row_group(group)
            if not _may_hold(facts, reading.where):
                tally.filtered += facts.num_rows
                row += facts.num_rows
                continue
            average = sum(facts.column(i).total_uncompressed_size for i in range(facts.num_columns)) // max(1, facts.num_rows)
            size = max(1, min(ROWS, BATCH // max(1, average)))
            for batch in file.iter_batches(batch_size=size, row_groups=[group], columns=columns):
                text = _column(batch, reading.column)
                if not (
                    pa.types.is_null(text.type) or pa.types.is_binary(_plain(text.type)) or pa.types.is_large_binary(_plain(text.type))
                ):
                    raise ValueError(f"{path}: column {reading.column!r} holds {text.type}, not text.")
                names = [f"{prefix}:{row + i}" for i in range(len(batch))]
                row += len(batch)
                ids = pa.array(names, pa.string())
                if reading.id is not None:
                    ids = pc.coalesce(_column(batch, reading.id).cast(pa.string()), ids)
                domains = {} if reading.domain is None else {"domain": _column(batch, reading.domain).cast(pa.string())}
                whole = pa.record_batch({"id": ids, "text": _binary(text), **domains})
                for name, value in reading.where.items():
                    column = _column(batch, name)
                    try:
                        chosen = pc.is_null(column) if value is None else pc.fill_null(pc.equal(column, pa.scalar(value)), False)
                    except pa.ArrowException as error:
                        raise ValueError(
                            f"{path}: column {name!r} holds {column.type}, which {value!r} (where) cannot be compared with."
                        ) from error
                    batch, whole = batch.filter(chosen), whole.filter(chosen)
                tally.filtered += len(names) - len(whole)
                yield whole


def _paths(schema: pa.Schema) -> list[str]:
    """Names of columns, and of structs' fields behind a dot."""
    import pyarrow as pa

    def below(name: str, kind: pa.DataType) -> list[str]:
        inner = [kind.field(i) for i in range(kind.num_fields)] if pa.types.is_struct(kind) else []
        return [name, *(path for one in inner for path in below(f"{name}.{one.name}", one.type))]

    return [path for one in schema for path in below(one.name, one.type)]


def _column(batch: pa.RecordBatch, name: str) -> pa.Array:
    import pyarrow.compute as pc

    if name in batch.schema.names:
        return batch.column(name)
    first, *rest = name.split(".")
    return pc.struct_field(batch.column(first), rest)


def _plain(kind: pa.DataType) -> pa.DataType:
    """The binary type behind the several that hold text."""
    import pyarrow as pa

    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind) or pa.types.is_binary_view(kind)
    return pa.large_binary() if text else kind


def _binary(text: pa.Array) -> pa.Array:
    import pyarrow as pa

    if pa.types.is_dictionary(text.type):
        text = text.cast(text.type.value_type)
    return text.cast(pa.large_binary())


def _may_hold(group: pq.RowGroupMetaData, where: dict[str, Any]) -> bool:
    """Whether a row group can hold a row that `where` selects, by its statistics."""
    for i in range(group.num_columns):
        column = group.column(i)
        value = where.get(column.path_in_schema)
        facts = column.statistics
        if (
            value is not None
            and facts is not None
            and facts.has_min_max
            and type(facts.min) is type(value)
            and not facts.min <= value <= facts.max
        ):
            return False
    return True


def _stream(path: Path) -> io.BufferedReader:
    import pyarrow as pa

    return io.BufferedReader(pa.input_stream(str(path), compression="detect"), 1 << 20)


def _json_lines(path: Path, reading: Reading, prefix: str, tally: Tally) -> Iterator[pa.RecordBatch]:
    ids: list[str] = []
    texts: list[bytes | None] = []
    domains: list[str | None] = []
    size = row = 0

    def batch() -> pa.RecordBatch:
        return _batch(ids, texts, None if reading.domain is None else domains)

    with _stream(path) as file:
        while line := file.readline(LIMIT):
            if len(line) == LIMIT and not line.endswith(b"\n"):
                while (rest := file.readline(LIMIT)) and not rest.endswith(b"\n"):
                    pass
                tally.bad["too_long"] += 1
            elif line.strip() and (found := _record(line, reading, tally)) is not None:
                ids.append(f"{prefix}:{row}" if found[0] is None else found[0])
                texts.append(found[1])
                domains.append(found[2])
                size += len(found[1] or b"")
            row += 1
            if size >= BATCH or len(ids) >= ROWS:
                yield batch()
                ids, texts, domains, size = [], [], [], 0
    if ids:
        yield batch()


def _record(line: bytes, reading: Reading, tally: Tally) -> tuple[str | None, bytes | None, str | None] | None:
    """(id, text, domain) of a line, text None where it is null; None where the line is bad or not selected."""
    try:
        record = json.loads(line)
    except UnicodeDecodeError:
        tally.bad["not_utf8"] += 1
        return None
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        tally.bad["broken_json"] += 1
        return None
    for name, value in reading.where.items():
        found = _value(record, name)
        if found != value or isinstance(found, bool) != isinstance(value, bool):
            tally.filtered += 1
            return None
    text = _value(record, reading.column)
    if not isinstance(text, str | None):
        tally.bad["not_text"] += 1
        return None
    number = None if reading.id is None else _value(record, reading.id)
    try:
        name = None if number is None else str(number)
        if name is not None:
            name.encode()
        domain = None if reading.domain is None else _value(record, reading.domain)
        return name, None if text is None else text.encode(), None if domain is None else str(domain)
    except UnicodeEncodeError:  # half of a surrogate pair
        tally.bad["not_utf8"] += 1
        return None


def _value(record: Any, name: str) -> Any:
    if isinstance(record, dict) and name in record:
        return record[name]
    first, dot, rest = name.partition(".")
    return _value(record[first], rest) if dot and isinstance(record, dict) and first in record else None


def _text(path: Path, reading: Reading, prefix: str, tally: Tally) -> Iterator[pa.RecordBatch]:
    if reading.where or reading.id is not None or reading.domain is not None:
        raise ValueError(f"{path} is plain text, which has no columns: `where`, `id` and `domain` are for Parquet and JSON lines.")
    with _stream(path) as file:
        text = file.read(LIMIT + 1)
    if len(text) > LIMIT:
        tally.bad["too_long"] += 1
        return
    yield _batch([f"{prefix}:0"], [text])


# What is kept, and in which batches


def _sift(batches: Iterable[pa.RecordBatch], tally: Tally) -> Iterator[pa.RecordBatch]:
    """Leave out and count the bad documents; count the good ones."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    for batch in batches:
        if nulls := batch["text"].null_count:
            tally.bad["null"] += nulls
            batch = batch.filter(batch["text"].is_valid())
        sizes = pc.binary_length(batch["text"]).to_numpy(zero_copy_only=False)
        for name, wrong in (("empty", sizes == 0), ("too_long", sizes > LIMIT)):
            if count := int(wrong.sum()):
                tally.bad[name] += count
                batch, sizes = batch.filter(pa.array(~wrong)), sizes[~wrong]
        try:
            batch["text"].cast(pa.large_string())  # checks that it is UTF-8
        except pa.ArrowInvalid:
            good = np.array([_is_utf8(text) for text in batch["text"]], bool)
            tally.bad["not_utf8"] += int((~good).sum())
            batch, sizes = batch.filter(pa.array(good)), sizes[good]
        if SPECIAL in text_bytes(batch["text"]).tobytes():
            tally.noted["special_token"] += int(pc.sum(pc.match_substring(batch["text"], SPECIAL)).as_py() or 0)
        if huge := int((sizes > HUGE).sum()):
            tally.noted["huge"] += huge
        tally.documents += len(batch)
        tally.bytes += int(sizes.sum())
        if len(batch):
            yield batch


def _is_utf8(text: pa.Scalar) -> bool:
    try:
        str(text.as_buffer(), "utf-8")
    except UnicodeDecodeError:
        return False
    return True


def offsets_of(text: pa.LargeBinaryArray) -> Any:
    """Where the documents begin and end in the array's data buffer: int64 [documents + 1]."""
    import numpy as np

    return np.frombuffer(text.buffers()[1], np.int64)[text.offset : text.offset + len(text) + 1]


def text_bytes(text: pa.LargeBinaryArray) -> Any:
    """The documents' bytes one after another, uint8, not copied."""
    import numpy as np

    if not len(text):
        return np.zeros(0, np.uint8)
    ends = offsets_of(text)
    return np.frombuffer(text.buffers()[2], np.uint8)[ends[0] : ends[-1]]


def _cut(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same documents in batches that end with the document that reaches BATCH bytes."""
    import numpy as np

    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        ends = offsets_of(batch["text"])
        start = 0
        while start < len(batch):
            stop = min(len(batch), int(np.searchsorted(ends, ends[start] + BATCH - size)))
            held.append(batch.slice(start, stop - start))
            size += int(ends[stop] - ends[start])
            start = stop
            if size >= BATCH:
                yield _join(held)
                held, size = [], 0
    if held:
        yield _join(held)


def _join(held: list[pa.RecordBatch]) -> pa.RecordBatch:
    import pyarrow as pa

    if len(held) == 1:
        return held[0]
    return pa.record_batch({name: pa.concat_arrays([batch[name] for batch in held]) for name in held[0].schema.names})
