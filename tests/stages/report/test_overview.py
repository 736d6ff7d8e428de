"""Figures of several scales and budgets at once."""

from tests.stages.made_up_study import cell, write_study


def test_differences_by_position_stand_side_by_side(tmp_path, analyzed):
    cells = [cell(model, scale) for scale in ("small", "large") for model in ("transformer", "gla")]
    write_study(tmp_path, cells, sets={"validation": [64], "books": [64]})
    _, page = analyzed(cells)
    ids = [page.find(f'id="positions{end}"') for end in ("", "-small-1m", "-large-1m")]
    assert -1 not in ids and ids == sorted(ids)
    assert "NLL by position on validation minus" in page and "NLL by position at small · 1m tokens minus" in page


def test_of_what_training_records_the_costliest_cells_stand_first(tmp_path, analyzed):
    cells = [cell("palimpsa_d", "small"), cell("palimpsa_d", "large", flops=1e20), cell("palimpsa_d", "middle")]
    write_study(tmp_path, cells, sets={"validation": [16]})
    _, page = analyzed(cells, baseline=None)
    first, folded, others = (
        page.find(text)
        for text in ('id="training_inside-large-1m"', "In training: other scales and budgets", 'id="training_inside-small-1m"')
    )
    assert -1 < first < folded < others
