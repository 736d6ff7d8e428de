"""What the report's sections share, and those that are of the study's own results: cells, perplexity, losses, solver, speed, provenance."""

from __future__ import annotations

import math
import re
from html import escape
from typing import Any

from stages.evaluation.parameters import TRAINED
from stages.report import style
from stages.report.figures import Drawing
from stages.report.markup import WIDEST, Cell, best_bold, filled, grouped, heading, number, percent, table
from stages.report.study import Study
from stages.report.style import FAINT, GRID, INK, Style

Row = dict[str, Any]

SHOWN = 12  # characters of a key


class Page:
    """The sections, each a list of HTML pieces; empty where there is nothing to show."""

    def __init__(self, study: Study, tables: dict[str, list[Row]], drawn: dict[str, Drawing], look: Style) -> None:
        self.study, self.tables, self.drawn, self.look = study, tables, drawn, look
        self.cell = {row["cell"]: row for row in tables["models"]}
        self.compared = [self.cell[run.cell.cell] for run in study.compared]

    def inks(self) -> list[str]:
        """Colours in the figures that are no model's: whatever ramp colours they use."""
        found = set(re.findall(r"#[0-9a-f]{6}", "".join(drawing.svg for drawing in self.drawn.values())))
        return sorted(found - set(self.look.colours.values()) - {INK, FAINT, GRID, "#ffffff"})

    # --- what is said first ---------------------------------------------------------------------------------------

    def summary(self) -> list[str]:
        study, models = self.study, self.tables["models"]
        names = list(dict.fromkeys(row["model"] for row in self.compared))
        scales, budgets = (list(dict.fromkeys(row[name] for row in models)) for name in ("scale", "budget"))
        sizes = [row["parameters"] for row in models]
        low, high = style.count(min(sizes)), style.count(max(sizes))
        sweep = len(models) - len(self.compared)
        trained = f"{number(len(names), 'model')} at {number(len(scales), 'scale')}: {number(len(models), 'cell')} of {low if low == high else f'{low} to {high}'} parameters"
        trained += f", {sweep} of them a sweep over CG steps in training." if sweep else "."
        tokens = " or ".join(dict.fromkeys(style.count(row["tokens"]) for row in models))
        flops = math.fsum(row["flops"] for row in models)
        lengths = f", at length {style.binary(study.length)}" if study.length else ""
        seen = f"{'Each trained' if len(models) > 1 else 'Trained'} on {tokens} tokens{lengths}; {style.power(flops)} FLOPs of training in all."
        lines = [trained, seen.replace(" or ", ", ", max(0, len(budgets) - 2))]
        if best := self._best():
            lines.append(best)
        return ['<ul class="summary">' + "".join(f"<li>{line}</li>" for line in lines) + "</ul>"]

    def _best(self) -> str | None:
        """The best model of the largest scale and budget, by the headline set, or the mean over sets."""
        place = max(
            self.study.places,
            key=lambda place: max(row["flops"] for row in self.compared if (row["scale"], row["budget"]) == place),
            default=None,
        )
        rows = [row for row in self._trained(self.study.length) if (row["scale"], row["budget"]) == place]
        text = self.study.parameters.headline
        if any(row["set"] == text for row in rows):
            scores, what = {row["cell"]: row["perplexity"] for row in rows if row["set"] == text}, f"{escape(text)} perplexity"
        else:
            scores, what = self._means(rows), "mean perplexity"
        scores = {cell: value for cell, value in scores.items() if value is not None and math.isfinite(value)}
        if not scores:
            return None
        best = min(scores, key=scores.__getitem__)
        label, where = (
            escape(self.look.labels[self.cell[best]["model"]]),
            f" at {escape(style.place(*place))}" if len(self.study.places) > 1 else "",
        )
        among = " outside the sweep" if len(self.compared) < len(self.tables["models"]) else ""
        said = f"Best{among}{where}: <b>{label}</b>, {what} {style.perplexity(scores[best])}"
        baseline = next((cell for cell in scores if self.cell[cell]["model"] == self.study.parameters.baseline), None)
        if len(scores) == 1:
            return f"<b>{label}</b>{where}: {what} {style.perplexity(scores[best])}."
        if baseline is None or baseline == best:
            second = sorted(scores, key=scores.__getitem__)[1]
            return f"{said}; next {escape(self.look.labels[self.cell[second]['model']])}, {style.perplexity(scores[second])}."
        name = escape(self.look.labels[self.cell[baseline]["model"]])
        return f"{said}, {1 - scores[best] / scores[baseline]:.1%} below the {name}’s {style.perplexity(scores[baseline])}."

    # --- tables ---------------------------------------------------------------------------------------------------

    def cells(self) -> list[str]:
        """The grid: what each cell is, and how its training ended."""
        perplexity = {
            row["cell"]: row["perplexity"]
            for row in self._trained(self.study.length, swept=True)
            if row["set"] == self.study.parameters.headline
        }
        head = [("model", "left"), ("parameters", ""), ("tokens", ""), ("training FLOPs", "")]
        head += [("CG steps", "")] if any(row["steps"] is not None for row in self.tables["models"]) else []
        head += [("final loss", "")] + ([(f"{self.study.parameters.headline} perplexity", "")] if perplexity else [])
        groups = []
        for (scale, budget, sweep), rows in grouped(
            self.tables["models"], lambda row: (row["scale"], row["budget"], row["group"] == "sweep")
        ):
            losses, scores = [row["final_loss"] for row in rows], [perplexity.get(row["cell"]) for row in rows]
            lines = []
            for row, loss, score in zip(rows, best_bold(losses, "{:.3f}".format), best_bold(scores, style.perplexity), strict=True):
                line = [self.named(row), style.count(row["parameters"]), style.count(row["tokens"]), style.power(row["flops"])]
                line += [str(row["steps"]) if row["steps"] is not None else "–"] if ("CG steps", "") in head else []
                lines.append((line + [loss] + ([score] if perplexity else []), row["group"] == "references"))
            title = escape(style.place(scale, budget)) + (": training sweep over CG steps" if sweep else "")
            groups.append((title, lines))
        parts = [heading("The cells"), table(head, groups)]
        if events := sum(row["events"] for row in self.tables["models"]):
            parts.append(
                f'<p class="note">{number(events, "step")} of training had a recorded event (a spike, a step skipped or rolled back); see <code>history</code>.</p>'
            )
        return parts

    def perplexity(self) -> list[str]:
        """Columns by length and set, as many lengths a table as fit; the best of each scale and budget in bold."""
        lengths = sorted({row["length"] for row in self.tables["perplexity"] if row["setting"] == TRAINED})
        blocks = [block for length in lengths if (block := self._block(length))["columns"]]
        parts: list[str] = []
        for those in filled(blocks, WIDEST):
            cells = [row for row in self.compared if any(row["cell"] in column for block in those for column in block["columns"].values())]
            groups = []
            for (scale, budget), group in grouped(cells, lambda row: (row["scale"], row["budget"])):
                columns = [
                    best_bold([column.get(cell["cell"]) for cell in group], style.perplexity)
                    for block in those
                    for column in block["columns"].values()
                ]
                lines = [
                    ([self.named(cell), *line], cell["group"] == "references")
                    for cell, line in zip(group, zip(*columns, strict=True), strict=True)
                ]
                groups.append((escape(style.place(scale, budget)), lines))
            head, over = [("model", "left")], [("", 1)]
            for block in those:
                head += [(text, "first" if i == 0 and len(over) > 1 else "") for i, text in enumerate(block["columns"])]
                over.append((block["title"], len(block["columns"])))
            alone = len(those) == 1
            parts.append(table(head, groups, caption=those[0]["title"].capitalize() if alone else "", over=() if alone else over))
        if not parts:
            return []
        mean = " The mean is over the sets to its left." if any("mean" in block["columns"] for block in blocks) else ""
        best = "Lower is better; the best of each group is bold." if len(self.compared) > 1 else "Lower is better."
        return [
            heading("Perplexity by set and length"),
            f'<p class="note">The exponential of the mean loss over all tokens of a set. {best}{mean}</p>',
            *parts,
        ]

    def _block(self, length: int) -> dict[str, Any]:
        """The columns of one length: title, and columns set -> {cell: perplexity}, the mean over sets last where there are several."""
        rows = self._trained(length)
        columns = {text: {row["cell"]: row["perplexity"] for row in those} for text, those in grouped(rows, lambda row: row["set"])}
        if len(columns) > 1:
            columns["mean"] = self._means(rows)
        return {"title": f"length {style.binary(length)}" + (" (trained)" if length == self.study.length else ""), "columns": columns}

    def throughput(self) -> list[str]:
        rows = [row for row in self.tables["throughput"] if row["tokens_per_second"] is not None]
        if not rows:
            return []
        extra = any(row["mfu"] is not None for row in rows)
        apart = any(
            row["mfu_without_cg"] is not None and row["mfu"] is not None and abs(row["mfu"] - row["mfu_without_cg"]) > 5e-5 for row in rows
        )
        fastest = max(row["tokens_per_second"] for row in rows)
        spent = any(row["accelerator_hours"] is not None for row in rows)
        head = (
            [("model", "left"), ("", "left"), ("tokens/s", "")]
            + ([("MFU", "")] if extra else [])
            + ([("without CG", "")] if apart else [])
            + [("training time", "")]
            + ([("device-hours", "")] if spent else [])
        )
        groups = []
        for (scale, budget), those in grouped(rows, lambda row: (row["scale"], row["budget"])):
            lines = []
            for row in those:
                bar = f'<i style="width: calc({100 * row["tokens_per_second"] / fastest:.1f}% - 1.3rem)"></i>'
                line = [self.named(self.cell[row["cell"]]), Cell(bar, "bar"), f"{row['tokens_per_second']:,.0f}"]
                line += [percent(row["mfu"])] if extra else []
                line += [percent(row["mfu_without_cg"])] if apart else []
                line += [style.duration(row["seconds"])]
                line += [f"{row['accelerator_hours']:,.3g}" if row["accelerator_hours"] is not None else "–"] if spent else []
                lines.append((line, False))
            groups.append((escape(style.place(scale, budget)), lines))
        note = "Medians over steps, where each cell happened to run"
        note += "; the steps that CG took count in the MFU, those it did not take never do." if extra else "."
        note += (
            " Device-hours are the training time on every GPU or TPU chip, or on the host’s processors where there was neither."
            if spent
            else ""
        )
        return [
            heading("Throughput"),
            table(head, groups),
            f'<p class="note">{note}</p>',
        ]

    # --- figures --------------------------------------------------------------------------------------------------

    def loss(self) -> list[str]:
        return self._section("Training loss", "loss")

    def positions(self) -> list[str]:
        return self._section("Loss by position", "positions")

    def extrapolation(self) -> list[str]:
        return self._section("Beyond the training length", "extrapolation")

    def cg(self, tasks: list[str]) -> list[str]:
        """Other solves at inference, on the costliest cell, and other caps in training: a figure and a table each. tasks: what follows, of tasks."""
        parts: list[str] = []
        for kind, title in (("inference", "Solved otherwise than in training"), ("training", "Trained with other caps")):
            rows = [row for row in self.tables["cg_sweep"] if row["kind"] == kind]
            shown = [name for name in self.drawn if name.startswith(f"cg_{kind}-")]
            if not rows or not shown:
                continue
            costliest = max(shown, key=lambda name: self.cell[name.removeprefix(f"cg_{kind}-")]["flops"])
            parts += [f"<h3>{title}</h3>", self.figure(costliest)]
            parts += self._cg_table(kind, [row for row in rows if row["length"] == self.study.length])
            if len(shown) > 1:
                parts.append(f'<p class="note">The same figure of the other cells is in <code>figures/cg_{kind}-*.png</code>.</p>')
        parts += tasks
        return [heading("Conjugate gradient steps"), *parts] if parts else []

    def _cg_table(self, kind: str, rows: list[Row]) -> list[str]:
        """Steps really taken and what they cost, over all sets at one length."""
        if not rows:
            return []
        sets = list(dict.fromkeys(row["set"] for row in rows))
        head = [("setting" if kind == "inference" else "trained with", "left"), ("steps taken", ""), *((text, "") for text in sets)]
        groups = []
        for reference, group in grouped(rows, lambda row: row["reference"]):
            lines = []
            for _, same in grouped(group, lambda row: (row["cell"], row["setting"])):
                taken = [row["steps_taken"] for row in same if row["steps_taken"] is not None]
                difference = {row["set"]: row["difference"] for row in same}
                name = (
                    same[0]["setting"]
                    if kind == "inference"
                    else f"{same[0]['steps']} steps"
                    if same[0]["steps"] is not None
                    else same[0]["model"]
                )
                mean = f"{math.fsum(taken) / len(taken):.1f}" if taken else "–"
                lines.append(([escape(name), mean, *(style.signed(difference.get(text), 4) for text in sets)], False))
            groups.append((escape(reference), lines))
        against = "the cell as trained" if kind == "inference" else "the grid’s cell"
        return [table(head, groups, caption=f"NLL minus that of {against} (nats per token), length {style.binary(self.study.length)}")]

    def _section(self, title: str, prefix: str) -> list[str]:
        found = [name for name in self.drawn if name.startswith(prefix)]
        parts = [heading(title)] if found else []
        places = {f"-{scale}-{budget}": style.place(scale, budget) for scale, budget in self.study.places}
        for name in found:
            parts += [f"<h3>{escape(text)}</h3>" for end, text in places.items() if name == f"{prefix}{end}"]
            parts.append(self.figure(name))
        return parts

    def figure(self, name: str) -> str:
        caption = escape(self.drawn[name].caption)
        return f'<figure id="{escape(name)}"><div>{_inline(self.drawn[name].svg, name, caption)}</div><figcaption>{caption}</figcaption></figure>'

    # --- how it was made ------------------------------------------------------------------------------------------

    def made_from(self) -> list[str]:
        spec = self.study.spec
        versions = ", ".join(f"{name} version {version}" for name, version in sorted(spec.versions.items()))
        numbers = self.study.parameters
        said = f"Analysis <code>{spec.key[:SHOWN]}</code> ({escape(versions)}), from the cells below and nothing else. "
        said += f"Loss curves and final losses are means over {numbers.smoothing:.0%} of a run; intervals are from {numbers.bootstrap} resamples of sequences, seed {numbers.seed}. "
        said += "Every number here is in <code>tables/*.parquet</code> beside this page, and the libraries that made it in <code>provenance.json</code>."
        lines = [
            (
                [
                    f"<code>{escape(run.cell.cell)}</code>",
                    *(
                        Cell(f"<code>{spec.inputs[f'{kind}/{run.cell.cell}'][:SHOWN]}</code>", "left")
                        for kind in ("history", "evaluations")
                    ),
                ],
                False,
            )
            for run in self.study.runs
        ]
        return [
            heading("How it was made"),
            f"<p>{said}</p>",
            table([("cell", "left"), ("training’s key", "left"), ("evaluation’s key", "left")], [("", lines)]),
        ]

    # --- parts ----------------------------------------------------------------------------------------------------

    def _trained(self, length: int | None, *, swept: bool = False) -> list[Row]:
        """Perplexities at a length of the cells that are compared (swept: of all), solved as in training."""
        cells = {row["cell"] for row in (self.tables["models"] if swept else self.compared)}
        return [row for row in self.tables["perplexity"] if row["length"] == length and row["setting"] == TRAINED and row["cell"] in cells]

    def _means(self, rows: list[Row]) -> dict[str, float | None]:
        """cell -> plain mean of its perplexities over all sets of these rows; None where it lacks one."""
        sets = {row["set"] for row in rows}
        values = {cell: [row["perplexity"] for row in those] for cell, those in grouped(rows, lambda row: row["cell"])}
        return {
            cell: math.fsum(found) / len(found) if len(found) == len(sets) and None not in found else None for cell, found in values.items()
        }

    def named(self, row: Row) -> str:
        label, colour = self.look.labels[row["model"]], self.look.colours[row["model"]]
        return f'<span class="dot" style="background: {colour}"></span>{escape(label)}'


# --- figures in the page ----------------------------------------------------------------------------------------------


def _inline(svg: str, name: str, caption: str) -> str:
    """matplotlib's SVG as a part of an HTML page: no prologue, no outside names, ids of its own, fonts from the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg)
    slug = re.sub(r"\W", "_", name)
    svg = re.sub(r'\bid="', f'id="{slug}.', svg)
    svg = re.sub(r'xlink:href="#', f'href="#{slug}.', svg)
    svg = svg.replace("url(#", f"url(#{slug}.")
    svg = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{caption}">', svg, count=1)
    return re.sub(r"\n\s*", "\n", svg).strip()
