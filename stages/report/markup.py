"""Pieces of the report's HTML: tables, headings, counts in words, the best in bold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import groupby
from typing import Any

Row = dict[str, Any]
WIDEST = 9  # columns of numbers in a table


class Cell(str):
    """A table cell's HTML with a class of its own."""

    kind: str

    def __new__(cls, text: str, kind: str) -> Cell:
        made = super().__new__(cls, text)
        made.kind = kind
        return made


def table(
    head: Sequence[tuple[str, str]],
    groups: Iterable[tuple[str, list[tuple[list[str], bool]]]],
    *,
    caption: str = "",
    over: Sequence[tuple[str, int]] = (),
) -> str:
    """A table of groups (title, lines); a line is its cells and whether it is a reference, shown quietly. A single group has no title row.

    head: (title, class) of the columns. over: (title, columns) of a row above it.
    """
    groups = list(groups)
    titles = len(groups) > 1
    top = "".join(f'<th class="{kind}">{escape(text)}</th>' if kind else f"<th>{escape(text)}</th>" for text, kind in head)
    parts = [
        f"<caption>{escape(caption if titles or not groups or not groups[0][0] else joined(caption, groups[0][0]))}</caption>"
        if caption
        else ""
    ]
    above = "".join(f'<th colspan="{span}"{" class=over" if text else ""}>{escape(text)}</th>' for text, span in over)
    parts.append(f"<thead>{f'<tr>{above}</tr>' if above else ''}<tr>{top}</tr></thead>")
    for title, lines in groups:
        body = [f'<tr><th colspan="{len(head)}">{title}</th></tr>'] if titles else []
        for cells, quiet in lines:
            marked = [(cell, cell.kind if isinstance(cell, Cell) else kind) for cell, (_, kind) in zip(cells, head, strict=True)]
            row = "".join(f'<td class="{kind}">{cell}</td>' if kind else f"<td>{cell}</td>" for cell, kind in marked)
            body.append(f'<tr class="quiet">{row}</tr>' if quiet else f"<tr>{row}</tr>")
        parts.append(f"<tbody>{''.join(body)}</tbody>")
    return f'<div class="wide"><table>{"".join(parts)}</table></div>'


def joined(caption: str, title: str) -> str:
    return f"{caption}, {title}" if title else caption


def heading(title: str) -> str:
    return f"<h2>{escape(title)}</h2>"


def number(value: int, what: str) -> str:
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    text = words[value] if value < len(words) else f"{value:,}"
    return f"{text.capitalize() if what in ('model', 'step', 'figure') else text} {what}{'' if value == 1 else 's'}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def best_bold(values: list[float | None], show: Callable[[float], str], best_of: Callable[[list[float]], float] = min) -> list[str]:
    """Values as text, the least (or best_of them) in bold where there is something to choose from. What reads the same as the best is as good."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    best = show(best_of(finite)) if len(finite) > 1 else None
    texts = ["–" if value is None else show(value) for value in values]
    return [f"<b>{text}</b>" if text == best else text for text in texts]


def filled(blocks: list[dict[str, Any]], most: int) -> list[list[dict[str, Any]]]:
    """Blocks of columns in tables of at most `most` columns; a wider block stands alone."""
    tables: list[list[dict[str, Any]]] = []
    for block in blocks:
        if tables and sum(len(other["columns"]) for other in tables[-1]) + len(block["columns"]) <= most:
            tables[-1].append(block)
        else:
            tables.append([block])
    return tables


def grouped(rows: list[Row], key: Any) -> list[tuple[Any, list[Row]]]:
    """(key, rows) in the keys' first order."""
    order = {value: i for i, value in enumerate(dict.fromkeys(key(row) for row in rows))}
    return [(value, list(those)) for value, those in groupby(sorted(rows, key=lambda row: order[key(row)]), key)]
