"""How figures look: one colour and dash a model everywhere, names that cover nothing, frames that references do not stretch."""

from itertools import combinations

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from stages.report import figures, style, tables
from stages.report.parameters import Parameters
from stages.report.study import Study
from tests.stages.made_up_study import LENGTH, cell, inputs_of, spec_of, write_study

MODELS = ("transformer", "mamba2", "gla", "mesa", "hawk_mesa")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """(study, name -> figure) of five models on two budgets and windows beside them."""
    root = tmp_path_factory.mktemp("looks")
    cells = [cell(model, budget=budget) for budget in ("1m", "2m") for model in MODELS]
    cells += [cell("swa-4", budget=budget, group="references") for budget in ("1m", "2m")]
    write_study(root, cells, sets={"validation": [LENGTH], "books": [LENGTH, 2 * LENGTH]})
    spec = spec_of(cells, bootstrap=10, points=40)
    study = Study.load(Parameters.model_validate(spec.parameters), spec, inputs_of(root, spec))
    rows = {name: make(study).to_pylist() for name, make in tables.TABLES.items()}
    look, found = style.Style.of(study), {}
    with matplotlib.rc_context(figures.LOOK):
        for make in (figures.loss, figures.loss_difference, figures.positions, figures.extrapolation, figures.training_inside):
            found |= {name: figure for name, figure, _ in make(study, rows, look)}
    return study, rows, found


def boxes(figure):
    FigureCanvasAgg(figure)
    figure.draw_without_rendering()
    return [Text.get_window_extent(text) for ax in figure.axes for text in ax.texts if text.get_text()]


def test_a_model_has_one_colour_and_one_dash_in_all_figures(drawn):
    looks: dict[str, set] = {}
    for figure in drawn[2].values():
        for ax in figure.axes:
            for line, label in zip(*ax.get_legend_handles_labels(), strict=True):
                looks.setdefault(label, set()).add((matplotlib.colors.to_hex(line.get_color()), str(line.get_linestyle())))
    assert len(drawn[2]) >= 8 and len(looks) == len(MODELS) + 1
    assert all(len(found) == 1 for found in looks.values())
    assert len(set.union(*looks.values())) == len(looks)


def test_every_panel_has_lines_and_named_axes(drawn):
    for figure in drawn[2].values():
        for ax in figure.axes:
            assert ax.lines and ax.get_xlabel()
        assert any(ax.get_ylabel() or ax.get_title("left") for ax in figure.axes)


def test_references_do_not_stretch_the_frame_of_differences(drawn):
    study, rows, _ = drawn
    look, place = style.Style.of(study), study.places[0]
    own = [row for row in rows["positions"] if (row["scale"], row["budget"]) == place and row["set"] == "validation"]
    own = [row for row in own if row["length"] == LENGTH]
    far = [row | {"difference": row["difference"] + 9} if row["model"] == "swa-4" else row for row in own]
    frames = []
    for those in (own, far):
        figure, (ax,) = figures._panels(["validation"])
        figures._by_position(ax, those, figures._lines(study, place), "Transformer", study, look)
        frames.append(ax.get_ylim())
    assert frames[0] == frames[1]


@pytest.mark.parametrize(  # close for protan or deutan eyes
    "pair", [("mesa", "xlstm"), ("gated_deltanet", "hawk_mesa"), ("transformer", "hawk"), ("mamba2", "xlstm"), ("gla", "palimpsa_m-plain")]
)
def test_models_of_like_colour_differ_in_their_dashes(pair):
    look = style.Style.for_models(pair)
    assert look.dashes[pair[0]] != look.dashes[pair[1]]


def test_windows_differ_in_their_dashes():
    look = style.Style.for_models([f"swa-{4**i}" for i in range(1, 6)])
    assert len(set(look.dashes.values())) == 5 == len(set(look.colours.values()))


def test_a_legend_of_long_names_stays_in_the_figure():
    with matplotlib.rc_context(figures.LOOK):
        names = [f"Palimpsa-M w/o Meta {i}" for i in range(20)]
        figure, axes = figures._panels(["a", "b", "c"], keys=names)
        for name in names:
            axes[0].plot([0, 1], [0, 1], label=name)
        figures._finish(figure, axes, [])
        FigureCanvasAgg(figure)
        figure.draw_without_rendering()
        legend = figure.legends[0].get_window_extent()
        assert legend.x1 <= figure.bbox.x1 and legend.y0 >= max(ax.get_tightbbox().y1 for ax in figure.axes)


def test_names_at_lines_ends_do_not_overlap_nor_leave_the_panel():
    with matplotlib.rc_context(figures.LOOK):
        figure, (ax,) = figures._panels(["a"])
        ax.set_ylim(0, 1)
        figures._name_ends(ax, [(1.0, f"model {i}", "#000000") for i in range(16)])
        found = sorted(boxes(figure), key=lambda box: box.y0)
        assert all(low.y0 + 8 < high.y0 for low, high in zip(found, found[1:], strict=False))
        middle = (found[-1].y0 + found[-1].y1) / 2
        assert len(found) == 16 and middle <= ax.get_window_extent().y1 + 2


def test_names_of_points_cover_neither_each_other_nor_points():
    with matplotlib.rc_context(figures.LOOK):
        figure, (ax,) = figures._panels(["a"], single=2.75)
        ax.set_xlim(-5, 40)
        ax.set_ylim(-0.01, 0.2)
        points = [(float(i), 0.18 / (1 + i)) for i in (0, 0, 1, 3, 4, 4, 5, 6, 7, 8, 10, 13, 14, 19, 30)]
        figures._name_spots(ax, [(x, y, f"eps-{i}e-2", "#000000") for i, (x, y) in enumerate(points)])
        found = boxes(figure)
        assert len(found) >= 12 and not any(a.shrunk(0.9, 0.9).overlaps(b.shrunk(0.9, 0.9)) for a, b in combinations(found, 2))
        at = ax.transData.transform(points)
        assert not any(box.shrunk(0.9, 0.9).contains(*point) for box in found for point in at)
