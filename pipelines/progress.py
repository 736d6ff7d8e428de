"""Progress lines, shown: a bar on a terminal, a plain line now and then in a log.

A line is what a stage's `context.progress` gives: step, of, and any of tokens_per_second, mfu, loss, seconds_left, event; or a note.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

PLAIN_SECONDS = 10.0  # between two plain lines


class Progress:
    """Shows the progress of one piece of work on `stream` (default: stderr). A context manager; `show` takes each line.

    On a terminal one bar, redrawn in place; otherwise at most one plain line every ten seconds, and every note.
    """

    def __init__(self, title: str, *, stream: TextIO | None = None, terminal: bool | None = None) -> None:
        self.title, self.stream = title, stream or sys.stderr
        self.terminal = self.stream.isatty() if terminal is None else terminal
        self._bar: Any = None
        self._task: Any = None
        self._printed = time.monotonic()  # work of a few seconds prints nothing
        self._first: tuple[float, float] | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def show(self, line: dict[str, Any]) -> None:
        """Show one progress line."""
        if note := line.get("note"):
            self.say(f"{self.title}: {note}")
        if event := line.get("event"):
            self.say(f"{self.title}: step {line['step']}: {event}")
        if "step" not in line or not line.get("of"):
            return
        left = self._left(line)
        if self.terminal:
            self._draw(line, left)
        elif time.monotonic() - self._printed >= PLAIN_SECONDS:
            self._printed = time.monotonic()
            print(f"{self.title}: {describe(line, left)}", file=self.stream, flush=True)

    def say(self, sentence: str) -> None:
        """A sentence above the bar, or in the log."""
        if self._bar is not None:
            self._bar.console.print(sentence, markup=False, highlight=False)
        else:
            print(sentence, file=self.stream, flush=True)

    def _left(self, line: dict[str, Any]) -> float | None:
        """Seconds left: the stage's own estimate, else by the pace since the first line shown, so that what was resumed is not fast."""
        if line.get("seconds_left") is not None:
            return line["seconds_left"]
        now, step = line.get("time", time.time()), line["step"]
        if self._first is None or step < self._first[1]:
            self._first = (now, step)
        began, first = self._first
        return (now - began) / (step - first) * (line["of"] - step) if step > first else None

    def _draw(self, line: dict[str, Any], left: float | None) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar

            console = Console(file=self.stream, force_terminal=True)
            columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[facts]}", markup=False))
            self._bar = Bar(*columns, console=console, transient=True)
            self._task = self._bar.add_task(self.title, total=line["of"], facts="")
            self._bar.start()
        self._bar.update(self._task, completed=line["step"], total=line["of"], facts=describe(line, left))


def describe(line: dict[str, Any], left: float | None = None) -> str:
    """A progress line in words: "120/244  loss 4.213  85.2k tokens/s  MFU 41.0%  2:10 left"."""
    facts = [f"{line['step']:,}/{line['of']:,}"]
    for name, form in (
        ("loss", "loss {:.3f}"),
        ("tokens_per_second", "{} tokens/s"),
        ("items_per_second", "{} items/s"),
        ("mfu", "MFU {:.1%}"),
    ):
        if (value := line.get(name)) is not None:
            facts.append(form.format(short(value) if name.endswith("_per_second") else value))
    if left is not None:
        facts.append(f"{clock(left)} left")
    return "  ".join(facts)


def short(value: float) -> str:
    """A count to three digits: 85.2k, 1.23M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def clock(seconds: float) -> str:
    """Seconds as m:ss, h:mm:ss, or days and hours."""
    whole = round(seconds)
    if whole >= 86400:
        return f"{whole // 86400} d {whole % 86400 // 3600} h"
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


class Follower:
    """Reads what is appended to the newest attempt's progress file, and tells when another attempt takes over.

    attempts: gives the attempts' folders, newest first. Those there already are history, but for `alive`, which somebody is making.
    """

    def __init__(
        self,
        attempts: Callable[[], list[Path]],
        show: Callable[[dict[str, Any]], None],
        say: Callable[[str], None],
        alive: Path | None = None,
    ) -> None:
        self.attempts, self.show, self.say = attempts, show, say
        self._number = max((int(path.name) for path in attempts() if path != alive), default=0)  # of the last one that is history
        self._folder: Path | None = None
        self._read = 0

    def look(self) -> None:
        """Show every line that was completed since the last look."""
        newest = next(iter(self.attempts()), None)
        if newest is not None and int(newest.name) > self._number:
            if self._folder is not None or int(newest.name) > self._number + 1:
                self.say(f"Attempt {int(newest.name) - 1} ended early; attempt {newest.name} takes up what it had saved.")
            self._folder, self._number, self._read = newest, int(newest.name), 0
        for line in self._lines():
            self.show(line)

    def _lines(self) -> Iterator[dict[str, Any]]:
        if self._folder is None:
            return
        try:
            with (self._folder / "progress.jsonl").open("rb") as file:
                file.seek(self._read)
                text = file.read()
        except FileNotFoundError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            try:
                value = json.loads(line)
            except ValueError:
                continue  # torn by a crash
            if isinstance(value, dict):
                yield value
