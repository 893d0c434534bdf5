"""The statistics of a result: medians, their intervals, and ratios from interleaved rounds."""

from collections.abc import Sequence

import numpy as np
from scipy.stats import binom


CONFIDENCE = 0.95
BOOTSTRAP_RESAMPLES = 4000
"""Enough for the 2.5% and 97.5% points to repeat within a few percent of the interval's width. Source: Efron and
Tibshirani, An Introduction to the Bootstrap (1993), section 13.3: at least 1000 for percentile intervals."""


def median_interval(samples: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float, float]:
    """Return the median of samples and an interval that holds the true median, free of any assumed distribution.

    The interval lies between two order statistics chosen by the binomial distribution. With fewer than 6 samples no
    pair of them reaches 95%; the smallest and largest are returned then.

    Args:
        samples: At least one value, in any order.
        confidence: Coverage wanted.

    Returns:
        (median, low, high).

    Source: Conover, Practical Nonparametric Statistics (3rd ed.), section 3.2, confidence interval for a quantile.
    """
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    count = len(ordered)
    if count == 0:
        raise ValueError("no samples")
    rank = int(binom.ppf((1 - confidence) / 2, count, 0.5))
    low = ordered[max(rank - 1, 0)]
    high = ordered[min(count - rank, count - 1)]
    return float(np.median(ordered)), float(low), float(high)


def ratio_interval(reference_us: Sequence[float], entry_us: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Return how many times faster an entry is than the reference, with a 95% interval, from paired rounds.

    Both ran in every round, so what a round did to one (a clock, a temperature) it did to the other: the ratio is
    taken in each round and the rounds are resampled.

    Args:
        reference_us: Round medians of the reference.
        entry_us: Round medians of the entry, in the same order.
        seed: Seed of the resampling, so that the same rounds give the same interval.

    Returns:
        (ratio, low, high); above 1 the entry is faster.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13 (percentile interval).
    """
    ratios = np.asarray(reference_us, dtype=np.float64) / np.asarray(entry_us, dtype=np.float64)
    rng = np.random.default_rng(seed)
    resampled = np.median(rng.choice(ratios, size=(BOOTSTRAP_RESAMPLES, len(ratios))), axis=1)
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(resampled, [tail, 100 - tail])
    return float(np.median(ratios)), float(low), float(high)
