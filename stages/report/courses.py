"""What heads do while a model is trained: a line a head over training tokens, from the looks of stages/course.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, Colormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from stages.report import style
from stages.report.maps import AT_THE_END, MESA, PALIMPSA, Columns
from stages.report.study import Study
from stages.report.style import INK, WIDTH, Style

Row = dict[str, Any]
Made = Iterator[tuple[str, Figure, str]]

BLOCKS = "viridis_r"  # light to dark with depth; its palest end is left out
PALEST = 0.12
FAINT_FROM = 48  # heads from which lines are thinner


def inside(study: Study, tables: dict[str, list[Row]], look: Style) -> Made:
    """How a cell's Mesa heads come to do what they do. A figure a cell."""
    yield from _of_heads(study, tables, look, MESA, table="internals_course", end="the condition")


def memory(study: Study, tables: dict[str, list[Row]], look: Style) -> Made:
    """How the memory of a cell's Palimpsa heads grows. A figure a cell."""
    yield from _of_heads(study, tables, look, PALIMPSA, table="memory_course", end="the ratio")


def _of_heads(study: Study, tables: dict[str, list[Row]], look: Style, columns: Columns, *, table: str, end: str) -> Made:
    for run in study.compared:
        own = [row for row in tables[table] if row["cell"] == run.cell.cell]
        if len({row["step"] for row in own}) < 2:  # no course yet
            continue
        shown = {name: looks for name, looks in columns.items() if any(row[name] is not None for row in own)}
        across = min(3, len(shown))
        lines = math.ceil(len(shown) / across)
        figure = Figure(figsize=(WIDTH, lines * (2.7 if across < 3 else 2.1)), layout="constrained")
        axes = list(figure.subplots(lines, across, squeeze=False).flat)
        for spare in axes[len(shown) :]:
            spare.remove()
        blocks = sorted({row["block"] for row in own})
        colours = _of_blocks(len(blocks))
        for ax, (name, (title, _, logarithmic)) in zip(axes, shown.items(), strict=False):
            _panel(ax, own, name, blocks, colours, logarithmic=logarithmic)
            ax.set_title(title)
            ax.set_xlabel("training tokens")
        norm = BoundaryNorm(np.arange(len(blocks) + 1) - 0.5, len(blocks))
        bar = figure.colorbar(ScalarMappable(norm, colours.resampled(len(blocks))), ax=axes[: len(shown)], pad=0.02, aspect=16 * lines)
        bar.outline.set_visible(False)
        bar.ax.yaxis.set_minor_locator(NullLocator())
        kept = range(0, len(blocks), math.ceil(len(blocks) / 7))
        bar.set_ticks(list(kept), labels=[str(blocks[place]) for place in kept])
        bar.set_label("block")
        name, last = f"{look.labels[run.cell.model]} ({style.place(*run.place)})", max(row["position"] for row in own)
        said = f"What each head of {name} does while it is trained, on {own[0]['sequences']} validation sequences of length {style.binary(last)}: a line a head, in its block’s colour, and their mean (thick). Means over positions"
        said += f", {end} at the last one" if any(name in AT_THE_END for name in shown) else ""
        yield f"{table}-{run.cell.cell}", figure, f"{said}."


def _of_blocks(count: int) -> Colormap:
    """A colour a block."""
    kept = matplotlib.colormaps[BLOCKS](np.linspace(PALEST, 1, max(count, 2)))
    return matplotlib.colors.ListedColormap(kept[-count:])


def _panel(ax: Axes, rows: list[Row], name: str, blocks: list[int], colours: Colormap, *, logarithmic: bool) -> None:
    tokens, heads, values_SN = course(rows, name)
    width = 0.5 if len(heads) > FAINT_FROM else 0.8
    for (block, _), curve_S in zip(heads, values_SN.T, strict=True):
        ax.plot(tokens, curve_S, color=colours(blocks.index(block)), linewidth=width, alpha=0.75)
    finite = np.isfinite(values_SN)
    mean_S = np.where(finite, values_SN, 0).sum(1) / np.maximum(finite.sum(1), 1)
    ax.plot(tokens, np.where(finite.any(1), mean_S, np.nan), color=INK, linewidth=1.8)
    seen = values_SN[finite]
    if logarithmic and seen.size and seen.min() > 0 and seen.max() > 3 * seen.min():
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0) if seen.max() < 100 * seen.min() else (1.0,)))
        ax.yaxis.set_minor_locator(NullLocator())
    else:
        ax.yaxis.set_major_locator(MaxNLocator(5))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    ax.set_xlim(0, tokens[-1])
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: style.tick(value)))


def course(rows: list[Row], name: str) -> tuple[np.ndarray, list[tuple[int, int]], np.ndarray]:
    """(tokens [S], (block, head) of each of N heads, values [S, N]) of a cell's looks; NaN where there is none."""
    tokens = sorted({row["tokens"] for row in rows})
    heads = sorted({(row["block"], row["head"]) for row in rows})
    places = {at: place for place, at in enumerate(tokens)}, {head: place for place, head in enumerate(heads)}
    values_SN = np.full((len(tokens), len(heads)), np.nan)
    for row in rows:
        if row[name] is not None:
            values_SN[places[0][row["tokens"]], places[1][row["block"], row["head"]]] = row[name]
    return np.array(tokens), heads, values_SN


COURSES = (inside, memory)
