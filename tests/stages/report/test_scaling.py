"""Fits over scale on losses that obey a power law, what is refused, and the choice of learning rates."""

import numpy as np
import pytest

from tests.stages.made_up_study import cell, write_evaluation, write_history

SIZES = {"s": 1e6, "m": 4e6, "l": 1.6e7}
TOKENS = {"1b": 1e9, "4b": 4e9, "9b": 9e9}


def write(root, cells, loss, *, noise=0.0, sequences=12):
    """Cells whose sequences' mean loss is loss(cell); noise: of a sequence, the same for every cell, as a factor."""
    factors = 1 + noise * np.random.default_rng(0).normal(size=sequences)
    factors /= factors.mean()
    for one in cells:
        write_history(root / f"history/{one['cell']}.parquet", one, losses=np.ones(2))
        nlls = [np.full(8, loss(one) * factor, np.float32) for factor in factors]
        write_evaluation(root / f"evaluations/{one['cell']}", one, {("validation", 8, ""): nlls})


def grid(scales, budgets, model="gla"):
    return [cell(model, s, b, parameters=int(SIZES[s]), tokens=int(TOKENS[b])) for s in scales for b in budgets]


def law(one, own=0.0):
    return 50.0 * one["parameters"] ** -0.08 * one["tokens"] ** -0.06 * (1 + own)


def test_a_power_law_is_found_again(tmp_path, analyzed):
    cells = grid("sml", ("1b", "4b"))
    write(tmp_path, cells, law, noise=0.1)
    rows, page = analyzed(cells)
    found = {(row["over"], row["scale"], row["budget"]): row for row in rows["fits"]}
    assert len(found) == 2 + 3 + 1
    one = found["parameters", None, "1b"]
    assert (one["points"], one["fewest"], one["fitted"]) == (3, 3, True)
    assert one["exponent_parameters"] == pytest.approx(0.08, abs=1e-5) and one["residual"] < 1e-6 and one["exponent_tokens"] is None
    assert one["coefficient"] == pytest.approx(50.0 * 1e9**-0.06, rel=1e-4)
    both = found["both", None, None]
    assert (both["exponent_parameters"], both["exponent_tokens"]) == (pytest.approx(0.08, abs=1e-5), pytest.approx(0.06, abs=1e-5))
    assert both["coefficient"] == pytest.approx(50.0, rel=1e-3) and both["points"] == 6
    assert "Loss over scale" in page and 'id="scaling"' in page and "0.080" in page


def test_two_points_are_refused_and_counted(tmp_path, analyzed):
    cells = grid("sml", ("1b", "4b"))
    write(tmp_path, cells, law)
    rows, page = analyzed(cells)
    (small,) = [row for row in rows["fits"] if row["over"] == "tokens" and row["scale"] == "s"]
    assert (small["points"], small["fewest"], small["fitted"]) == (2, 3, False)
    assert all(small[name] is None for name in ("exponent_parameters", "exponent_tokens", "low_tokens", "coefficient", "residual"))
    assert "2 of 3 wanted" in page


def test_both_want_five_points(tmp_path, analyzed):
    cells = grid("sm", ("1b", "4b"))
    write(tmp_path, cells, law)
    rows, _ = analyzed(cells)
    assert {(row["over"], row["points"], row["fitted"]) for row in rows["fits"]} == {
        ("parameters", 2, False),
        ("tokens", 2, False),
        ("both", 4, False),
    }


def test_intervals_hold_what_the_sequences_leave_open(tmp_path, analyzed):
    """A sequence that is harder for the larger models alone bends the exponent when it is drawn more often; noise that all share does not."""
    cells = grid("sml", ("1b",))
    write(tmp_path, cells, law, noise=0.2)
    shared = analyzed(cells, bootstrap=200)[0]["fits"][0]
    assert shared["low_parameters"] == pytest.approx(shared["high_parameters"], abs=1e-6)
    large = cells[-1]
    nlls = [np.full(8, law(large) * factor, np.float32) for factor in np.linspace(0.8, 1.2, 12)]
    write_evaluation(tmp_path / f"evaluations/{large['cell']}", large, {("validation", 8, ""): nlls})
    own = analyzed(cells, bootstrap=200)[0]["fits"][0]
    assert (
        own["low_parameters"] < own["exponent_parameters"] < own["high_parameters"]
        and own["high_parameters"] - own["low_parameters"] > 0.01
    )


def test_other_sequences_have_no_interval(tmp_path, analyzed):
    cells = grid("sml", ("1b",))
    write(tmp_path, cells, law)
    write_evaluation(tmp_path / f"evaluations/{cells[0]['cell']}", cells[0], {("validation", 8, ""): [np.ones(8, np.float32)]})
    row = analyzed(cells)[0]["fits"][0]
    assert row["fitted"] and row["low_parameters"] is None and row["high_parameters"] is None


def test_one_scale_and_budget_is_no_line(tmp_path, analyzed):
    cells = grid("s", ("1b",)) + grid("s", ("1b",), "mesa")
    write(tmp_path, cells, law)
    rows, page = analyzed(cells)
    assert rows["fits"] == [] and "Loss over scale" not in page and 'id="scaling"' not in page


def swept(rates, losses, **more):
    cells = [cell(f"gla-{i}", entry=more.get("entry", "gla"), learning_rate=rate) for i, rate in enumerate(rates)]
    return cells, {one["cell"]: loss for one, loss in zip(cells, losses, strict=True)}


def test_the_rate_with_the_least_validation_loss_is_selected(tmp_path, analyzed):
    cells, losses = swept([1e-3, 3e-3, 2e-3], [3.0, 3.2, 2.9])
    write(tmp_path, cells, lambda one: losses[one["cell"]])
    rows, page = analyzed(cells)
    assert [(row["learning_rate"], row["selected"], row["edge"]) for row in rows["learning_rates"]] == [
        (1e-3, False, False), (2e-3, True, False), (3e-3, False, False),
    ]  # fmt: skip
    assert (
        {row["alternatives"] for row in rows["learning_rates"]} == {3} and "Learning rates" in page and "at the edge of those" not in page
    )


def test_a_selected_rate_at_the_edge_is_said(tmp_path, analyzed):
    cells, losses = swept([1e-3, 3e-3, 2e-3], [3.0, 2.8, 2.9])
    write(tmp_path, cells, lambda one: losses[one["cell"]])
    rows, page = analyzed(cells)
    assert [row["edge"] for row in rows["learning_rates"]] == [False, False, True] and "at the edge of those tried" in page


def test_cells_that_differ_in_more_are_no_sweep(tmp_path, analyzed):
    cells = [
        cell("a", entry="x", learning_rate=1e-3),
        cell("b", entry="y", learning_rate=2e-3),
        cell("c", learning_rate=3e-3),
        cell("d", "m", entry="x", learning_rate=2e-3),
    ]
    write(tmp_path, cells, lambda one: 3.0)
    rows, page = analyzed(cells)
    assert rows["learning_rates"] == [] and "Learning rates" not in page


def test_differences_to_the_baseline_with_intervals(tmp_path, analyzed):
    cells = [cell("transformer"), cell("mesa")]
    for one, shift in zip(cells, (0.0, -0.25), strict=True):
        write_history(tmp_path / f"history/{one['cell']}.parquet", one, losses=np.ones(2))
        nlls = [np.full(size, 2.0 + shift * size / 4, np.float32) for size in (4, 8)]
        write_evaluation(tmp_path / f"evaluations/{one['cell']}", one, {("validation", 8, ""): nlls})
    rows, page = analyzed(cells, bootstrap=200)
    (row,) = rows["differences"]
    assert (row["cell"], row["baseline"], row["set"], row["length"], row["sequences"]) == (
        "mesa-nano-1m",
        "transformer-nano-1m",
        "validation",
        8,
        2,
    )
    assert row["difference"] == pytest.approx(-(0.25 * 4 + 0.5 * 8) / 12) and (row["low"], row["high"]) == (
        pytest.approx(-0.5),
        pytest.approx(-0.25),
    )
    assert "Against the baseline" in page and "−0.4167" in page
