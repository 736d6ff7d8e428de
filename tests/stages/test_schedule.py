"""The learning rate by hand values."""

import pytest

from stages.schedule import learning_rate

PAPER = {"steps": 28_610, "peak": 3e-3, "start": 1e-6, "warmup": 2000, "floor": 0.1}
SMALL = {"steps": 12, "peak": 1.0, "start": 0.2, "warmup": 4, "floor": 0.1}


def test_warm_up_is_linear_from_its_start_to_the_peak():
    assert [learning_rate(step, **SMALL) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_cosine_by_hand():
    # Quarters of the eight steps after the warm-up: (1 + cos(pi / 4)) / 2 = 0.853553, 1/2, 0.146447.
    assert [learning_rate(step, **SMALL) for step in (6, 8, 10)] == pytest.approx(
        [0.1 + 0.9 * 0.853553, 0.55, 0.1 + 0.9 * 0.146447], rel=1e-5
    )


def test_the_papers_run():
    assert learning_rate(0, **PAPER) == 1e-6
    assert learning_rate(1000, **PAPER) == pytest.approx((1e-6 + 3e-3) / 2)
    assert learning_rate(2000, **PAPER) == 3e-3
    assert learning_rate(2000 + 26_610 // 2, **PAPER) == pytest.approx(3e-3 * 0.55)
    assert learning_rate(28_609, **PAPER) == pytest.approx(3e-4, rel=1e-7)


def test_it_never_rises_after_the_warm_up_and_stays_above_the_floor():
    rates = [learning_rate(step, **PAPER) for step in range(2000, 28_610)]
    assert all(a >= b for a, b in zip(rates, rates[1:], strict=False)) and rates[-1] > 3e-4


def test_no_warm_up_begins_at_the_peak_and_a_short_run_never_reaches_it():
    assert learning_rate(0, **{**SMALL, "warmup": 0}) == 1.0
    assert learning_rate(9, **{**SMALL, "steps": 10, "warmup": 100}) == pytest.approx(0.2 + 0.8 * 0.09)
