"""What is measured over next-token losses: plain numpy over the rows of `nll.parquet`.

A sequence's losses are one array: entry k - 1 is -log P(s_k | s_<k) in nats, the loss of its k-th predicted token. NaN
marks a token that is not scored (a BOS inside a packed row) and counts nowhere; a loss that is infinite counts, so that a
model that fails at a token cannot look better for it. Positions k are counted from 1.

Equations are MesaNet's (von Oswald et al. 2025, appendix L.1).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Losses = Sequence[np.ndarray]

COLUMNS = ("position", "difference", "low", "high")
LEVEL = 0.95  # of the bootstrap's interval
BLOCK = 1 << 24  # float64 numbers held at once by the bootstrap


def perplexity(nlls: Losses) -> float:
    """exp(total loss / scored tokens), every token weighing the same (Eq. 53). NaN where nothing is scored."""
    total, count = (float(np.sum(part)) for part in by_position(nlls))
    with np.errstate(over="ignore"):
        return float(np.exp(np.float64(total / count))) if count else float("nan")


def by_position(nlls: Losses) -> tuple[np.ndarray, np.ndarray]:
    """(nll_sum [L] float64, count [L] int64) over the sequences that have a scored k-th token; L is the longest's length.

    nll_sum / count is the token-position loss (Eq. 55).
    """
    length = max((len(nll) for nll in nlls), default=0)
    nll_sum, count = np.zeros(length), np.zeros(length, np.int64)
    for nll in nlls:
        scored = ~np.isnan(nll)
        nll_sum[: len(nll)] += np.where(scored, nll, 0.0)
        count[: len(nll)] += scored
    return nll_sum, count


def mean_so_far(nll_sum: np.ndarray, count: np.ndarray) -> np.ndarray:
    """[L] mean loss of every sequence's first min(|s|, k) tokens, for every k (Eq. 54). NaN before the first scored token."""
    return _ratio(np.cumsum(nll_sum), np.cumsum(count))


def position_difference(
    nlls: Losses, baseline_nlls: Losses, *, samples: int = 200, seed: int = 0, bins: Sequence[int] | np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Token-position loss less the baseline's (Eq. 56; negative is better), with a 95 % interval.

    Both lists hold the same sequences in the same order. The interval is a percentile bootstrap over sequences: both models
    are resampled together, so what makes a sequence hard for both cancels.
    bins: rising edges e_0 < e_1 < ...; positions e_i <= k < e_i+1 are averaged, every token weighing the same. None: every position.

    Returns the columns position (a bin's mean position), difference, low, high: float64, NaN where nothing is scored.
    ValueError where the lists hold different sequences or the bins do not rise.
    """
    lengths = np.array([len(nll) for nll in nlls], np.int64)
    if lengths.tolist() != [len(nll) for nll in baseline_nlls]:
        raise ValueError(
            "A difference needs the losses of two models over the same sequences; these have other numbers or lengths of sequences."
        )
    if not lengths.any():
        return {name: np.zeros(0) for name in COLUMNS}
    edges = np.arange(1, lengths.max() + 2) if bins is None else np.asarray(bins, np.int64)
    if len(edges) < 2 or edges[0] < 1 or (np.diff(edges) <= 0).any():
        raise ValueError(f"Bins are rising edges of positions from 1 on, found {list(edges[:8])}.")

    draws = np.random.default_rng(seed).multinomial(len(lengths), np.full(len(lengths), 1 / len(lengths)), size=samples).astype(np.float64)
    columns: list[np.ndarray] = []
    step = max(1, BLOCK // (4 * len(lengths)))
    for first in range(0, len(edges) - 1, step):
        block = edges[first : first + step + 1]
        ours_NB, count_NB = _binned(nlls, block)
        theirs_NB, baseline_count_NB = _binned(baseline_nlls, block)
        difference = _ratio(ours_NB.sum(0), count_NB.sum(0)) - _ratio(theirs_NB.sum(0), baseline_count_NB.sum(0))
        drawn_SB = _ratio(draws @ ours_NB, draws @ count_NB) - _ratio(draws @ theirs_NB, draws @ baseline_count_NB)
        low, high = _quantiles(drawn_SB)
        columns.append(np.stack([(block[:-1] + block[1:] - 1) / 2, difference, low, high]))
    return dict(zip(COLUMNS, np.concatenate(columns, axis=1), strict=True))


def _ratio(total: np.ndarray, count: np.ndarray) -> np.ndarray:
    """total / count, NaN where the count is zero."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(count > 0, total / count, np.nan)


def _binned(nlls: Losses, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sum and number of scored losses, each [sequences, bins], of positions from edges[0] up to edges[-1]."""
    start, stop = edges[0] - 1, edges[-1] - 1
    sums, counts = np.zeros((len(nlls), len(edges) - 1)), np.zeros((len(nlls), len(edges) - 1))
    for row, nll in enumerate(nlls):
        part = np.full(stop - start, np.nan)
        part[: max(0, min(len(nll), stop) - start)] = nll[start:stop]
        scored = ~np.isnan(part)
        sums[row] = np.add.reduceat(np.where(scored, part, 0.0), edges[:-1] - edges[0])
        counts[row] = np.add.reduceat(scored.astype(np.float64), edges[:-1] - edges[0])
    return sums, counts


def _quantiles(drawn_SB: np.ndarray) -> np.ndarray:
    """[2, bins]: the interval's ends over the samples that have a value."""
    ends = np.full((2, drawn_SB.shape[1]), np.nan)
    some = ~np.isnan(drawn_SB).all(0)
    ends[:, some] = np.nanquantile(drawn_SB[:, some], [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return ends
