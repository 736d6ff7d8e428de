"""Sections of the report that stand apart from its losses: tasks, needles, learning rates, fits over scale, and the ledger.

Each takes the page and gives HTML pieces: none where the study's cells do not allow the section.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from html import escape

from stages.evaluation.parameters import TRAINED
from stages.report import downstream as tasks
from stages.report import ledger, style
from stages.report.markup import WIDEST, Row, best_bold, filled, grouped, heading, number, table
from stages.report.page import Page
from stages.report.paper import MEAN

PAPERS = {"mesanet": "MesaNet’s", "palimpsa": "Palimpsa’s"}

Columns = dict[str, dict[str, str]]  # title -> cell -> HTML
BESIDE = 6  # columns of two numbers in a table
INTERVALS = 4  # columns of a number and its interval
OPEN = 24  # compared cells up to which long tables stand open


def _note(text: str) -> str:
    return f'<p class="note">{text}</p>'


def _cells_table(page: Page, columns: Columns, *, caption: str = "", last: dict[str, str] | None = None) -> str:
    """A table of the compared cells, a group a scale and budget; cells with nothing in it are left out. last: title -> HTML of a quiet last line."""
    cells = [row for row in page.compared if any(row["cell"] in column for column in columns.values())]
    groups = []
    for (scale, budget), those in grouped(cells, lambda row: (row["scale"], row["budget"])):
        lines = [
            ([page.named(row), *(column.get(row["cell"], "–") for column in columns.values())], row["group"] == "references")
            for row in those
        ]
        groups.append((escape(style.place(scale, budget)), lines))
    if last and groups:
        groups[-1][1].append((["chance", *(last.get(title, "") for title in columns)], True))
    return table([("model", "left"), *((title, "") for title in columns)], groups, caption=caption)


def _folded(page: Page, title: str, parts: list[str]) -> list[str]:
    """Tables that are folded away where there are many cells; each is in a Parquet file too."""
    opened = "<details open>" if len(page.compared) <= OPEN else "<details>"
    return [opened, f"<summary>{escape(title)}</summary>", *parts, "</details>"] if parts else []


def _in_pieces(columns: Columns, widest: int = WIDEST) -> Iterable[Columns]:
    """Columns in tables that fit the page."""
    for piece in filled([{"columns": {title: column}} for title, column in columns.items()], widest):
        yield {title: column for block in piece for title, column in block["columns"].items()}


def _best(page: Page, rows: list[Row], show: Callable[[Row], str], best_of: Callable[[list[float]], float]) -> dict[str, str]:
    """cell -> HTML of its row's score, the best of each scale and budget in bold, what is no better than chance in grey."""
    found = {}
    for _, those in grouped(rows, lambda row: (row["scale"], row["budget"])):
        texts = best_bold([row["score"] for row in those], lambda value: f"{value:.1f}", best_of)
        for row, text in zip(those, texts, strict=True):
            whole = text + show(row)
            found[row["cell"]] = f'<span class="chance">{whole}</span>' if _by_chance(row) else whole
    return found


def _by_chance(row: Row) -> bool:
    """Of a task's row, and of a group's where all of its tasks are."""
    return bool(row["at_chance"]) if "tasks" not in row else row["at_chance"] == row["tasks"]


def _shown(page: Page, name: str) -> list[Row]:
    """A table's rows of the compared cells, solved as in training."""
    cells = {row["cell"] for row in page.compared}
    return [row for row in page.tables[name] if row["cell"] in cells and row["setting"] == TRAINED]


def _title(name: str, shots: int) -> str:
    return f"{name}, {shots}-shot" if shots else name


def _group_name(group: str | None) -> str:
    return group.replace("_", " ") if group else "no group"


# --- downstream -------------------------------------------------------------------------------------------------------


def downstream(page: Page) -> list[str]:
    """Means by group, then each group's tasks."""
    rows = [row for row in _shown(page, "tasks") if not _needle(row)]
    if not rows:
        return []
    said = "Scores in per cent, BLEU in its points; higher is better, and the best of each group of cells is bold. Grey is no better than chance: within two standard errors of it, or nothing right."
    said += " Rows of references are grey throughout." if any(row["group"] == "references" for row in page.compared) else ""
    if all(row["at_chance"] for row in rows):
        said += " Here no cell is better than chance on any task."
    if dropped := sum(row["shots_dropped"] for row in rows):
        said += f" {dropped:,} few-shot examples did not fit in a model’s window and were left out."
    if cut := sum(row["answers_cut"] for row in rows):
        said += f" Of the prompts that were too long, {cut:,} lost their answer; they count as wrong or right like others."
    parts = [heading("Downstream tasks"), _note(said)]

    means = [row for row in _shown(page, "groups") if not _needle(row)]
    most = {group: max(row["shots"] for row in those) for group, those in grouped(means, lambda row: row["group"])}
    several = [row for row in means if row["tasks"] > 1 and row["shots"] == most[row["group"]]]
    if several:
        columns: Columns = {}
        for (group, shots), those in _sorted(several):
            columns[_title(_group_name(group), shots)] = _best(page, those, lambda row: "", max)
        uneven = any(len({row["members"] for row in those}) > 1 for _, those in _sorted(several))
        caption = "Means over a group’s tasks" + (", with the most examples that it was asked with" if any(most.values()) else "")
        parts += [_cells_table(page, piece, caption=caption) for piece in _in_pieces(columns)]
        if uneven:
            parts.append(
                _note("Not every cell was asked the same tasks of a group; <code>tables/groups.parquet</code> says which a mean is over.")
            )

    for group, those in sorted(grouped(rows, lambda row: row["group"]), key=lambda item: tasks.place(item[0])):
        columns, chance = {}, {}
        for (name, shots), same in grouped(those, lambda row: (row["task"], row["shots"])):
            title = _title(name, shots)
            columns[title] = _best(page, same, lambda row: f"<small>±{row['std']:.1f}</small>" if row["std"] is not None else "", max)
            if same[0]["chance"] is not None:
                chance[title] = f"{same[0]['chance']:.1f}"
        widest = BESIDE if any(row["std"] is not None for row in those) else WIDEST
        pieces = [
            _cells_table(page, piece, last={title: chance.get(title, "0.0") for title in piece} if chance else None)
            for piece in _in_pieces(columns, widest)
        ]
        parts += _folded(page, f"{_group_name(group).capitalize()}: {_how(those)}", pieces)
    return parts


def _how(rows: list[Row]) -> str:
    """How a group's tasks are scored, in words."""
    words = {"contained": "answers contained in what the model goes on with", "bleu": "BLEU of what the model goes on with"}
    found = []
    for kind, those in grouped(rows, lambda row: row["kind"]):
        rules = sorted({row["normalisation"] for row in those if row["normalisation"]})
        if kind == "multiple_choice":
            found.append(
                f"multiple choice, options’ losses {' or '.join('not normalised' if r == 'none' else f'normalised by {r}' for r in rules)}"
            )
        else:
            found.append(words.get(those[0]["metric"], "every token of the target the likeliest"))
    if any(row["std"] is not None for row in rows):
        found.append("± over draws of the examples")
    return "; ".join(found)


def _sorted(rows: list[Row]) -> list[tuple[tuple[str, int], list[Row]]]:
    return sorted(grouped(rows, lambda row: (row["group"], row["shots"])), key=lambda item: (tasks.place(item[0][0]), item[0][1]))


def _needle(row: Row) -> bool:
    return (row["group"] or "").startswith(tasks.NEEDLES)


def needles(page: Page) -> list[str]:
    """Single needles in haystacks: the mean over types of key and value."""
    rows = [row for row in _shown(page, "groups") if _needle(row)]
    if not rows:
        return []
    columns: Columns = {}
    for (group, _), those in _sorted(rows):
        title = group.removeprefix(tasks.NEEDLES).strip("-_").replace("-", " ") or those[0]["members"]
        columns[title] = _best(page, those, lambda row: f"<small>±{row['std']:.1f}</small>" if row["std"] is not None else "", max)
    most = max(row["tasks"] for row in rows)
    said = "Per cent of hidden values that the model repeats when it is asked for them"
    said += f"; mean ± standard deviation over {most} types of key and value." if most > 1 else "."
    said += " Here no value is ever found." if not any(row["score"] for row in rows) else ""
    maps = [page.figure(name) for name in page.drawn if name == "needles" or name.startswith("needles-")]
    tables = [_cells_table(page, piece) for piece in _in_pieces(columns)]
    return [
        heading("Needles in haystacks"),
        _note(said),
        *tables,
        *(maps[:1] + _folded(page, "By depth: other haystacks, scales and budgets", maps[1:])),
    ]


def split(page: Page) -> list[str]:
    """Which tasks a longer window helps."""
    rows = page.tables["split"]
    if not rows:
        return []
    head = [
        ("task", "left"),
        *((f"SWA-{window}", "") for window in rows[0]["windows"]),
        ("full", ""),
        ("here", ""),
        ("this study", ""),
        ("paper", ""),
    ]
    groups = []
    for (scale, budget), those in grouped(rows, lambda row: (row["scale"], row["budget"])):
        lines = [
            ([escape(r["task"]), *(f"{v:.1f}" for v in r["scores"]), f"{r['full']:.1f}", r["group"], r["study"], r["paper"] or "–"], False)
            for r in those
        ]
        groups.append((escape(style.place(scale, budget)), lines))
    differ = len({row["task"] for row in rows if row["paper"] and row["paper"] != row["study"]})
    said = "Global: the score rises with every one of these windows and none of them beats full attention; “here” at one scale and budget, “this study” at all of them. "
    said += f"{number(differ, 'task').capitalize()} {'falls' if differ == 1 else 'fall'} in the other group than the paper’s; differences within the tasks’ sampling error decide alike."
    return [heading("Local and global tasks, by windows"), _note(said), *_folded(page, "Scores by window", [table(head, groups)])]


def solved_tasks(page: Page) -> list[str]:
    """Group means of tasks under other settings of the solver than in training."""
    rows = [row for row in page.tables["groups"] if row["setting"] != TRAINED and not _needle(row)]
    parts = []
    for cell, those in grouped(rows, lambda row: row["cell"]):
        asked = {(row["group"], row["shots"]) for row in those}
        trained = [
            row
            for row in page.tables["groups"]
            if row["cell"] == cell and row["setting"] == TRAINED and (row["group"], row["shots"]) in asked
        ]
        order = [key for key, _ in _sorted(trained + those) if key in asked]
        lines = []
        for setting, same in grouped(trained + those, lambda row: row["setting"]):
            score = {(row["group"], row["shots"]): f"{row['score']:.1f}" for row in same}
            lines.append(([escape(setting or "as trained"), *(score.get(key, "–") for key in order)], False))
        head = [("setting", "left"), *((_title(_group_name(group), shots), "") for group, shots in order)]
        parts.append(table(head, [("", lines)], caption=f"Tasks’ group means of {cell} under other settings of the solver"))
    return parts


# --- losses -----------------------------------------------------------------------------------------------------------


def differences(page: Page) -> list[str]:
    """NLL less the baseline's over all tokens, at the training length."""
    rows = [row for row in page.tables["differences"] if row["length"] == page.study.length]
    if not rows:
        return []
    name = escape(page.look.labels[page.study.parameters.baseline])
    columns = {}
    for text, those in grouped(rows, lambda row: row["set"]):
        columns[text] = {row["cell"]: f"{style.signed(row['difference'], 4)}<small>{_interval(row)}</small>" for row in those}
    said = f"Loss in nats per token minus the {name}’s on the same sequences at length {style.binary(page.study.length)}, with 95 % bootstrap intervals over sequences. Below zero is better; an interval holds nothing of another seed of the training."
    pieces = [_cells_table(page, piece) for piece in _in_pieces(columns, INTERVALS)]
    return [
        "<h3>Against the baseline</h3>",
        _note(said),
        *_folded(page, f"NLL minus the {page.look.labels[page.study.parameters.baseline]}’s", pieces),
    ]


def _interval(row: Row) -> str:
    return "" if row["low"] is None else f"{style.signed(row['low'], 4)} to {style.signed(row['high'], 4)}"


def domains(page: Page) -> list[str]:
    """Perplexity by the domains of a set's documents, at the training length."""
    rows = [row for row in _shown(page, "domains") if row["length"] == page.study.length]
    parts = []
    for text, those in grouped(rows, lambda row: row["set"]):
        columns: Columns = {}
        for source, same in grouped(those, lambda row: row["source"]):
            for _, near in grouped(same, lambda row: (row["scale"], row["budget"])):
                shown = best_bold([row["perplexity"] for row in near], style.perplexity)
                columns.setdefault(source, {}).update({row["cell"]: value for row, value in zip(near, shown, strict=True)})
        parts += [_cells_table(page, piece, caption=f"{text}, perplexity by domain") for piece in _in_pieces(columns)]
    return parts


def learning_rates(page: Page) -> list[str]:
    """Cells that differ in their learning rate alone."""
    rows = page.tables["learning_rates"]
    if not rows:
        return []
    groups = []
    for (scale, budget), those in grouped(rows, lambda row: (row["scale"], row["budget"])):
        lines = []
        for row in those:
            bold = "<b>{}</b>" if row["selected"] else "{}"
            lines.append(
                (
                    [
                        page.named(page.cell[row["cell"]]),
                        f"{row['learning_rate']:g}",
                        bold.format(style.perplexity(row["perplexity"])),
                        "at the edge" if row["edge"] else "",
                    ],
                    False,
                )
            )
        groups.append((escape(style.place(scale, budget)), lines))
    first = rows[0]
    said = (
        f"Cells that differ in nothing but their learning rate; the one with the least loss on {escape(first['set'])} is selected (bold)."
    )
    if any(row["edge"] for row in rows):
        said += " A selected rate at the edge of those tried may not be the best there is."
    return [
        heading("Learning rates"),
        _note(said),
        table([("model", "left"), ("peak rate", ""), (f"{first['set']} perplexity", ""), ("", "left")], groups),
    ]


MESA = {"gamma": ("γ", ".3f"), "beta": ("β", ".3f"), "steps": ("CG steps to 10⁻³", ".1f"), "cosine": ("cosine to no solve", ".2f"), "condition": ("condition of H + Λ", ".3g")}  # fmt: skip
PALIMPSA = {
    "log_window": ("log N", ".2f"),
    "beta": ("β", ".3f"),
    "ratio": ("importance ratio r", ".3g"),
    "importance_high": ("most important", ".3g"),
}


def inside(page: Page) -> list[str]:
    """What layers do inside: while they are trained, and the heads of trained ones."""
    drawn = [name for name in page.drawn if name.startswith("training_inside")]
    costliest = max(page.compared, key=lambda row: row["flops"])
    drawn.sort(key=lambda name: not name.endswith(f"-{costliest['scale']}-{costliest['budget']}"))
    parts = [
        *map(page.figure, drawn[:1]),
        *_folded(page, "In training: other scales and budgets", [page.figure(name) for name in drawn[1:]]),
        *_course(page, "internals_course", "Mesa’s heads while they are trained", MESA),
        *_heads(page, "internals", "Mesa’s heads", MESA),
        *_course(page, "memory_course", "Palimpsa’s memory while it is trained", PALIMPSA),
        *_heads(page, "memory", "Palimpsa’s memory", PALIMPSA),
    ]
    return [heading("Inside the layers"), *parts] if parts else []


def _heads(page: Page, name: str, title: str, columns: dict[str, tuple[str, str]]) -> list[str]:
    """The costliest cell's maps, and of each cell the range over heads."""
    rows = page.tables[name]
    if not (figure := _of_costliest(page, name)):
        return []
    last = max(row["position"] for row in rows)
    lines = []
    for cell, those in grouped(rows, lambda row: row["cell"]):
        end = [row for row in those if row["position"] == max(row["position"] for row in those)]
        ranges = [_range(end, column, form) for column, (_, form) in columns.items()]
        lines.append(([escape(cell), *ranges], page.cell[cell]["group"] == "sweep"))
    head = [("cell", "left"), *((said, "") for said, _ in columns.values())]
    said = f"The least and the greatest of all heads, over the last positions of the sequences (up to {style.binary(last)}); every bin of positions is in <code>tables/{name}.parquet</code>."
    return [f"<h3>{title}</h3>", *figure, _note(said), table(head, [("", lines)])]


def _course(page: Page, name: str, title: str, columns: dict[str, tuple[str, str]]) -> list[str]:
    """The costliest cell's course, and of each cell the range over heads before its first step and after its last."""
    if not (figure := _of_costliest(page, name)):
        return []
    lines = []
    for cell, those in grouped(page.tables[name], lambda row: row["cell"]):
        for step in dict.fromkeys((min(row["step"] for row in those), max(row["step"] for row in those))):
            seen = [row for row in those if row["step"] == step]
            ranges = [_range(seen, column, form) for column, (_, form) in columns.items()]
            lines.append(([escape(cell), style.count(seen[0]["tokens"]), *ranges], page.cell[cell]["group"] == "sweep"))
    head = [("cell", "left"), ("tokens", ""), *((said, "") for said, _ in columns.values())]
    said = (
        f"The least and the greatest of all heads, at the first look and at the last; every look is in <code>tables/{name}.parquet</code>."
    )
    return [f"<h3>{title}</h3>", *figure, _note(said), *_folded(page, "First and last look", [table(head, [("", lines)])])]


def _of_costliest(page: Page, name: str) -> list[str]:
    """Of the figures `name`-CELL the costliest cell's, and where the others are; empty where there is none."""
    shown = [drawn for drawn in page.drawn if drawn.startswith(f"{name}-")]
    if not shown:
        return []
    costliest = max(shown, key=lambda drawn: page.cell[drawn.removeprefix(f"{name}-")]["flops"])
    others = _note(f"The same figure of the other cells is in <code>figures/{name}-*.png</code>.")
    return [page.figure(costliest), *([others] if len(shown) > 1 else [])]


def _range(rows: list[Row], column: str, form: str) -> str:
    values = [row[column] for row in rows if row[column] is not None]
    return f"{min(values):{form}} to {max(values):{form}}" if values else "–"


# --- over scale -------------------------------------------------------------------------------------------------------


def fits(page: Page) -> list[str]:
    """Loss over parameters and tokens: the figure, and exponents where there are enough points."""
    rows = page.tables["fits"]
    if not rows:
        return []
    text, length = page.study.headline
    over = {"parameters": "parameters", "tokens": "tokens", "both": "parameters and tokens"}
    groups = []
    for model, those in grouped(rows, lambda row: row["model"]):
        lines = []
        for row in those:
            where = " · ".join(part for part in (row["scale"], f"{row['budget']} tokens" if row["budget"] else None) if part)
            points = f"{row['points']}" if row["fitted"] else f"{row['points']} of {row['fewest']} wanted"
            line = [
                escape(f"{over[row['over']]}{f', {where}' if where else ''}"),
                points,
                *(_exponent(row, name) for name in ("parameters", "tokens")),
            ]
            lines.append(([*line, f"{row['residual']:.4f}" if row["fitted"] else "–"], not row["fitted"]))
        groups.append((page.named({"model": model}), lines))
    head = [("loss over", "left"), ("points", ""), ("exponent of parameters", ""), ("exponent of tokens", ""), ("residual", "")]
    said = f"A power law through the loss on {escape(text)} at length {style.binary(length)}, without an irreducible part, which so few points could not tell: it holds between these sizes and says nothing beyond them. Intervals are over resampled sequences of the set, not over training again. Lines with fewer points than wanted are not fitted."
    figure = [page.figure("scaling")] if "scaling" in page.drawn else []
    return [heading("Loss over scale"), *figure, _note(said), *_folded(page, "Exponents", [table(head, groups)])]


def _exponent(row: Row, name: str) -> str:
    value = row[f"exponent_{name}"]
    if value is None:
        return "–"
    between = "" if row[f"low_{name}"] is None else f"<small>{row[f'low_{name}']:.3f} to {row[f'high_{name}']:.3f}</small>"
    return f"{value:.3f}{between}"


# --- beside the paper -------------------------------------------------------------------------------------------------

KINDS = {
    "perplexity": "Perplexity", "task_perplexity": "Perplexity of a task’s targets", "tasks": "Reasoning", "groups": "Group means", "recall": "Recall",
    "scrambling": "Scrambled words", "translation": "Translation, BLEU", "niah": "Needles in haystacks", "solver": "Group means by the solver’s setting",
    "learning_rate": "Peak learning rate", "throughput": "Training tokens a second on a device, which the paper only draws",
    "slowdown": "Training time of a token on our devices (the paper’s are not said), times that of",
}  # fmt: skip


def beside_the_paper(page: Page) -> list[str]:
    """The ledger: what was run, a table a kind of figure, and what was not."""
    paper = page.study.parameters.paper
    if paper is None:
        return []
    rows = page.tables["ledger"]
    ours = [row for row in rows if row["status"] == ledger.RUN]
    title = heading("Beside the paper")
    if not rows:
        return [title, "<p>No cell here is one of the paper’s own (its models, scales and budgets), so no figure is set beside it.</p>"]
    spent = {row["cell"]: row["accelerator_hours"] for row in rows if row["cell"]}
    tokens = math.fsum({row["cell"]: row["tokens"] for row in rows if row["cell"]}.values())
    said = f"Of the {len(rows):,} figures of {PAPERS[paper]} that are on record, {len(ours):,} {'was' if len(ours) == 1 else 'were'} run here, by {number(len(spent), 'cell')} trained on {style.count(tokens)} tokens"
    known = [hours for hours in spent.values() if hours is not None]
    said += f" in {math.fsum(known):,.3g} device-hours" if known else ""
    said += f" (of {number(len(known), 'cell')} whose history counts devices)" if known and len(known) < len(spent) else ""
    parts = [title, _note(f"{said}. Ours and, smaller, ours minus the paper’s.")]
    for (kind, length, setting), those in grouped(
        ours, lambda row: (row["table"], row["length"] if row["table"] == "perplexity" else None, row["setting"])
    ):
        columns: Columns = {}
        for row in those:
            name = (
                "mean"
                if row["metric"] == MEAN
                else row["metric"]
                if row["table"] in ("groups", "solver") or "," in row["name"]
                else row["name"]
            )
            name = f"{row['metric']} {style.binary(row['length'])}" if kind == "niah" else name
            columns.setdefault(_title(name, row["shots"] or 0), {})[row["cell"]] = _beside(row)
        where = f", length {style.binary(length)}" if length else f", {setting}" if setting else ""
        parts += _folded(page, KINDS[kind] + where, [_cells_table(page, piece) for piece in _in_pieces(columns, BESIDE)])
    return [*parts, *_not_run(rows)]


def _beside(row: Row) -> str:
    if row["table"] == "learning_rate":
        difference = "0" if abs(row["difference"]) < 1e-12 else f"{row['difference']:+.1g}".replace("-", "−")
        return f"{row['ours']:g}<small>{difference}</small>"
    if row["paper"] is None:
        return f"{row['ours']:,.0f}"
    show = style.perplexity if "perplexity" in row["table"] else "{:.1f}".format
    return f"{show(row['ours'])}<small>{style.signed(row['difference'], 2 if 'perplexity' in row['table'] else 1)}</small>"


def _not_run(rows: list[Row]) -> list[str]:
    missing = [row for row in rows if row["status"] != ledger.RUN]
    if not missing:
        return []
    here = [row for row in missing if row["cell"]]
    said = f"{number(len(missing), 'figure').capitalize()} of the paper {'was' if len(missing) == 1 else 'were'} not run: {len(missing) - len(here):,} of cells that this study lacks, {len(here):,} of cells that it has"
    if here:
        names = Counter(row["metric"] for row in here if row["note"] == "not evaluated")
        said += f" ({', '.join(escape(name) for name in names)} not evaluated)" if names else ""
    return [_note(f"{said}. They are in <code>tables/ledger.parquet</code>, each with its reason.")]
