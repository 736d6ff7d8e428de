"""The history of a training run: a row a step, appended while it runs, one Parquet file at its end.

The log (`history.jsonl`) is made durable just before each checkpoint, which records the log's length; who resumes from
that checkpoint cuts the log to it. So every step is there exactly once, whenever the run was killed. What was looked at between
steps (stages/course.py) stands in the same log, in lines of its own, and so is there exactly once too.
"""

from __future__ import annotations

import json
import os
import statistics
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from stages import schemas
from stages.artifact import write_atomically

LOG = "history.jsonl"
LOOK = "after"  # what a line that is no step's has: after how many steps it was looked
BLOCK = 4096

Row = dict[str, Any]


class History:
    """The log of one attempt. Rows are numbered by their `step`, from 1 on without a gap."""

    def __init__(self, out: Path) -> None:
        self.path = out / LOG
        self.waiting: list[str] = []
        self.length = 0  # bytes that are durable

    def append(self, row: Row) -> None:
        """Add a step's row; it becomes durable with the next `flush`."""
        self.waiting.append(json.dumps(row) + "\n")

    def append_look(self, look: Row) -> None:
        """Add what was looked at after `look[LOOK]` steps; durable as they are."""
        assert LOOK in look
        self.waiting.append(json.dumps(look) + "\n")

    def flush(self) -> int:
        """Make every row durable. Returns the log's length in bytes."""
        if self.waiting:
            with self.path.open("ab") as file:
                file.truncate(self.length)  # what a failed flush left
                file.seek(self.length)
                file.write("".join(self.waiting).encode())
                file.flush()
                os.fsync(file.fileno())
                self.length = file.tell()
            self.waiting.clear()
        return self.length

    def start(self) -> None:
        """Begin an empty log, whatever stood there."""
        self.path.unlink(missing_ok=True)
        self.waiting.clear()
        self.length = 0

    def resume(self, source: Path, *, length: int, step: int) -> None:
        """Go on after the first `length` bytes, `step` rows, of the log in the folder `source` (this attempt's own or another's).

        ValueError where they are not there whole.
        """
        path = source / LOG
        try:
            with path.open("rb") as file:
                text = file.read(length).decode()
            found = [row["step"] for row in _parse(text.splitlines()) if not _is_look(row)]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error})") from error
        if len(text.encode()) != length or found != list(range(1, step + 1)):
            raise ValueError(f"{path} does not hold the {step} steps of its checkpoint")
        if path == self.path:
            os.truncate(self.path, length)
        else:
            write_atomically(self.path, text)
        self.waiting.clear()
        self.length = length

    def rows(self) -> Iterator[Row]:
        """Every step's row so far, in order."""
        return (row for row in self._lines() if not _is_look(row))

    def looks(self) -> Iterator[Row]:
        """Everything that was looked at so far, in order."""
        return (row for row in self._lines() if _is_look(row))

    def _lines(self) -> Iterator[Row]:
        if self.length:
            with self.path.open() as file:
                yield from _parse(file)
        yield from _parse(self.waiting)

    def to_parquet(self, path: Path, *, key: str) -> None:
        """Write the history as Parquet: schema "history" and a column for every scalar that the layers recorded."""
        common = schemas.COLUMNS["history"]
        extra = {name for row in self.rows() for name in row} - set(common)
        schema = schemas.schema("history", extra=extra)
        blocks = ({field.name: [row.get(field.name) for row in block] for field in schema} for block in _blocks(self.rows()))
        schemas.write(path, schemas.batches(blocks, schema), name="history", key=key, schema=schema)


def _parse(lines: Any) -> Iterator[Row]:
    return (json.loads(line) for line in lines)


def _is_look(row: Row) -> bool:
    return LOOK in row


def _blocks(rows: Iterator[Row]) -> Iterator[list[Row]]:
    while block := list(islice(rows, BLOCK)):
        yield block


class Spikes:
    """Says when a loss is a spike: further above the median of the last 64 finite losses than 8 of their deviations, and than 0.1 nats.

    The deviation is 1.4826 times the median distance from the median, so that a spike does not hide the next one. Nothing is a
    spike in the first 32 steps, where the loss falls too fast to tell.
    """

    WINDOW, ENOUGH, DEVIATIONS, LEAST = 64, 32, 8.0, 0.1

    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=self.WINDOW)

    def height(self, loss: float) -> float | None:
        """How far above the median a finite loss is, in nats, if that is a spike."""
        if len(self.recent) < self.ENOUGH:
            return None
        middle = statistics.median(self.recent)
        deviation = 1.4826 * statistics.median(abs(value - middle) for value in self.recent)
        height = loss - middle
        return height if height > max(self.DEVIATIONS * deviation, self.LEAST) else None

    def append(self, loss: float) -> None:
        """Take in the loss of a step that was taken."""
        self.recent.append(loss)
