"""The section on Mesa's heads: its table against the rows, and the order of heads in its maps."""

import shutil

import numpy as np
import pytest

from stages.report import courses, figures, maps
from tests.stages.made_up_study import cell, made_up_course, made_up_internals, made_up_memory, made_up_nlls, write_evaluation, write_study


def test_every_bin_is_in_the_table_and_the_range_over_heads_in_the_report(tmp_path, analyzed):
    cells = [cell("transformer"), cell("mesa")]
    write_study(tmp_path, cells, sets={"validation": [16]}, sweep_on="mesa")
    rows, page = analyzed(cells)
    assert [{name: row[name] for name in ("block", "head", "position", "gamma")} for row in rows["internals"]] == [
        {name: row[name] for name in ("block", "head", "position", "gamma")} for row in made_up_internals(cells[1])
    ]
    end = [row["condition"] for row in rows["internals"] if row["position"] == 256]
    assert f"{min(end):.3g} to {max(end):.3g}" in page and "Mesa’s heads" in page and 'id="internals-mesa-nano-1m"' in page


def test_no_internals_no_section(tmp_path, analyzed):
    write_study(tmp_path, [cell("gla")], sets={"validation": [16]})
    rows, page = analyzed([cell("gla")])
    assert rows["internals"] == [] and "Inside the layers" not in page


def test_a_mean_over_positions_weighs_bins_by_their_tokens():
    rows = [{"first": 1, "position": 1, "gamma": 0.2, "condition": 5.0}, {"first": 2, "position": 4, "gamma": 0.6, "condition": 3.0}]
    assert maps.over_bins(rows, "gamma") == pytest.approx((0.2 + 3 * 0.6) / 4) and maps.over_bins(rows, "condition") == 3.0


def test_maps_keep_their_colours():
    assert figures._fixed('fill: #ff0010; stroke: #24292f; href="#0a0b0c.1"') == 'fill: rgb(255, 0, 16); stroke: #24292f; href="#0a0b0c.1"'


def test_palimpsas_memory_is_in_a_table_a_map_and_the_page(tmp_path, analyzed):
    cells = [cell("palimpsa_d"), cell("palimpsa_d-plain")]
    write_study(tmp_path, cells, sets={"validation": [16]})
    rows, page = analyzed(cells, baseline=None)
    assert [row["log_window"] for row in rows["memory"]] == [row["log_window"] for one in cells for row in made_up_memory(one)]
    assert 'id="memory-palimpsa_d-nano-1m"' in page and "importance ratio r" in page and "Palimpsa-D w/o Meta" in page
    assert (tmp_path / "analysis/figures/memory-palimpsa_d-plain-nano-1m.png").exists()
    plain = page[page.index("<td") :].rsplit("palimpsa_d-plain-nano-1m</td>", 1)[1][:200]
    assert plain.count("–") == 3  # a window, and no importance


def test_what_heads_do_in_training_is_in_a_table_a_figure_and_the_page(tmp_path, analyzed):
    cells = [cell("palimpsa_d"), cell("palimpsa_d-plain"), cell("mesa")]
    write_study(tmp_path, cells, sets={"validation": [16]}, sweep_on="mesa")
    rows, page = analyzed(cells, baseline=None)
    for name, one, made in (("memory", cells[0], made_up_memory), ("internals", cells[2], made_up_internals)):
        own = [row for row in rows[f"{name}_course"] if row["cell"] == one["cell"]]
        assert own == [
            {"cell": one["cell"], "model": one["model"], "scale": "nano", "budget": "1m"} | row for row in made_up_course(one, made(one))
        ]
        assert f'id="{name}_course-{one["cell"]}"' in page and (tmp_path / f"analysis/figures/{name}_course-{one['cell']}.png").exists()
    first = [row["ratio"] for row in rows["memory_course"] if row["step"] == 0 and row["ratio"] is not None]
    assert f"{min(first):.3g} to {max(first):.3g}" in page and "Palimpsa’s memory while it is trained" in page


def test_a_course_without_a_second_look_is_not_drawn(tmp_path, analyzed):
    one = cell("palimpsa_d")
    write_study(tmp_path, [one], sets={"validation": [16]})
    folder = tmp_path / f"evaluations/{one['cell']}"
    looks = [row for row in made_up_course(one, made_up_memory(one)) if row["step"] == 0]
    shutil.rmtree(folder)
    write_evaluation(folder, one, {("validation", 16, ""): made_up_nlls(one, "validation", 16, "")}, memory_course=looks)
    rows, page = analyzed([one], baseline=None)
    assert len(rows["memory_course"]) == len(looks) and "while it is trained" not in page


def test_a_course_as_arrays():
    rows = [{"tokens": tokens, "block": 0, "head": head, "ratio": None if head else float(tokens)} for tokens in (0, 8) for head in (0, 1)]
    tokens, heads, values = courses.course(rows, "ratio")
    assert tokens.tolist() == [0, 8] and heads == [(0, 0), (0, 1)] and values[:, 0].tolist() == [0.0, 8.0] and np.isnan(values[:, 1]).all()


def test_heads_are_ordered_in_each_block_and_short_blocks_are_padded():
    rows = [
        {"block": block, "head": head, "first": 1, "position": 4, "log_window": window, "ratio": 10.0 * window}
        for block, windows in ((0, [3.0, 1.0, 2.0]), (2, [5.0]))
        for head, window in enumerate(windows)
    ]
    blocks, found = maps.head_maps(rows, ["log_window", "ratio"], "log_window")
    assert blocks == [0, 2] and found["ratio"][0].tolist() == [10.0, 20.0, 30.0]
    assert found["log_window"][1, 0] == 5.0 and np.isnan(found["log_window"][1, 1:]).all()


def test_what_training_records_is_kept_by_name(tmp_path, analyzed):
    cells = [cell("mesa"), cell("palimpsa_d"), cell("gla")]
    write_study(tmp_path, cells, sets={"validation": [16]})
    rows, page = analyzed(cells, baseline=None, points=5, smoothing=1e-9)
    by_name = {(row["model"], row["name"]) for row in rows["training_inside"]}
    assert by_name == {
        ("mesa", "cg_steps"),
        ("mesa", "gamma"),
        ("mesa", "cg_residual"),
        ("palimpsa_d", "log_window"),
        ("palimpsa_d", "importance_ratio"),
    }
    ratio = [row for row in rows["training_inside"] if row["name"] == "importance_ratio"]
    assert len(ratio) == 5 and [row["value"] for row in ratio] == pytest.approx([0.5 + row["step"] ** 0.7 for row in ratio])
    assert 'id="training_inside"' in page and "CG steps taken" in page
