"""How far one study goes: thousands of cells under one `dvc repro`, and a driver of a hundred nodes.

    study    what `resolve`, `strata plan`, and DVC take by the number of cells: a `dvc repro` with nothing to do, and one stage collected
    driver   a grid released at once to the study's driver on a simulated cluster, training and evaluation being stubs that publish at once:
             what is left is the driver's own work and the store's
    workers  the same driver on a real Ray of this machine, a worker process a task: what Ray adds
    grid     cells of the nano study on a local head: one after another, in parallel, and killed and begun again on the way

`study` and `driver` take minutes for 1,000 cells; `grid` trains: give it time and a free machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.table import report

PARTS = ("study", "driver", "workers", "grid")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks scaling", description=__doc__.split("\n")[0])
    parser.add_argument(
        "parts", nargs="*", default=["study", "driver"], metavar="PART", help=f"{', '.join(PARTS)}; study and driver by default"
    )
    parser.add_argument("--cells", type=int, nargs="+", default=[100, 300, 1000], help="of study and driver")
    parser.add_argument("--nodes", type=int, default=100, help="of the simulated cluster, one cell at a time on each")
    parser.add_argument("--workers", type=int, default=24, help="cells of `workers`")
    parser.add_argument("--grid-cells", type=int, default=12)
    parser.add_argument("--grid-tokens", type=int, default=1_000_000, help="training tokens of each cell of `grid`")
    options = parser.parse_args(arguments)
    if strange := set(options.parts) - set(PARTS):
        parser.error(f"{', '.join(sorted(strange))}: the parts are {', '.join(PARTS)}")
    for part in options.parts:
        with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
            rows = _measure(part, options, Path(folder))
        print(f"\n{report(f'scaling-{part}', rows)}\n", flush=True)


def _measure(part: str, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    if part == "grid":
        from benchmarks.scale import grid

        return grid.measure(folder, cells=options.grid_cells, tokens=options.grid_tokens)
    from benchmarks.scale import driver, study

    if part == "study":
        return [_told(study.measure(folder / str(cells), cells)) for cells in options.cells]
    if part == "driver":
        return [_told(driver.simulated(folder / str(cells), cells, options.nodes)) for cells in options.cells]
    return [driver.real(folder / "workers", options.workers)]


def _told(row: dict[str, Any]) -> dict[str, Any]:
    """The row, shown at once: the next takes longer."""
    print(
        ", ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()),
        file=sys.stderr,
        flush=True,
    )
    return row
