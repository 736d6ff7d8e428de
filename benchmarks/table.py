"""A benchmark's results: a table on the terminal, and the same as Parquet."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def report(name: str, rows: list[dict[str, Any]]) -> Path:
    """Print rows (the same keys in each) and write them to benchmarks/results/<name>.parquet, with what they ran on."""
    import pyarrow as pa

    from stages import provenance, schemas

    columns = list(rows[0])
    text = [columns, *([_text(row[column]) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in text) for i in range(len(columns))]
    for number, line in enumerate(text):
        print("  ".join(value.ljust(width) for value, width in zip(line, widths, strict=True)).rstrip())
        if number == 0:
            print("  ".join("-" * width for width in widths))
    where = {"platform": platform.platform(), "processors": os.cpu_count(), "libraries": json.dumps(provenance.versions())}
    path = RESULTS / f"{name}.parquet"
    schemas.write(path, pa.Table.from_pylist([row | where for row in rows]), name=schemas.FREE, key="")
    return path


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3g}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
