"""The statistics: coverage of the intervals on simulated samples, and their exact ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerneldyno.measure.stats import median_interval
from kerneldyno.measure.stats import ratio_interval


def test_ranks_of_a_published_table() -> None:
    # Conover, table of the binomial distribution: for 10 samples the 2nd and 9th order statistics give 97.9%
    assert median_interval(range(1, 11)) == (5.5, 2.0, 9.0)
    # for 20 samples the 6th and 15th give 95.9%
    assert median_interval(range(1, 21)) == (10.5, 6.0, 15.0)


def test_few_samples_give_the_extremes() -> None:
    assert median_interval([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    assert median_interval([7.0]) == (7.0, 7.0, 7.0)


def test_no_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="no samples"):
        median_interval([])


@pytest.mark.parametrize("count", [8, 25, 60])
def test_median_interval_covers(count: int) -> None:
    rng = np.random.default_rng(count)
    held = 0
    for _ in range(2000):
        _, low, high = median_interval(rng.lognormal(size=count))
        held += low <= 1.0 <= high  # the median of a standard log-normal is 1
    assert held / 2000 >= 0.94  # 0.95 less three standard errors of 2000 trials (0.005 each)


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=50))
def test_the_interval_holds_the_median(samples: list[float]) -> None:
    median, low, high = median_interval(samples)
    assert low <= median <= high
    assert {low, high} <= set(samples)


def test_ratio_is_paired_by_round() -> None:
    # both slow down together from round to round: the ratio stays 2 exactly, however much the rounds spread
    drift = np.linspace(1.0, 3.0, 15)
    ratio, low, high = ratio_interval(100 * drift, 50 * drift)
    assert (ratio, low, high) == pytest.approx((2.0, 2.0, 2.0))


def test_ratio_interval_covers_and_repeats() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for trial in range(300):
        reference = 120 * rng.lognormal(sigma=0.02, size=15)
        entry = 100 * rng.lognormal(sigma=0.02, size=15)
        ratio, low, high = ratio_interval(reference, entry, seed=trial)
        assert (ratio, low, high) == ratio_interval(reference, entry, seed=trial)
        held += low <= 1.2 <= high
    assert held / 300 >= 0.91  # 0.95 less three standard errors of 300 trials (0.0126 each)
