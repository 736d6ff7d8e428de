"""The report's page: self-contained, well formed, the best in bold; a model's look the same in every study."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from stages.analyze import run
from stages.report import markup, style
from stages.spec import Context
from tests.stages.made_up_study import LENGTH, cell, inputs_of, spec_of, write_study

MODELS = ("transformer", "mamba2", "mesa", "hawk_mesa")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    root = tmp_path_factory.mktemp("study")
    cells = [cell(model) for model in MODELS]
    write_study(root, cells, sets={"validation": [LENGTH], "books": [LENGTH, 4 * LENGTH]}, sweep_on="mesa")
    spec = spec_of(cells, title="Layers & <losses>", bootstrap=20)
    (root / "analysis").mkdir()
    run(spec, root / "analysis", inputs_of(root, spec), Context())
    return root / "analysis"


@pytest.fixture(scope="module")
def text(out) -> str:
    return (out / "report.html").read_text()


class Reader(HTMLParser):
    """Checks that elements nest, and keeps ids, references and table rows."""

    EMPTY = {"meta", "br", "img", "link"}

    def __init__(self) -> None:
        super().__init__()
        self.open, self.ids, self.attributes, self.rows = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.ids += [value for name, value in attrs if name == "id"]
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append("")
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.EMPTY:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data):
        if "td" in self.open:
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def read(text) -> Reader:
    reader = Reader()
    reader.feed(text)
    return reader


def test_it_is_one_self_contained_file_without_scripts(text, read):
    assert not re.search(r"https?:|//[a-z]|@import|<script|<link|<iframe|<img", text)
    references = [value for _, name, value in read.attributes if name in ("href", "src", "xlink:href", "action", "data")]
    references += re.findall(r"url\(([^)]*)\)", text)
    assert references and all(value.startswith("#") for value in references)
    assert {value[1:] for value in references} <= set(read.ids)


def test_elements_nest_and_ids_are_unique(read):
    assert read.open == [] and len(read.ids) == len(set(read.ids)) > 10


def test_every_figure_is_in_the_page_and_has_a_caption(out, text, read):
    drawn = {path.stem for path in (out / "figures").iterdir()}
    assert (
        {
            "loss",
            "loss_difference",
            "positions",
            "extrapolation",
            "cg_inference-mesa-nano-1m",
            "internals-mesa-nano-1m",
            "internals_course-mesa-nano-1m",
            "training_inside",
        }
        == drawn
        <= set(read.ids)
    )
    assert text.count("<svg ") == text.count("<figcaption>") == text.count('role="img" aria-label="') == len(drawn)
    for path in (out / "figures").iterdir():
        assert path.read_bytes().startswith(b"\x89PNG") and b"Software" not in path.read_bytes()[:2000]


def test_no_place_of_the_template_is_left_unfilled(text):
    assert not re.search(r"\$[a-z]|\bnan\b|\bNone\b|\binf\b", re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL).split("</style>")[1])


def test_the_title_is_escaped(text):
    assert "<h1>Layers &amp; &lt;losses&gt;</h1>" in text


def test_the_summary_is_three_lines(text):
    lines = re.findall(r"<li>(.*?)</li>", text)
    assert len(lines) == 3
    assert lines[0].startswith("Four models at one scale: four cells") and "1.05M tokens, at length 256" in lines[1]
    assert re.search(r"Best: <b>Hawk-Mesa</b>, validation perplexity [\d.]+, [\d.]+% below the Transformer’s", lines[2])


def test_the_least_of_each_column_is_bold(text):
    table = re.search(r"Perplexity by set and length.*?<tbody>(.*?)</tbody>", text, re.DOTALL).group(1)
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row)[1:] for row in re.findall(r"<tr>(.*?)</tr>", table)]
    assert len(rows) == len(MODELS) and len(rows[0]) == 4  # validation, books, mean; books at the longer length
    for column in zip(*rows, strict=True):
        values = [float(re.sub("<.*?>", "", value)) for value in column]
        assert [value.startswith("<b>") for value in column] == [value == min(values) for value in values]


def test_every_row_of_a_table_has_as_many_cells(text):
    for table in re.findall(r"<table>.*?</table>", text, re.DOTALL):
        head = re.findall(r"<tr>(.*?)</tr>", table.split("</thead>")[0])
        columns = head[-1].count("<th")
        assert {row.count("<td") for row in re.findall(r"<tr[^>]*>(.*?)</tr>", table.split("</thead>")[1]) if "<td" in row} == {columns}
        assert sum(int(span) for span in re.findall(r'colspan="(\d+)"', head[0])) in (0, columns)


def test_colours_follow_the_readers_light_or_dark(text):
    drawings = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert (
        not re.search(r"#[0-9a-f]{6}\b(?!\.)", re.sub(r'"#[^"]*"|url\(#[^)]*\)', "", drawings))
        and "var(--c0)" in drawings
        and "var(--ink)" in drawings
    )
    names = set(re.findall(r"var\((--\w+)\)", text))
    light, dark = re.search(r":root \{(.*?)\}", text).group(1), re.search(r"dark\) \{\s*:root \{(.*?)\}", text).group(1)
    assert names <= set(re.findall(r"(--\w+):", light)) and names <= set(re.findall(r"(--\w+):", dark))


def test_what_is_best_is_told_from_what_is_shown():
    assert markup.best_bold([2.004, 2.0, None, 3.0], style.perplexity) == ["<b>2.00</b>", "<b>2.00</b>", "–", "3.00"]
    assert markup.best_bold([2.0], style.perplexity) == ["2.00"]
    assert markup.best_bold([1.0, 2.0], style.perplexity, max) == ["1.00", "<b>2.00</b>"]
    assert markup.best_bold([float("inf"), 2.0, 1.0], style.perplexity) == ["∞", "2.00", "<b>1.00</b>"]


def test_a_models_colour_does_not_depend_on_its_company():
    alone, together = style.Style.for_models(["mesa"]), style.Style.for_models(["gla", "transformer", "other", "mesa"])
    assert alone.colours["mesa"] == together.colours["mesa"]
    many = style.Style.for_models([*style.MODELS, *(f"m{i}" for i in range(6)), "swa64", "swa_1024"])
    looks = {(many.colours[name], str(many.dashes[name])) for name in many.labels if name != "mlstm"}
    assert len(looks) == len(many.labels) - 1  # mLSTM is xLSTM under its other name
    assert many.labels["swa_1024"] == "SWA-1024" and many.labels["m0"] == "m0"
    assert style.Style.for_models(["swa", "swan"]).labels == {"swa": "SWA", "swan": "swan"}


@pytest.mark.parametrize(
    ("value", "shown"),
    [(145_970_000, "146M"), (2_913_000, "2.91M"), (15e9, "15.0B"), (999_700, "1.00M"), (512, "512"), (26_214_400, "26.2M"), (None, "–")],
)
def test_counts(value, shown):
    assert style.count(value) == shown


def test_numbers_as_people_write_them():
    assert style.perplexity(9.974) == "9.97" and style.perplexity(1829.77) == "1,830" and style.perplexity(2.5e7) == "2.5e7"
    assert style.signed(-0.0123) == "−0.012" and style.signed(-0.00001) == "0.000" and style.signed(0.5, 1) == "+0.5"
    assert style.power(5.63e21) == "5.63\u00a0×\u00a010<sup>21</sup>"
    assert style.binary(2048) == "2k" and style.binary(768) == "768"
    assert [style.duration(seconds) for seconds in (4.2, 240, 36_000)] == ["4.2 s", "4 min", "10.0 h"]


def test_dvc_draws_a_line_a_cell_from_the_plots(out):
    """The template that dvc.yaml's plots name knows the columns that the rows have."""
    template = json.loads((Path(__file__).parents[2] / ".dvc/plots/cells.json").read_text())
    assert template["encoding"]["color"]["field"] == "cell" and template["data"]["values"] == "<DVC_METRIC_DATA>"
    for name, columns in {"loss": {"cell", "tokens", "loss"}, "positions": {"cell", "set", "length", "position", "difference"}}.items():
        rows = json.loads((out / f"plots/{name}.json").read_text())
        assert rows and all(columns <= set(row) for row in rows)
