"""Measures over losses, by values worked out by hand."""

import math

import numpy as np
import pytest

from stages.measures import by_position, mean_so_far, perplexity, position_difference

NAN = float("nan")
SHORT, LONG = np.array([1.0, 2.0], np.float32), np.array([3.0, NAN, 5.0, 6.0], np.float32)


def test_perplexity_weighs_every_scored_token_the_same():
    assert perplexity([SHORT, LONG]) == pytest.approx(math.exp((1 + 2 + 3 + 5 + 6) / 5))


def test_perplexity_of_nothing_is_unknown_and_of_a_failure_infinite():
    assert math.isnan(perplexity([])) and math.isnan(perplexity([np.array([NAN])]))
    assert perplexity([SHORT, np.array([np.inf])]) == math.inf


def test_sums_and_counts_by_position():
    nll_sum, count = by_position([SHORT, LONG])
    assert nll_sum.tolist() == [4, 2, 5, 6] and count.tolist() == [2, 1, 1, 1]


def test_mean_so_far_is_a_ratio_of_sums():
    assert mean_so_far(*by_position([SHORT, LONG])).tolist() == pytest.approx([4 / 2, 6 / 3, 11 / 4, 17 / 5])


def test_mean_so_far_ends_at_the_perplexity():
    random = np.random.default_rng(0)
    nlls = [random.exponential(size=n) for n in (3, 9, 6)]
    assert math.exp(mean_so_far(*by_position(nlls))[-1]) == pytest.approx(perplexity(nlls))


def test_mean_so_far_is_unknown_before_the_first_scored_token():
    mean = mean_so_far(*by_position([np.array([NAN, 2.0])]))
    assert math.isnan(mean[0]) and mean[1] == 2


def test_difference_by_position_over_the_sequences_long_enough():
    table = position_difference([SHORT, LONG], [SHORT - 0.5, LONG + 1])
    assert table["position"].tolist() == [1, 2, 3, 4]
    assert table["difference"].tolist() == pytest.approx([(0.5 - 1) / 2, 0.5, -1, -1])


def test_difference_in_bins_weighs_tokens():
    table = position_difference([SHORT, LONG], [SHORT - 0.5, LONG + 1], bins=[1, 3, 5])
    assert table["position"].tolist() == [1.5, 3.5]
    assert table["difference"].tolist() == pytest.approx([(0.5 + 0.5 - 1) / 3, -1])


def test_a_constant_difference_has_an_interval_of_no_width():
    random = np.random.default_rng(1)
    baseline = [random.exponential(size=8) for _ in range(20)]
    table = position_difference([nll - 0.25 for nll in baseline], baseline)
    for column in ("difference", "low", "high"):
        assert table[column] == pytest.approx(np.full(8, -0.25))


def test_the_interval_is_that_of_a_normal_mean_and_comes_again_with_its_seed():
    random = np.random.default_rng(2)
    baseline = [np.zeros(1) for _ in range(400)]
    nlls = [random.standard_normal(1) for _ in range(400)]
    table = position_difference(nlls, baseline, samples=2000, seed=3)
    half = 1.96 * np.std(np.concatenate(nlls)) / 20
    assert table["low"][0] == pytest.approx(np.mean(nlls) - half, abs=half / 10)
    assert table["high"][0] == pytest.approx(np.mean(nlls) + half, abs=half / 10)
    again = position_difference(nlls, baseline, samples=2000, seed=3)
    assert all(np.array_equal(table[name], again[name]) for name in table)


def test_blocks_of_positions_change_nothing(monkeypatch):
    random = np.random.default_rng(4)
    nlls, baseline = ([random.exponential(size=n) for n in (5, 7, 11)] for _ in range(2))
    whole = position_difference(nlls, baseline, samples=20)
    monkeypatch.setattr("stages.measures.BLOCK", 24)
    parts = position_difference(nlls, baseline, samples=20)
    for name in whole:
        np.testing.assert_allclose(parts[name], whole[name], rtol=1e-12)


def test_a_position_nobody_has_is_unknown():
    table = position_difference([SHORT], [SHORT], bins=[1, 3, 9])
    assert table["difference"][0] == 0 and all(math.isnan(table[name][1]) for name in ("difference", "low", "high"))


@pytest.mark.parametrize("bins", [[1], [0, 4], [3, 3, 5]])
def test_bins_that_do_not_rise_are_refused(bins):
    with pytest.raises(ValueError, match="rising"):
        position_difference([SHORT], [SHORT], bins=bins)


def test_other_sequences_are_refused():
    with pytest.raises(ValueError, match="same sequences"):
        position_difference([SHORT], [LONG])


def test_no_sequences_no_rows():
    assert all(len(column) == 0 for column in position_difference([], []).values())
