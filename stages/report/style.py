"""How a study looks: a model's name and colour, the same in every figure of every study; numbers as people write them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from stages.report.study import Study

WIDTH = 7.2  # inches of a figure; the page shows it at its full text width
INK, FAINT, GRID = "#24292f", "#6e7781", "#dde1e6"
RAMP = ("#f0b429", "#e07b39", "#b83b5e", "#6a2c70", "#2b2d6b")  # an ordered quantity: light to dark, also in grey

# Tol's vibrant and muted schemes (colour-blind safe); what lies close in colour differs in its dashes.
MODELS: dict[str, tuple[str, str, str]] = {  # name -> label, colour, dashes
    "transformer": ("Transformer", "#4a5058", "-"),
    "mesa": ("Mesa", "#cc3311", "-"),
    "rls_mesa": ("RLS Mesa", "#cc6677", "--"),
    "hawk_mesa": ("Hawk-Mesa", "#aa4499", "-."),
    "gated_deltanet": ("Gated DeltaNet", "#0077bb", "-"),
    "deltanet": ("DeltaNet", "#33aadd", "--"),
    "gla": ("GLA", "#009988", "-"),
    "mamba2": ("Mamba2", "#ee7733", "--"),
    "xlstm": ("xLSTM", "#999933", ":"),
    "mlstm": ("mLSTM", "#999933", "-."),
    "hawk": ("Hawk", "#882255", "--"),
    "palimpsa_d": ("Palimpsa-D", "#332288", "-"),
    "palimpsa_m": ("Palimpsa-M", "#117733", "--"),
    "palimpsa_d-plain": ("Palimpsa-D w/o Meta", "#88ccee", "-"),
    "palimpsa_m-plain": ("Palimpsa-M w/o Meta", "#44aa99", "--"),
}
SPARE = ("#332288", "#117733", "#ddaa33", "#bb5566", "#66ccee", "#775500", "#ee99aa", "#228833")
# Sliding windows are references, in quiet colours that few could tell apart without the dashes: the wider in a study, the fuller its line.
WINDOWS = (
    ("#9aa3ad", (0, (1, 3))),
    ("#7f8994", (0, (1, 1.5))),
    ("#b3a58a", (0, (3, 2, 1, 2))),
    ("#94876d", (0, (5, 2))),
    ("#c2b5c7", (0, (8, 1.5))),
)
DASHES = (":", "-.", (0, (5, 1, 1, 1, 1, 1)))


@dataclass(frozen=True)
class Style:
    """Of one study. labels, colours and dashes by model, a model being the name that params.yaml gives it."""

    labels: dict[str, str]
    colours: dict[str, str]
    dashes: dict[str, object]

    @classmethod
    def of(cls, study: Study) -> Style:
        return cls.for_models(run.cell.model for run in study.runs)

    @classmethod
    def for_models(cls, names: Iterable[str]) -> Style:
        """Known models have their own; others take spare colours in their order."""
        names = list(dict.fromkeys(names))
        labels, colours, dashes = {}, {}, {}
        taken = {MODELS[name][1] for name in names if name in MODELS}
        spare = [colour for colour in SPARE if colour not in taken]
        strangers = windows = 0
        for name in names:
            if name in MODELS:
                labels[name], colours[name], dashes[name] = MODELS[name]
            elif window := re.fullmatch(r"swa[_-]?(\d*)", name):
                labels[name] = f"SWA-{window[1]}" if window[1] else "SWA"
                colours[name], dashes[name] = WINDOWS[windows % len(WINDOWS)]
                windows += 1
            else:
                labels[name], colours[name] = name, spare[strangers % len(spare)]
                dashes[name] = "-" if strangers < len(spare) else DASHES[strangers // len(spare) % len(DASHES)]
                strangers += 1
        return cls(labels, colours, dashes)


def count(value: float | None) -> str:
    """A count with a metric prefix and three digits: 146M, 15.0B."""
    if value is None or not math.isfinite(value):
        return "–"
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:
            scaled = value / size
            return f"{scaled:.{0 if abs(scaled) >= 99.95 else 1 if abs(scaled) >= 9.995 else 2}f}{letter}"
    return f"{value:.3g}"


def power(value: float) -> str:
    """A huge count as HTML, its spaces not to be broken at: 1.90 × 10^13."""
    digits, exponent = f"{value:.2e}".split("e")
    return f"{digits}\u00a0×\u00a010<sup>{int(exponent)}</sup>"


def tick(value: float) -> str:
    """A count on an axis: 2k, 0.5M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def binary(value: float) -> str:
    """A length: 512, 2k, 32k for powers of two."""
    return f"{value / 1024:g}k" if value >= 1024 and value % 1024 == 0 else f"{value:g}"


def perplexity(value: float | None) -> str:
    """Two decimals, as the field prints them; fewer where they would be noise."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞"
    return f"{value:.2f}" if value < 1000 else f"{value:,.0f}" if value < 1e5 else f"{value:.1e}".replace("e+0", "e").replace("e+", "e")


def signed(value: float | None, digits: int = 3) -> str:
    """With its sign; a true minus."""
    if value is None or not math.isfinite(value):
        return "–"
    text = f"{value:+.{digits}f}"
    return text.replace("-", "−") if float(text) else text[1:]


def duration(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:,.1f} h"


def place(scale: str, budget: str) -> str:
    return f"{scale} · {budget} tokens"
