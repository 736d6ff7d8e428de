"""The section on Mesa's heads: its table against the rows, and the order of heads in its maps."""

import pytest

from stages.report import figures
from tests.stages.made_up_study import cell, made_up_internals, write_study


def test_every_bin_is_in_the_table_and_the_range_over_heads_in_the_report(tmp_path, analyzed):
    cells = [cell("transformer"), cell("mesa")]
    write_study(tmp_path, cells, sets={"validation": [16]}, sweep_on="mesa")
    rows, page = analyzed(cells)
    assert [{name: row[name] for name in ("block", "head", "position", "gamma")} for row in rows["internals"]] == [
        {name: row[name] for name in ("block", "head", "position", "gamma")} for row in made_up_internals(cells[1])
    ]
    end = [row["condition"] for row in rows["internals"] if row["position"] == 256]
    assert f"{min(end):.3g} to {max(end):.3g}" in page and "Inside Mesa’s heads" in page and 'id="internals-mesa-nano-1m"' in page


def test_no_internals_no_section(tmp_path, analyzed):
    write_study(tmp_path, [cell("gla")], sets={"validation": [16]})
    rows, page = analyzed([cell("gla")])
    assert rows["internals"] == [] and "Inside Mesa" not in page


def test_a_mean_over_positions_weighs_bins_by_their_tokens():
    rows = [{"first": 1, "position": 1, "gamma": 0.2, "condition": 5.0}, {"first": 2, "position": 4, "gamma": 0.6, "condition": 3.0}]
    assert figures._over_bins(rows, "gamma") == pytest.approx((0.2 + 3 * 0.6) / 4) and figures._over_bins(rows, "condition") == 3.0


def test_maps_keep_their_colours():
    assert figures._fixed('fill: #ff0010; stroke: #24292f; href="#0a0b0c.1"') == 'fill: rgb(255, 0, 16); stroke: #24292f; href="#0a0b0c.1"'
