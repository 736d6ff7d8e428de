"""A benchmark's results: a table on the terminal, and the same as Parquet."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def report(name: str, rows: list[dict[str, Any]], *, folder: str | Path | None = None) -> Path:
    """Print rows (the same keys in each) and write them to <folder>/<name>.parquet (benchmarks/results), with what they ran on: the machine, its
    card, the libraries and the commit."""
    import pyarrow as pa

    from stages import provenance, schemas

    columns = list(rows[0])
    text = [columns, *([_text(row[column]) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in text) for i in range(len(columns))]
    for number, line in enumerate(text):
        print("  ".join(value.ljust(width) for value, width in zip(line, widths, strict=True)).rstrip())
        if number == 0:
            print("  ".join("-" * width for width in widths))
    where = {
        "platform": f"{platform.system()} {platform.machine()}",
        "processors": os.cpu_count(),
        "card": _card(),
        "libraries": json.dumps(provenance.versions()),
        "commit": _commit(),
    }
    path = Path(folder or RESULTS) / f"{name}.parquet"
    measured = [name for name in columns if any(row[name] is not None for row in rows)]  # a column of nothing has no type
    schemas.write(path, pa.Table.from_pylist([{name: row[name] for name in measured} | where for row in rows]), name=schemas.FREE, key="")
    return path


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
