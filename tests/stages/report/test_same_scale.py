"""Models of one size in several depths, compared as at one scale."""

import pytest

from stages.report.parameters import Parameters
from tests.stages.made_up_study import cell, write_study

CELLS = [
    cell("palimpsa_d", "170m", group="grid"),
    cell("palimpsa_m", "170m_30l", group="references"),
    cell("transformer", "170m_20l", group="sweep"),
]
SAME = {"170m_20l": "170m", "170m_30l": "170m"}


def test_a_baseline_of_another_depth_is_the_baseline(tmp_path, analyzed):
    write_study(tmp_path, CELLS, sets={"validation": [16], "books": [32]})
    rows, page = analyzed(CELLS, same_scale=SAME)
    for table in ("differences", "positions"):
        assert {row["cell"] for row in rows[table]} == {"palimpsa_d-170m-1m", "palimpsa_m-170m_30l-1m"}
        assert {row["scale"] for row in rows[table]} == {"170m"}
    assert all(row["low"] <= row["difference"] <= row["high"] for row in rows["differences"])
    assert 'id="positions"' in page and "NLL minus the Transformer’s" in page
    assert (tmp_path / "analysis/figures/positions.png").exists()


def test_a_model_without_cg_is_no_part_of_its_sweep(tmp_path, analyzed):
    write_study(tmp_path, CELLS, sets={"validation": [16]})
    rows, page = analyzed(CELLS, same_scale=SAME)
    assert {row["cell"]: row["group"] for row in rows["models"]}["transformer-170m_20l-1m"] == "references"
    assert "a sweep over CG steps" not in page and rows["cg_sweep"] == []


def test_scales_stay_apart_where_nothing_joins_them(tmp_path, analyzed):
    write_study(tmp_path, CELLS, sets={"validation": [16]})
    rows, _ = analyzed(CELLS)
    assert rows["differences"] == [] and {row["scale"] for row in rows["models"]} == {"170m", "170m_30l", "170m_20l"}


def test_two_cells_of_a_model_are_never_made_one():
    twice = [cell("mesa", "170m"), cell("mesa", "170m_20l")]
    with pytest.raises(ValueError, match="same_scale makes one of 'mesa-170m-1m' and 'mesa-170m_20l-1m'"):
        Parameters(cells=twice, same_scale=SAME)
