"""Entries of a benchmark measured one after another in a process of their own, so that one that fails, hangs or takes the card's context with it is a row
with a note and the others go on; and entries compiled beforehand, several at a time.
"""

from __future__ import annotations

import multiprocessing as mp
import multiprocessing.connection
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.table import Row

Measure = Callable[..., Row]
"""(entry, **options) -> the entry's measurements, by column. The entry's own columns identify it."""
PATIENCE = 240.0
"""Seconds that an entry may take."""
STICKY = (
    "CUDA error",
    "CUDA driver error",
    "unspecified launch failure",
    "illegal memory access",
    "device-side assert",
    "CUBLAS_STATUS",
    "misaligned",
)
"""What a card's errors have in them after which its context is of no more use."""


def each(
    measure: Measure, entries: Sequence[Row], *, seconds: float | None = None, patience: float = PATIENCE, **options: Any
) -> Iterator[Row]:
    """Each entry with what was measured of it, and a note ("" or why there is nothing). seconds: no entry begins later than that."""
    context, waiting = mp.get_context("spawn"), list(entries)
    until = None if seconds is None else time.time() + seconds
    while waiting:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(measure, waiting, until, options, sender))
        process.start()
        sender.close()
        going = True
        while waiting and going:
            row, going = _next(receiver, process, patience)
            if row is not None:
                yield waiting.pop(0) | row
        process.join(10)
        process.kill()


def _next(receiver: multiprocessing.connection.Connection, process: Any, patience: float) -> tuple[Row | None, bool]:
    """(the next row, whether there is a process to give further ones); no row where it ended between two entries."""
    if receiver.poll(patience):
        try:
            return receiver.recv(), True
        except EOFError:  # no more is coming
            process.join()
            return ({"note": f"its process ended with {process.exitcode}"} if process.exitcode else None), False
    process.kill()
    process.join()
    return {"note": f"it took more than {patience:.0f} s"}, False


def _serve(measure: Measure, entries: list[Row], until: float | None, options: dict[str, Any], sender: Any) -> None:
    for entry in entries:
        if until is not None and time.time() > until:
            sender.send({"note": "not measured: the time was up"})
            continue
        try:
            row = measure(entry, **options) | {"note": ""}
        except Exception as problem:  # whatever a peer, a compiler or a card refuses is that entry's result
            row = {"note": _said(problem)}
        sender.send(row)
        if any(word in row["note"] for word in STICKY):
            return


def inline(measure: Measure, entries: Sequence[Row], **options: Any) -> Iterator[Row]:
    """`each` in this process: nothing is caught."""
    for entry in entries:
        yield entry | measure(entry, **options) | {"note": ""}


def _said(problem: Exception) -> str:
    first = next(iter(str(problem).strip().splitlines()), "")
    return f"{type(problem).__name__}: {first[:200]}"


def prepare(run: Callable[..., Any], entries: Sequence[Row], *, processes: int = 12, seconds: float = 120.0, **options: Any) -> None:
    """run(entry, **options) for each in a process of its own, so many at a time: what they compile lies in the caches then. Failures show when measured."""
    context, waiting, running = mp.get_context("spawn"), list(entries), []
    until = time.time() + seconds
    while (waiting or running) and time.time() < until:
        while waiting and len(running) < processes:
            running.append(context.Process(target=_quietly, args=(run, waiting.pop(0), options)))
            running[-1].start()
        multiprocessing.connection.wait([process.sentinel for process in running], 1.0)
        running = [process for process in running if process.is_alive()]
    for process in running:
        process.kill()
        process.join()


def _quietly(run: Callable[..., Any], entry: Row, options: dict[str, Any]) -> None:
    import contextlib
    import os

    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
        contextlib.suppress(Exception),
    ):
        run(entry, **options)
