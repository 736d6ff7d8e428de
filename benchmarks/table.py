"""A benchmark's results: a table on the terminal, and the same as Parquet.

A row is kept as soon as it is measured, in <name>.jsonl beside where the table will lie; the table takes its place when all rows are there. What a run that
was cut short, or a machine without pyarrow, leaves there becomes a table by `python -m benchmarks record FILE`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]
"""Column to a number, a text or None."""


def report(name: str, rows: Iterable[Row], *, folder: str | Path | None = None) -> Path:
    """Print rows and write them to <folder>/<name>.parquet (benchmarks/results), with what they ran on: the machine, its card, the libraries and the
    commit. What a row lacks of another's columns is None. Returns the table's path, or without pyarrow that of <name>.jsonl."""
    folder = Path(folder or RESULTS)
    kept = folder / f"{name}.jsonl"
    full = list(_kept(rows, kept))
    if importlib.util.find_spec("pyarrow") is None:
        _print(full)
        print(
            f"{kept}: without pyarrow there is no Parquet here; `python -m benchmarks record {kept}` makes it where there is.",
            file=sys.stderr,
        )
        return kept
    return _write(full, kept)


def record(path: str | Path) -> Path:
    """The table of the rows that a run left in a .jsonl, which it replaces."""
    path = Path(path)
    return _write([json.loads(line) for line in path.read_text().splitlines()], path)


def said(row: Row) -> Row:
    """The row, printed at once."""
    given = {name: value for name, value in row.items() if value not in (None, "")}
    print("  ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in given.items()), flush=True)
    return row


def _kept(rows: Iterable[Row], path: Path) -> Iterator[Row]:
    """The rows with what they ran on, each written before the next is asked for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    where: Row = {}
    with path.open("w") as file:
        for row in rows:
            where = where or _where()
            file.write(json.dumps(row | where) + "\n")
            file.flush()
            yield row | where


def _write(full: list[Row], kept: Path) -> Path:
    import pyarrow as pa

    from stages import schemas

    columns = _print(full)
    measured = [name for name in columns if any(row.get(name) is not None for row in full)]  # a column of nothing has no type
    where = [name for name in full[0] if name in WHERE]
    path = kept.with_suffix(".parquet")
    table = pa.Table.from_pylist([{name: row.get(name) for name in measured + where} for row in full])
    schemas.write(path, table, name=schemas.FREE, key="")
    kept.unlink()
    return path


def _print(full: list[Row]) -> list[str]:
    """Prints rows without what they ran on, and gives their columns."""
    columns = [name for name in dict.fromkeys(name for row in full for name in row) if name not in WHERE]
    text = [columns, *([_text(row.get(column)) for column in columns] for row in full)]
    widths = [max(len(line[i]) for line in text) for i in range(len(columns))]
    for number, line in enumerate(text):
        print("  ".join(value.ljust(width) for value, width in zip(line, widths, strict=True)).rstrip())
        if number == 0:
            print("  ".join("-" * width for width in widths))
    return columns


WHERE = ("platform", "processors", "card", "libraries", "commit")


def _where() -> Row:
    from stages import provenance

    values = f"{platform.system()} {platform.machine()}", os.cpu_count(), _card(), json.dumps(provenance.versions()), _commit()
    return dict(zip(WHERE, values, strict=True))


def _card() -> str:
    """The GPU's name, where torch is loaded and sees one."""
    torch = sys.modules.get("torch")
    return torch.cuda.get_device_name() if torch is not None and torch.cuda.is_available() else ""


def _commit() -> str:
    """The commit of the code, with + where tracked files differ from it; STRATA_COMMIT where the code came without its repository."""
    if given := os.environ.get("STRATA_COMMIT"):
        return given
    if shutil.which("git") is None:
        return ""
    return subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=RESULTS.parent, capture_output=True, text=True).stdout.strip()


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3g}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks record", description="Parquet tables of the rows that runs left.")
    parser.add_argument("files", nargs="+", help="NAME.jsonl; NAME.parquet takes its place")
    for file in parser.parse_args(arguments).files:
        print(record(file))
