"""The report's maps: what heads do, over blocks and heads; and needles found, over depths and lengths."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from stages.report import style
from stages.report.study import Study
from stages.report.style import WIDTH, Style

Row = dict[str, Any]
Made = Iterator[tuple[str, Figure, str]]
Columns = dict[str, tuple[str, str, bool]]  # column -> title, colours, whether they are logarithmic

SHADES = 32  # of a map's colours
TICKS = 7  # at most, of blocks and of heads

MESA: Columns = {
    "gamma": ("forget gate γ", "cividis", False), "beta": ("write gate β", "cividis", False), "lambda_mean": ("Λ, mean", "cividis", False),
    "condition": ("condition of H + Λ", "magma_r", True), "steps": ("CG steps to 10⁻³", "magma_r", False), "cosine": ("cosine to no solve", "cividis", False),
}  # fmt: skip
PALIMPSA: Columns = {
    "log_window": ("memory window, log N", "cividis", False), "ratio": ("importance ratio r", "magma_r", True), "beta": ("precision β, mean", "cividis", False),
}  # fmt: skip
AT_THE_END = ("condition", "ratio")  # of states, not of tokens


def inside(study: Study, tables: dict[str, list[Row]], look: Style) -> Made:
    """What a cell's Mesa heads do, those of a block that forget most first. A figure a cell."""
    yield from _of_heads(
        study,
        tables["internals"],
        look,
        MESA,
        order="gamma",
        file="internals",
        what="What the Mesa heads of {} do",
        end="the condition",
        by="mean γ",
    )


def memory(study: Study, tables: dict[str, list[Row]], look: Style) -> Made:
    """What a cell's Palimpsa heads remember, those with the shortest window first. A figure a cell."""
    yield from _of_heads(
        study,
        tables["memory"],
        look,
        PALIMPSA,
        order="log_window",
        file="memory",
        what="What the heads of {} remember",
        end="the ratio",
        by="window",
    )


def _of_heads(study: Study, rows: list[Row], look: Style, columns: Columns, *, order: str, file: str, what: str, end: str, by: str) -> Made:
    """Maps over blocks and heads, three in a line; columns in which a cell has nothing are left out."""
    for run in study.compared:
        own = [row for row in rows if row["cell"] == run.cell.cell]
        if not own:
            continue
        shown = {name: looks for name, looks in columns.items() if any(row[name] is not None for row in own)}
        blocks, maps = head_maps(own, list(shown), order)
        across = min(3, len(shown))
        lines = math.ceil(len(shown) / across)
        figure = Figure(figsize=(WIDTH * max(across, 2) / 3, lines * (0.75 + min(2.4, 0.16 * max(len(blocks), 6)))), layout="constrained")
        for ax, (name, (title, colours, logarithmic)) in zip(
            figure.subplots(lines, across, squeeze=False).flat, shown.items(), strict=False
        ):
            values = maps[name]
            image = ax.pcolormesh(values, cmap=matplotlib.colormaps[colours].resampled(SHADES), norm="log" if logarithmic else None)
            ax.invert_yaxis()
            ax.set_title(title)
            _named(ax, range(1, values.shape[1] + 1), blocks)
            if ax.get_subplotspec().is_last_row():
                ax.set_xlabel(f"head, by {by}")
            if ax.get_subplotspec().is_first_col():
                ax.set_ylabel("block")
            _bar(figure, ax, image, values if logarithmic else None)
        lasts = max(row["position"] for row in own)
        name = f"{look.labels[run.cell.model]} ({style.place(*run.place)})"
        said = f"{what.format(name)} on {own[0]['sequences']} validation sequences of length {style.binary(lasts)}: means over positions"
        said += f", {end} at the last one" if any(name in AT_THE_END for name in shown) else ""
        yield f"{file}-{run.cell.cell}", figure, f"{said}. Heads are ordered by their {by} in each block."


def head_maps(rows: list[Row], names: list[str], order: str) -> tuple[list[int], dict[str, np.ndarray]]:
    """(blocks, name -> [block, place] of a cell's rows), the heads of each block by their mean of `order`; NaN where a block has fewer heads."""
    blocks = sorted({row["block"] for row in rows})
    lines: dict[str, list[list[float]]] = {name: [] for name in names}
    for block in blocks:
        of_head: dict[int, list[Row]] = {}
        for row in rows:
            if row["block"] == block:
                of_head.setdefault(row["head"], []).append(row)
        heads = sorted(of_head, key=lambda head, of_head=of_head: (over_bins(of_head[head], order), head))
        for name in names:
            lines[name].append([over_bins(of_head[head], name) for head in heads])
    widest = max(map(len, lines[names[0]]))
    return blocks, {name: np.array([line + [math.nan] * (widest - len(line)) for line in found]) for name, found in lines.items()}


def over_bins(rows: list[Row], name: str) -> float:
    """A head's mean over positions; of what states have, the last one's."""
    if name in AT_THE_END:
        value = max(rows, key=lambda row: row["position"])[name]
        return math.nan if value is None else value
    sizes = np.array([row["position"] - row["first"] + 1 for row in rows])
    return float(np.average(np.array([math.nan if row[name] is None else row[name] for row in rows], np.float64), weights=sizes))


def needles(study: Study, tables: dict[str, list[Row]], look: Style) -> Made:
    """Needles found by depth and length: a figure a haystack, scale and budget, a panel a cell, on one scale of colours."""
    rows = tables["needles"]
    haystacks = list(dict.fromkeys(row["haystack"] for row in rows))
    for haystack in haystacks:
        for place in study.places:
            own = [row for row in rows if row["haystack"] == haystack and (row["scale"], row["budget"]) == place]
            cells = [run.cell for run in study.compared if any(row["cell"] == run.cell.cell for row in own)]
            if not cells:
                continue
            lengths = sorted({row["length"] for row in own})
            depths = sorted({row["depth"] for row in own})
            across = min(4, len(cells))
            lines = math.ceil(len(cells) / across)
            figure = Figure(figsize=(WIDTH, 0.55 + 1.75 * lines), layout="constrained")
            axes = list(figure.subplots(lines, across, squeeze=False, sharex=True, sharey=True).flat)
            for spare in axes[len(cells) :]:
                spare.remove()
            for number, (ax, cell) in enumerate(zip(axes, cells, strict=False)):
                found = {(row["depth"], row["length"]): row["score"] for row in own if row["cell"] == cell.cell}
                values = np.array([[found.get((depth, length), math.nan) for length in lengths] for depth in depths])
                image = ax.pcolormesh(values, cmap=matplotlib.colormaps["cividis"].resampled(SHADES), vmin=0, vmax=100)
                ax.set_title(look.labels[cell.model])
                _named(ax, [style.binary(length) if length else "–" for length in lengths], [f"{depth:g}" for depth in depths])
                if number + across >= len(cells):
                    ax.set_xlabel("length, tokens")
                    ax.tick_params(labelbottom=True)
                if ax.get_subplotspec().is_first_col():
                    ax.set_ylabel("depth, %")
            axes[0].invert_yaxis()
            bar = figure.colorbar(image, ax=axes[: len(cells)], pad=0.02, aspect=22)
            bar.outline.set_visible(False)
            bar.set_label("found, %")
            where = f" at {style.place(*place)}" if len(study.places) > 1 else ""
            items = min(row["items"] for row in own)
            slug = "-".join(part for part in ("needles", haystack, *(place if len(study.places) > 1 else ())) if part)
            caption = f"Needles found{where} by where they lie in the haystack{f' ({haystack})' if haystack else ''}, 0 % being its start, and by its length; each square is {items} prompts or more."
            yield slug, figure, caption


def _named(ax: Axes, columns: Any, lines: Any) -> None:
    """Ticks in the middle of the squares, at most TICKS of them."""
    ax.grid(False)
    for axis, names in ((ax.xaxis, list(columns)), (ax.yaxis, list(lines))):
        kept = range(0, len(names), math.ceil(len(names) / TICKS))
        axis.set_ticks([place + 0.5 for place in kept], [str(names[place]) for place in kept])


def _bar(figure: Figure, ax: Axes, image: Any, logarithmic: np.ndarray | None) -> None:
    """A map's scale of colours. logarithmic: the values, where their colours are."""
    bar = figure.colorbar(image, ax=ax, pad=0.03, aspect=14)
    bar.outline.set_visible(False)
    bar.ax.yaxis.set_minor_locator(NullLocator())
    if logarithmic is not None:
        bar.set_ticks(np.geomspace(np.nanmin(logarithmic), np.nanmax(logarithmic), 4))
    else:
        bar.ax.yaxis.set_major_locator(MaxNLocator(5))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))


MAPS: tuple[Callable[..., Made], ...] = (inside, memory, needles)
