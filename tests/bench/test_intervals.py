"""Intervals against exact binomial sums, tables of Student's t, and their coverage in simulation."""

from fractions import Fraction
from math import comb

import numpy as np
import pytest

from millrace.bench.analysis.intervals import (
    PERCENTILES,
    mean_interval,
    quantile_at_least,
    quantile_interval,
    student_t,
    summary,
)


def exact(n: int, share: Fraction) -> tuple[int, int] | None:
    """The order statistics, counted from 1, by sums of fractions."""
    below = [comb(n, k) * share**k * (1 - share) ** (n - k) for k in range(n + 1)]
    side = Fraction(1, 40)
    lows = [low for low in range(1, n + 1) if sum(below[:low]) <= side]
    highs = [high for high in range(1, n + 1) if sum(below[high:]) <= side]
    return (max(lows), min(highs)) if lows and highs else None


@pytest.mark.parametrize("n", [1, 2, 5, 6, 7, 30, 59, 100])
@pytest.mark.parametrize("percent", [5, 25, 50, 90])
def test_ranks_are_the_exact_ones(n: int, percent: int) -> None:
    ranks = quantile_interval(np.arange(1.0, n + 1), percent / 100)
    assert ranks == exact(n, Fraction(percent, 100))


@pytest.mark.parametrize("percent, fewest", [(50, 6), (25, 13), (90, 36), (95, 72), (99, 368), (1, 368)])
def test_it_refuses_where_the_sample_cannot_bear_it(percent: int, fewest: int) -> None:
    """The fewest values of which one lies beyond the quantile with 97.5 %: n with share^n <= 0.025."""
    share = Fraction(max(percent, 100 - percent), 100)
    assert share**fewest <= Fraction(1, 40) < share ** (fewest - 1)
    assert quantile_interval(np.arange(1.0, fewest), percent / 100) is None
    assert quantile_interval(np.arange(1.0, fewest + 1), percent / 100) is not None


@pytest.mark.parametrize("n", [1, 2, 3, 40, 99])
def test_what_a_quantile_surely_reaches(n: int) -> None:
    """The largest rank of which it is below with 2.5 % at most; the smallest value where none is."""
    below = [sum(comb(n, k) * 0.99**k * 0.01 ** (n - k) for k in range(low)) for low in range(1, n + 1)]
    rank = max([low for low, p in enumerate(below, 1) if p <= 0.025], default=1)
    assert quantile_at_least([float(i) for i in range(n, 0, -1)], 0.99) == rank
    assert quantile_at_least([], 0.99) == 0


def test_intervals_hold_what_they_promise() -> None:
    """Of 1000 samples of an exponential distribution 95 % hold the truth; order statistics never fewer."""
    rng, n, rounds = np.random.default_rng(1), 400, 1000
    drawn = np.sort(rng.exponential(1.0, (rounds, n)), axis=1)
    for share in (0.5, 0.9, 0.99):
        truth = -np.log(1 - share)
        held = sum(low <= truth <= high for low, high in (quantile_interval(x, share) or (0, 0) for x in drawn))
        assert held >= 0.95 * rounds - 2 * (0.05 * 0.95 * rounds) ** 0.5
    held = sum(low <= 1 <= high for low, high in (mean_interval(x) or (0, 0) for x in drawn))
    assert held / rounds == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize("freedom, t", [(6, 2.4469), (9, 2.2622), (29, 2.0452), (99, 1.9842), (10**6, 1.95997)])
def test_student_t_is_that_of_the_tables(freedom: int, t: float) -> None:
    assert student_t(freedom) == pytest.approx(t, rel=1e-3)


@pytest.mark.parametrize("freedom, t", [(9, 3.2498), (29, 2.7564), (99, 2.6264), (10**6, 2.57583)])
def test_so_it_is_for_99_percent(freedom: int, t: float) -> None:
    assert student_t(freedom, 2.5758293) == pytest.approx(t, rel=1e-3)


def test_a_summary_is_numpys() -> None:
    x = np.random.default_rng(2).gamma(2, 50, 1237)
    found = summary(x.tolist())
    assert found is not None and found.n == 1237
    assert (found.mean, found.std, found.min, found.max) == pytest.approx((x.mean(), x.std(), x.min(), x.max()))
    for p in PERCENTILES:
        assert found.percentiles[p] == pytest.approx(np.percentile(x, p))
        low, high = found.intervals[f"p{p}"] or (np.inf, -np.inf)
        assert low <= found.percentiles[p] <= high and low in x and high in x
    assert summary([]) is None
    one = summary([3.0])
    assert one is not None and one.std == 0 and set(one.intervals.values()) == {None}
