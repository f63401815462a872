"""From what people know to a peak: Poisson's percentiles against sums in exact arithmetic, units, periods."""

from fractions import Fraction
from math import factorial

import pytest

from millrace.errors import ConfigError
from millrace.size.load.peak_load import peak, per_second, poisson_quantile, tokens


@pytest.mark.parametrize("mean, expected", [(64, 77), (7, 12), (200, 224), (31, 40)])
def test_the_95th_percentile_of_known_cases(mean: float, expected: int) -> None:
    assert poisson_quantile(0.95, mean) == expected == peak(mean).rate


@pytest.mark.parametrize("mean", [0.01, 0.5, 1, 3, 10, 45])
@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.999])
def test_quantiles_are_those_of_exact_sums(share: float, mean: float) -> None:
    """P(N <= k) e^mean = sum of mean^i / i!, in fractions; e^mean by the same sum far beyond."""
    terms = [Fraction(mean) ** i / factorial(i) for i in range(400)]
    whole, total, k = sum(terms), Fraction(0), 0
    while (total := total + terms[k]) < Fraction(share) * whole:
        k += 1
    assert poisson_quantile(share, mean) == k


@pytest.mark.parametrize("window_s, of_64, of_7", [(1, 77, 12), (5, 70, 9), (10, 68.2, 8.4), (30, 66.4, 7.8)])
def test_a_longer_window_smooths_the_peak(window_s: float, of_64: float, of_7: float) -> None:
    assert peak(64, window_s=window_s).rate == pytest.approx(of_64, abs=0.05)
    assert peak(7, window_s=window_s).rate == pytest.approx(of_7, abs=0.05)


def test_blind_replicas_have_peaks_of_their_own() -> None:
    assert peak(64, split=8).rate == 104
    assert "each of 8 replicas" in peak(64, split=8).how


def test_a_burst_comes_before_the_percentile() -> None:
    assert peak(10, burst=6.4).rate == 77 and peak(10, burst=6.4).average == 10


def test_30_million_calls_a_year() -> None:
    """The course's exercise: of 10 minutes with 3 requests a minute each."""
    assert per_second(30e6 * 10 * 3, "year") == pytest.approx(28.54, abs=0.01)


def test_words_are_no_tokens() -> None:
    assert tokens(3500, "tokens") == 3500
    assert tokens(3500, "words") == pytest.approx(4666.7, abs=0.1)
    assert tokens(4000, "characters") == 1000


@pytest.mark.parametrize("wrong", [
    lambda: per_second(1, "fortnight"), lambda: per_second(0, "day"), lambda: tokens(5, "pages"),
    lambda: poisson_quantile(1.0, 5), lambda: poisson_quantile(0.5, 0), lambda: poisson_quantile(0.5, float("nan")),
    lambda: peak(5, burst=0.5), lambda: peak(5, split=0), lambda: peak(5, window_s=0), lambda: peak(float("inf")),
])  # fmt: skip
def test_nonsense_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError):
        wrong()  # type: ignore[operator]
