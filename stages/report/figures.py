"""The analysis' figures, drawn from its tables: PNG for a paper or a slide, SVG for the report's page."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from stages.evaluation.parameters import TRAINED
from stages.report import scaling, style
from stages.report.courses import COURSES
from stages.report.maps import MAPS
from stages.report.study import Study
from stages.report.style import FAINT, GRID, INK, RAMP, WIDTH, Style

Row = dict[str, Any]

COLUMNS = 3
DPI = 200

LOOK = {
    "font.family": "DejaVu Sans", "font.size": 7.5, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": FAINT, "axes.linewidth": 0.6,
    "axes.titlesize": 8, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlepad": 5, "axes.labelsize": 7.5,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.5, "axes.axisbelow": True,
    "xtick.color": FAINT, "ytick.color": FAINT, "xtick.labelcolor": INK, "ytick.labelcolor": INK, "xtick.labelsize": 7, "ytick.labelsize": 7,
    "xtick.major.width": 0.6, "ytick.major.width": 0.6, "xtick.major.size": 2.5, "ytick.major.size": 2.5,
    "lines.linewidth": 1.3, "lines.solid_capstyle": "round", "legend.frameon": False, "legend.fontsize": 7.5, "figure.facecolor": "white",
    "svg.fonttype": "none", "svg.hashsalt": "strata",
}  # fmt: skip


@dataclass(frozen=True)
class Drawing:
    """A figure in both forms. caption: one sentence of what it shows and how to read it."""

    png: bytes
    svg: str
    caption: str


def draw(study: Study, made: dict[str, pa.Table], look: Style) -> dict[str, Drawing]:
    """Name -> drawing of every figure that has something to show. The same tables give the same bytes."""
    tables = {name: table.to_pylist() for name, table in made.items()}
    makers: tuple[Callable[..., Iterator[tuple[str, Figure, str]]], ...] = (
        loss,
        loss_difference,
        positions,
        extrapolation,
        cg_inference,
        cg_training,
        training_inside,
        *COURSES,
        *MAPS,
        scale,
    )
    found = {}
    with matplotlib.rc_context(LOOK):
        for make in makers:
            for name, figure, caption in make(study, tables, look):
                svg = _svg(figure)
                figure.set_layout_engine("none")  # as it was laid out for the page: laying out costs as much as drawing
                found[name] = Drawing(_png(figure), _fixed(svg) if make in (*COURSES, *MAPS) else svg, caption)
    return found


def _png(figure: Figure) -> bytes:
    FigureCanvasAgg(figure)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    return file.getvalue()


def _svg(figure: Figure) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return file.getvalue()


def _fixed(svg: str) -> str:
    """Colours of a map as they are, which the page would otherwise adapt to light and dark."""
    themed = {INK, FAINT, GRID, "#ffffff"}

    def rgb(found: re.Match[str]) -> str:
        colour = found.group()
        return colour if colour in themed else f"rgb({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))})"

    return re.sub(r"#[0-9a-f]{6}\b(?!\.)", rgb, svg)


# --- the parts of a figure --------------------------------------------------------------------------------------------


def _panels(
    titles: list[str], *, height: float = 2.3, single: float = 3.1, keys: Iterable[str] = (), columns: int | None = None
) -> tuple[Figure, list[Axes]]:
    """A figure of one panel a title, at most three in a row, with room for a legend of `keys` above several panels."""
    keys = list(keys)
    columns = columns or (min(COLUMNS, len(titles)) if len(titles) != 4 else 2)
    lines = math.ceil(len(titles) / columns)
    each = single if len(titles) == 1 else 2.7 if columns == 2 else height
    legend = 0.0 if len(titles) == 1 else 0.12 + 0.17 * math.ceil(len(keys) / _across(keys))
    figure = Figure(figsize=(WIDTH, each * lines + legend), layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - legend / figure.get_figheight()), w_pad=0.06, h_pad=0.05)
    grid = figure.subplots(lines, columns, squeeze=False)
    axes = list(grid.flat)
    for spare in axes[len(titles) :]:
        spare.remove()
    for ax, title in zip(axes, titles, strict=False):
        ax.set_title(title)
    return figure, axes[: len(titles)]


def _across(keys: Iterable[str]) -> int:
    """How many entries of a legend fit beside each other, whatever their order; six at most."""
    each = max((4.4 * len(key) for key in keys), default=0) + 34  # points: a name of the legend's size, its line and the gap
    return max(1, min(6, int(WIDTH * 72 / each)))


def _legend(figure: Figure, axes: list[Axes]) -> None:
    """One legend for all panels, in a line above them."""
    handles: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="upper left",
        bbox_to_anchor=(0.005, 1.0),
        ncols=_across(handles),
        handlelength=2.2,
        columnspacing=1.3,
        borderpad=0.2,
    )


def _name_ends(ax: Axes, ends: list[tuple[float, str, str]]) -> None:
    """Write each line's name at its right end, moved apart where they would overlap. ends: (last y, name, colour)."""
    low, high = ax.get_ylim()
    points = ax.get_figure().get_figheight() * 72 * 0.8  # about what the axes are high
    transform = ax.yaxis.get_transform().transform
    bottom, top = transform([low])[0], transform([high])[0]
    places = [
        ((transform([min(max(y, min(low, high)), max(low, high))])[0] - bottom) / (top - bottom) * points, name, colour)
        for y, name, colour in ends
    ]
    places.sort(key=lambda place: place[0])
    gap, heights = min(9.0, points / max(1, len(places) - 1)), [place[0] for place in places]
    for _ in range(100):
        for i in range(1, len(heights)):
            if (short := gap - (heights[i] - heights[i - 1])) > 1e-9:
                heights[i - 1] -= short / 2
                heights[i] += short / 2
        heights[0] = max(heights[0], 0.0)
        for i in range(1, len(heights)):
            heights[i] = max(heights[i], heights[i - 1] + gap * 0.999)
    for i, place in enumerate(reversed(range(len(heights)))):
        heights[place] = min(heights[place], points - gap * i)
    for height, (_, name, colour) in zip(heights, places, strict=True):
        ax.annotate(
            name,
            (1, height / points),
            xycoords="axes fraction",
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            annotation_clip=False,
        )


def _name_spots(ax: Axes, spots: list[tuple[float, float, str, str]]) -> None:
    """Write a point's name where it covers neither a point nor another name, with a line to it where that is not beside it. spots: (x, y, name, colour).

    A name for which the panel has no room is left out: the panel beside names the colour.
    """
    figure, box = ax.get_figure(), ax.get_position()
    size = np.array([figure.get_figwidth() * box.width, figure.get_figheight() * box.height]) * 72 * 0.92  # points, about
    (left, right), (low, high) = ax.get_xlim(), ax.get_ylim()
    rescaled = ax.yaxis.get_transform().transform
    bottom, top = rescaled([low, high])
    at = [size * ((x - left) / (right - left), (rescaled([y])[0] - bottom) / (top - bottom)) for x, y, _, _ in spots]
    taken = [(x - 3, y - 3, x + 3, y + 3) for x, y in at]
    for (x, y), (data_x, data_y, name, colour) in zip(at, spots, strict=True):
        wide, tall = 4.3 * len(name), 8.0
        near = [(5, 3), (5, -tall - 2), (-wide - 5, 3), (-wide - 5, -tall - 2), (-wide / 2, 6), (-wide / 2, -tall - 6)]
        far = [(dx, dy) for away in (14, 26, 38, 50) for dy in (away, -away - tall) for dx in (10, -wide - 10)]
        for number, (dx, dy) in enumerate(near + far):
            spot = (x + dx, y + dy, x + dx + wide, y + dy + tall)
            inside = spot[0] >= 1 and spot[1] >= 1 and spot[2] <= size[0] and spot[3] <= size[1]
            if inside and not any(spot[0] < t[2] and t[0] < spot[2] and spot[1] < t[3] and t[1] < spot[3] for t in taken):
                taken.append(spot)
                line = {"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3} if number >= len(near) else None
                ax.annotate(
                    name, (data_x, data_y), (dx, dy), textcoords="offset points", size=7, color=colour, ha="left", va="bottom", arrowprops=line
                )  # fmt: skip
                break


def _finish(figure: Figure, axes: list[Axes], ends: list[tuple[float, str, str]]) -> None:
    """Names at the lines' ends where there is one panel, else a legend."""
    if len(axes) == 1 and ends:
        _name_ends(axes[0], ends)
    elif len(axes) > 1:
        _legend(figure, axes)


def _log2(ax: Axes, low: float, high: float) -> None:
    """A logarithmic axis of positions with ticks at powers of two, at most six."""
    ax.set_xscale("log", base=2)
    powers = np.arange(math.ceil(math.log2(max(low, 1))), math.floor(math.log2(max(high, 2))) + 1)
    stride = math.ceil(len(powers) / 6)
    ax.xaxis.set_major_locator(FixedLocator([2.0**power for power in powers[::-1][::stride][::-1]]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: style.binary(value)))
    ax.set_xlim(low, high)


def _zero(ax: Axes, colour: str = INK, name: str | None = None) -> None:
    ax.axhline(0, color=colour, linewidth=1.0 if name else 0.7, zorder=1.5, label=name)


def _of(rows: list[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def _column(rows: list[Row], name: str) -> np.ndarray:
    return np.array([math.nan if row[name] is None else row[name] for row in rows], np.float64)


def _lines(study: Study, place: tuple[str, str]) -> list[Any]:
    """The cells of a scale and budget, the baseline first so that others are drawn over it."""
    cells = [run.cell for run in study.compared if run.place == place]
    return sorted(cells, key=lambda cell: cell.model != study.parameters.baseline)


def _names(study: Study, look: Style) -> list[str]:
    """The names of the models that are compared."""
    return list(dict.fromkeys(look.labels[run.cell.model] for run in study.compared))


def _places(study: Study, rows: list[Row]) -> tuple[list[tuple[str, str]], int | None]:
    """The (scale, budget)s that have rows, a panel each, and the panels a row: a column a scale and a row a budget, where all are there."""
    found = [place for place in study.places if any((row["scale"], row["budget"]) == place for row in rows)]
    scales, budgets = (list(dict.fromkeys(place[i] for place in found)) for i in (0, 1))
    if 1 < len(scales) <= COLUMNS and len(budgets) > 1 and len(found) == len(scales) * len(budgets):
        return [(scale, budget) for budget in budgets for scale in scales], len(scales)
    return found, None


def _slug(place: tuple[str, str], study: Study) -> str:
    return f"-{place[0]}-{place[1]}" if len(study.places) > 1 else ""


# --- the figures ------------------------------------------------------------------------------------------------------


def loss(study: Study, tables: dict[str, list[Row]], look: Style) -> Iterator[tuple[str, Figure, str]]:
    """Training loss over tokens, a panel per scale and budget; the first steep part is left out."""
    rows = tables["curves"]
    places, columns = _places(study, rows)
    if not places:
        return
    figure, axes = _panels([style.place(*place) if len(places) > 1 else "" for place in places], keys=_names(study, look), columns=columns)
    entropy = study.parameters.unigram_entropy
    ends: list[tuple[float, str, str]] = []
    for ax, place in zip(axes, places, strict=True):
        shown, ends = [], []
        here = _of(rows, scale=place[0], budget=place[1])
        grid = any(cell.group == "grid" for cell in _lines(study, place))  # references may leave the frame
        for cell in _lines(study, place):
            curve = _of(here, cell=cell.cell)
            x, y = _column(curve, "tokens"), _column(curve, "loss")
            ax.plot(x, y, color=look.colours[cell.model], linestyle=look.dashes[cell.model], label=look.labels[cell.model])
            if cell.group == "grid" or not grid:
                shown.append(y[x >= 0.12 * x[-1]])
            if np.isfinite(y[-1]):
                ends.append((y[-1], look.labels[cell.model], look.colours[cell.model]))
        values = np.concatenate(shown)
        values = values[np.isfinite(values)]
        if len(values):
            low, high = values.min(), values.max()
            if entropy is not None:
                low, high = min(low, entropy), max(high, entropy)
                ax.axhline(entropy, color=FAINT, linewidth=0.9, linestyle=(0, (2, 2)))
                ax.annotate(
                    "unigram entropy",
                    (1, entropy),
                    xycoords=("axes fraction", "data"),
                    xytext=(-2, 2.5),
                    textcoords="offset points",
                    ha="right",
                    color=FAINT,
                    size=7,
                )
            margin = 0.06 * max(high - low, 0.02)
            ax.set_ylim(low - margin, high + 2 * margin)
        ax.set_xlim(left=0, right=max(row["tokens"] for row in here))
        ax.xaxis.set_major_locator(MaxNLocator(5))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: style.tick(value)))
        ax.set_xlabel("training tokens")
        if ax.get_subplotspec().is_first_col():
            ax.set_ylabel("loss (nats per token)")
    _finish(figure, axes, ends)
    smoothing = f"mean over {study.parameters.smoothing:.0%} of the run" if study.parameters.smoothing >= 0.01 else "smoothed"
    yield "loss", figure, f"Training loss ({smoothing}). The first steps, where it is still steep, leave the frame."


def loss_difference(study: Study, tables: dict[str, list[Row]], look: Style) -> Iterator[tuple[str, Figure, str]]:
    """Training loss less the baseline's on the same tokens, a panel per scale and budget."""
    rows = [row for row in tables["curves"] if row["difference"] is not None]
    places, columns = _places(study, rows)
    if not places:
        return
    figure, axes = _panels(
        [style.place(*place) if len(places) > 1 else "" for place in places], keys=_names(study, look), single=2.7, columns=columns
    )
    name = look.labels[study.parameters.baseline]
    ends: list[tuple[float, str, str]] = []
    for ax, place in zip(axes, places, strict=True):
        ends = [(0.0, name, look.colours[study.parameters.baseline])]
        _zero(ax, look.colours[study.parameters.baseline], name)
        shown = [np.zeros(1)]
        here = _of(rows, scale=place[0], budget=place[1])
        for cell in _lines(study, place):
            if not (curve := _of(here, cell=cell.cell)):
                continue
            x, y = _column(curve, "tokens"), _column(curve, "difference")
            ax.plot(x, y, color=look.colours[cell.model], linestyle=look.dashes[cell.model], label=look.labels[cell.model], linewidth=1.1)
            if cell.group == "grid":
                shown.append(y[x >= 0.1 * x[-1]])
            ends.append((y[-1], look.labels[cell.model], look.colours[cell.model]))
            ax.set_xlim(0, x[-1])
        values = np.concatenate(shown)
        margin = 0.08 * max(np.ptp(values), 0.005)
        ax.set_ylim(values.min() - margin, values.max() + margin)
        ax.xaxis.set_major_locator(MaxNLocator(5))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: style.tick(value)))
        ax.set_xlabel("training tokens")
        if ax.get_subplotspec().is_first_col():
            ax.set_ylabel(f"loss − {name} (nats)")
    _finish(figure, axes, ends)
    yield "loss_difference", figure, f"Training loss minus the {name}’s on the same tokens. Below zero is better."


def positions(study: Study, tables: dict[str, list[Row]], look: Style) -> Iterator[tuple[str, Figure, str]]:
    """NLL by position less the baseline's at the training length: the headline set with a panel per scale and budget, where there are several (MesaNet,
    Figures 10 and 11), then a figure for each of these, a panel per set."""
    rows = _of(tables["positions"], length=study.length)
    if not rows:
        return
    name = look.labels[study.parameters.baseline]
    said = f"minus the {name}’s at length {style.binary(study.length)}. Below zero is better than the {name}; bands are 95 % bootstrap intervals over sequences."
    said += " References may leave the frame." if any(run.cell.group != "grid" for run in study.compared) else ""
    text = study.headline[0] if study.headline else None
    places, columns = _places(study, _of(rows, set=text))
    if len(places) > 1:
        figure, axes = _panels([style.place(*place) for place in places], keys=_names(study, look), columns=columns)
        for ax, place in zip(axes, places, strict=True):
            _by_position(ax, _of(rows, set=text, scale=place[0], budget=place[1]), _lines(study, place), name, study, look)
        _finish(figure, axes, [])
        yield "positions", figure, f"NLL by position on {text} {said}"
    for place in study.places:
        those = _of(rows, scale=place[0], budget=place[1])
        sets = list(dict.fromkeys(row["set"] for row in those))
        if not sets:
            continue
        cells = _lines(study, place)
        figure, axes = _panels(sets, keys=[look.labels[cell.model] for cell in cells])
        ends: list[tuple[float, str, str]] = []
        for ax, text in zip(axes, sets, strict=True):
            ends = _by_position(ax, _of(those, set=text), cells, name, study, look)
        _finish(figure, axes, ends)
        where = f" at {style.place(*place)}" if len(study.places) > 1 else ""
        yield f"positions{_slug(place, study)}", figure, f"NLL by position{where} {said}"


def _by_position(ax: Axes, rows: list[Row], cells: list[Any], name: str, study: Study, look: Style) -> list[tuple[float, str, str]]:
    """A panel of differences by position, of one set, scale and budget. Returns the lines' ends."""
    ends = [(0.0, name, look.colours[study.parameters.baseline])]
    _zero(ax, look.colours[study.parameters.baseline], name)
    for cell in cells:
        if not (curve := _of(rows, cell=cell.cell)):
            continue
        x, colour = _column(curve, "position"), look.colours[cell.model]
        ax.fill_between(x, _column(curve, "low"), _column(curve, "high"), color=colour, alpha=0.12, linewidth=0)
        y = _column(curve, "difference")
        ax.plot(x, y, color=colour, linestyle=look.dashes[cell.model], label=look.labels[cell.model])
        ends.append((y[-1], look.labels[cell.model], colour))
    grid = {cell.cell for cell in cells if cell.group == "grid"}
    framed = [
        row for row in rows if row["cell"] in grid
    ] or rows  # references may leave the frame: a short window lies far above all others
    middle = _column([row for row in framed if row["position"] >= 4] or framed, "difference")
    reach = 1.35 * max(0.01, float(np.nanquantile(np.abs(middle), 0.97)))
    ax.set_ylim(-reach, reach)
    _log2(ax, 1, max(row["last"] for row in rows))
    ax.yaxis.set_major_locator(MaxNLocator(5))
    ax.set_xlabel("position in the sequence")
    if ax.get_subplotspec().is_first_col():
        ax.set_ylabel(f"NLL − {name} (nats)")
    return ends


def extrapolation(study: Study, tables: dict[str, list[Row]], look: Style) -> Iterator[tuple[str, Figure, str]]:
    """Mean-so-far NLL on the longest evaluation of each set that goes beyond the training length."""
    rows = _of(tables["mean_so_far"], setting=TRAINED)
    for place in study.places:
        cells = _lines(study, place)
        those = [row for row in rows if (row["scale"], row["budget"]) == place and any(cell.cell == row["cell"] for cell in cells)]
        longest: dict[str, int] = {}
        reached: dict[str, int] = {}
        for row in those:
            longest[row["set"]] = max(row["length"], longest.get(row["set"], 0))
        for row in those:
            if row["length"] == longest[row["set"]]:
                reached[row["set"]] = max(row["position"], reached.get(row["set"], 0))
        sets = [text for text in longest if reached[text] > study.length]
        if not sets:
            continue
        figure, axes = _panels(sets, keys=[look.labels[cell.model] for cell in cells])
        ends: list[tuple[float, str, str]] = []
        for ax, text in zip(axes, sets, strict=True):
            ends, lows, highs = [], [], []
            first = max(1, study.length / 4)
            for cell in cells:
                curve = [row for row in _of(those, set=text, cell=cell.cell, length=longest[text]) if row["position"] >= first]
                if not curve:
                    continue
                y = np.exp(np.minimum(_column(curve, "nll"), 700))
                ax.plot(
                    _column(curve, "position"),
                    y,
                    color=look.colours[cell.model],
                    linestyle=look.dashes[cell.model],
                    label=look.labels[cell.model],
                )
                ends.append((y[-1], look.labels[cell.model], look.colours[cell.model]))
                if cell.group == "grid" or not lows:
                    lows.append(np.nanmin(y))
                    highs.append(np.nanmax(y))
            ax.axvline(study.length, color=FAINT, linewidth=0.8, linestyle=(0, (2, 2)))
            ax.annotate(
                "trained",
                (study.length, 0),  # below: curves fall towards here from the upper left
                xycoords=("data", "axes fraction"),
                xytext=(-2, 2),
                textcoords="offset points",
                ha="right",
                va="bottom",
                color=FAINT,
                size=7,
            )
            low, high = min(lows), min(max(highs), 2.2 * min(lows))
            ax.set_ylim(low * 0.98, high * 1.03)
            _log2(ax, first, reached[text])
            ax.yaxis.set_major_locator(MaxNLocator(5))
            ax.set_xlabel("tokens so far")
            if ax.get_subplotspec().is_first_col():
                ax.set_ylabel("perplexity so far")
        _finish(figure, axes, ends)
        yield (
            f"extrapolation{_slug(place, study)}",
            figure,
            "Perplexity of the first k tokens of long documents. Past the dotted line lie lengths never seen in training; a curve that leaves the frame has failed there.",
        )


RECORDED = {  # what layers record of each training step -> title of its panel, whether its axis is logarithmic
    "log_window": ("memory window, log N", False), "importance_ratio": ("importance ratio r", True), "cg_steps": ("CG steps taken", False),
    "cg_residual": ("CG’s true residual", True), "gamma": ("forget gate γ", False), "beta": ("write gate β", False), "lambda": ("Λ", False),
}  # fmt: skip


def training_inside(study: Study, tables: dict[str, list[Row]], look: Style) -> Iterator[tuple[str, Figure, str]]:
    """What layers record of each training step, over tokens: a figure per scale and budget, a panel a quantity."""
    rows = tables["training_inside"]
    for place in study.places:
        cells = _lines(study, place)
        those = [row for row in rows if (row["scale"], row["budget"]) == place and any(cell.cell == row["cell"] for cell in cells)]
        names = [name for name in RECORDED if any(row["name"] == name for row in those)]
        if not names:
            continue
        shown = [cell for cell in cells if any(row["cell"] == cell.cell for row in those)]
        figure, axes = _panels([RECORDED[name][0] for name in names], keys=[look.labels[cell.model] for cell in shown])
        ends: list[tuple[float, str, str]] = []
        for ax, name in zip(axes, names, strict=True):
            ends = []
            for cell in shown:
                if not (curve := [row for row in _of(those, name=name, cell=cell.cell) if math.isfinite(row["value"])]):
                    continue
                y = _column(curve, "value")
                ax.plot(
                    _column(curve, "tokens"),
                    y,
                    color=look.colours[cell.model],
                    linestyle=look.dashes[cell.model],
                    label=look.labels[cell.model],
                )
                ends.append((y[-1], look.labels[cell.model], look.colours[cell.model]))
            values = [row["value"] for row in _of(those, name=name)]
            if RECORDED[name][1] and min(values) > 0 and max(values) > 3 * min(values):
                ax.set_yscale("log")
                ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
                ax.yaxis.set_minor_locator(NullLocator())
            elif max(values) - min(values) < 1e-2 * abs(max(values)):  # constant: rounding is nothing to look at
                ax.set_ylim(*sorted((0.9 * max(values), 1.1 * max(values))))
                ax.yaxis.set_major_locator(FixedLocator([max(values)]))
            ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            ax.set_xlim(0, max(row["tokens"] for row in those))
            ax.xaxis.set_major_locator(MaxNLocator(5))
            ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: style.tick(value)))
            ax.set_xlabel("training tokens")
        _finish(figure, axes, ends)
        yield (
            f"training_inside{_slug(place, study)}",
            figure,
            "What layers do inside while they are trained: means over tokens, heads and blocks, smoothed like the loss.",
        )


def scale(study: Study, tables: dict[str, list[Row]], look: Style) -> Iterator[tuple[str, Figure, str]]:
    """Loss against parameters, a panel a budget, and against tokens, a panel a scale; only what has two sizes at least. Fits are drawn where there are any."""
    measured = [(run.cell, nll) for run, nll in scaling.points(study)]
    panels = []
    for over, held in (("parameters", "budget"), ("tokens", "scale")):
        for value in dict.fromkeys(getattr(cell, held) for cell, _ in measured):
            those = [(cell, nll) for cell, nll in measured if getattr(cell, held) == value]
            if any(len({getattr(c, over) for c, _ in those if c.model == cell.model}) > 1 for cell, _ in those):
                panels.append((over, held, value, those))
    if not panels:
        return
    text, length = study.headline
    figure, axes = _panels([f"{value} tokens" if held == "budget" else value for _, held, value, _ in panels], keys=_names(study, look))
    ends: list[tuple[float, str, str]] = []
    for ax, (over, held, value, those) in zip(axes, panels, strict=True):
        ends = []
        for model in dict.fromkeys(cell.model for cell, _ in those):
            own = sorted((getattr(cell, over), nll) for cell, nll in those if cell.model == model)
            x, y = (np.array(part, np.float64) for part in zip(*own, strict=True))
            colour, fit = look.colours[model], _of(tables["fits"], model=model, over=over, fitted=True, **{held: value})
            ax.plot(x, y, "o", color=colour, markersize=3.5)
            line = (x, fit[0]["coefficient"] * x ** -fit[0][f"exponent_{over}"]) if fit else (x, y)
            ax.plot(*line, color=colour, linestyle=look.dashes[model], linewidth=1.1 if fit else 0.5, label=look.labels[model])
            ends.append((y[-1], look.labels[model], colour))
        ax.set_xscale("log")
        ax.set_yscale("log")
        sizes = sorted({getattr(cell, over) for cell, _ in those})
        apart = [size for i, size in enumerate(sizes) if i == 0 or size > 1.25 * sizes[i - 1]]  # models of one scale differ a little
        ax.xaxis.set_major_locator(FixedLocator(apart))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: style.count(value)))
        ax.yaxis.set_major_locator(MaxNLocator(5))
        ax.yaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
        ax.margins(x=0.08)
        ax.set_xlabel("parameters" if over == "parameters" else "training tokens")
        if ax.get_subplotspec().is_first_col():
            ax.set_ylabel("loss (nats per token)")
    _finish(figure, axes, ends)
    caption = f"Loss on {text} at length {style.binary(length)} against parameters at one budget, and against tokens at one scale, both axes logarithmic. Full lines are fits, thin ones only join points that are too few for one."
    yield "scaling", figure, caption


def _ramp(number: int) -> list[tuple[float, float, float, float]]:
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    ramp = LinearSegmentedColormap.from_list("ramp", RAMP)
    return [to_hex(ramp(0.5 if number == 1 else i / (number - 1))) for i in range(number)]


def cg_inference(study: Study, tables: dict[str, list[Row]], look: Style) -> Iterator[tuple[str, Figure, str]]:
    """A Mesa cell solved with other settings than it was trained with: a figure a cell, on the longest evaluation of its headline set."""
    for run in study.compared:
        yield from _cg_figure(
            study,
            _of(tables["cg_sweep"], kind="inference", cell=run.cell.cell),
            _of(tables["cg_positions"], kind="inference", cell=run.cell.cell),
            look,
            name=f"cg_inference-{run.cell.cell}",
            key="setting",
            caption=f"{look.labels[run.cell.model]} ({style.place(*run.place)}) solved at inference with other settings than in training",
            labels=lambda row: row["setting"],
        )


def cg_training(study: Study, tables: dict[str, list[Row]], look: Style) -> Iterator[tuple[str, Figure, str]]:
    """Cells trained with other caps of CG steps, less the grid's cell: a figure per reference."""
    for run in study.compared:
        steps = f" ({run.cell.steps} steps)" if run.cell.steps is not None else ""
        yield from _cg_figure(
            study,
            _of(tables["cg_sweep"], kind="training", reference=run.cell.cell),
            _of(tables["cg_positions"], kind="training", reference=run.cell.cell),
            look,
            name=f"cg_training-{run.cell.cell}",
            key="cell",
            caption=f"Cells trained with other caps of CG steps, against {look.labels[run.cell.model]}{steps}, {style.place(*run.place)}",
            labels=lambda row: f"{row['steps']} steps" if row["steps"] is not None else row["model"],
        )


def _cg_figure(
    study: Study, rows: list[Row], curves: list[Row], look: Style, *, name: str, key: str, caption: str, labels: Callable[[Row], str]
) -> Iterator[tuple[str, Figure, str]]:
    """Left: total difference against the steps taken. Right: the difference by position."""
    if not rows:
        return
    sets = list(dict.fromkeys(row["set"] for row in rows))
    text = study.parameters.headline if study.parameters.headline in sets else sets[0]
    length = max(row["length"] for row in rows if row["set"] == text)
    rows, curves = _of(rows, set=text, length=length), _of(curves, set=text, length=length)
    against = "steps_taken" if key == "setting" else "steps"
    rows.sort(key=lambda row: (row[against] is None, row[against] or 0, row["setting"]))
    colours = dict(zip((row[key] for row in rows), _ramp(len(rows)), strict=True))

    figure = Figure(figsize=(WIDTH, 2.75), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    spots: list[tuple[float, float, str, str]] = []
    for row in rows:
        x, y = row[against], row["difference"]
        if x is None or not math.isfinite(x):
            continue
        error = [[max(0.0, y - row["low"])], [max(0.0, row["high"] - y)]] if row["low"] is not None else None
        left.errorbar([x], [y], error, fmt="o", color=colours[row[key]], markersize=4.5, elinewidth=0.9, capsize=0)
        spots.append((x, y, labels(row), colours[row[key]]))
    _zero(left)
    left.set_xlabel("CG steps taken, mean" if key == "setting" else "CG steps in training")
    left.set_ylabel("NLL minus trained (nats)" if key == "setting" else "NLL minus reference (nats)")
    left.margins(x=0.22, y=0.16)
    left.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if key == "setting":  # from nothing to everything: three orders of magnitude
        for ax in (left, right):
            ax.set_yscale("symlog", linthresh=1e-3, linscale=0.6)
            ax.yaxis.set_major_locator(FixedLocator([sign * 10.0**power for power in range(-3, 2) for sign in (-1, 1)] + [0.0]))
            ax.yaxis.set_minor_locator(NullLocator())
            ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "−")))
        low, high = min([0.0, *(row["difference"] for row in rows)]), max([0.0, *(row["difference"] for row in rows)])
        left.set_ylim(min(2 * low, -1e-3), max(2.5 * high, 1e-3))
    left.set_title("over all tokens")
    _name_spots(left, spots)
    ends: list[tuple[float, str, str]] = []
    for row in rows:
        curve = [point for point in _of(curves, **{key: row[key]}) if point["last"] >= 4]
        if not curve:
            continue
        y = _column(curve, "mean_so_far" if key == "setting" else "difference")
        right.plot(_column(curve, "last" if key == "setting" else "position"), y, color=colours[row[key]])
        ends.append((y[-1], labels(row), colours[row[key]]))
    _zero(right)
    _log2(right, 4, max([8, *(row["last"] for row in curves)]))
    right.set_title("mean so far" if key == "setting" else "by position")
    right.set_xlabel("tokens so far" if key == "setting" else "position in the sequence")
    _name_ends(right, ends)
    yield name, figure, f"{caption}: NLL difference on {text} at length {style.binary(length)}. Zero is no loss."
