"""The report: one self-contained HTML file, for reading, sending and printing. No script, nothing loaded from elsewhere."""

from __future__ import annotations

import colorsys
import re
from html import escape
from pathlib import Path
from string import Template

import pyarrow as pa

from stages.report import sections
from stages.report.figures import Drawing
from stages.report.page import Page
from stages.report.study import Study
from stages.report.style import FAINT, GRID, INK, Style

TEMPLATE = Path(__file__).parents[1] / "data" / "report.html"


def render(study: Study, made: dict[str, pa.Table], drawn: dict[str, Drawing]) -> str:
    """The page's text. A section that has nothing to show is left out."""
    tables = {name: table.to_pylist() for name, table in made.items()}
    look = Style.of(study)
    page = Page(study, tables, drawn, look)
    parts = (
        *(
            page.summary(),
            page.cells(),
            sections.learning_rates(page),
            page.perplexity(),
            sections.differences(page),
            sections.domains(page),
        ),
        *(page.loss(), page.positions(), page.extrapolation()),
        *(
            sections.downstream(page),
            sections.needles(page),
            sections.split(page),
            page.cg(sections.solved_tasks(page)),
            sections.inside(page),
            sections.fits(page),
        ),
        *(page.throughput(), sections.beside_the_paper(page), page.made_from()),
    )
    colours = [*dict.fromkeys([*look.colours.values(), *page.inks()])]
    variables = {colour: f"--c{i}" for i, colour in enumerate(colours)}
    body = "\n".join(piece for part in parts for piece in part)
    return Template(TEMPLATE.read_text()).substitute(
        title=escape(study.parameters.title),
        light=" ".join(f"{name}: {colour};" for colour, name in variables.items()),
        dark=" ".join(f"{name}: {_on_dark(colour)};" for colour, name in variables.items()),
        body=_themed(body, variables),
    )


def _themed(body: str, variables: dict[str, str]) -> str:
    """Colours as the page's variables, so that they follow light and dark."""
    names = variables | {INK: "--ink", FAINT: "--faint", GRID: "--line"}
    return re.sub("|".join(map(re.escape, names)), lambda found: f"var({names[found.group()]})", body)


def _on_dark(colour: str) -> str:
    """The same hue, light enough to read on a dark page."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    hue, lightness, saturation = colorsys.rgb_to_hls(red, green, blue)
    lifted = colorsys.hls_to_rgb(hue, max(lightness, 0.62), saturation * 0.65)
    return "#" + "".join(f"{round(255 * part):02x}" for part in lifted)
