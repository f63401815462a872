"""Unit conversions of loads and lengths, and the Poisson peak of a mean rate."""

import math
from dataclasses import dataclass

from millrace.errors import ConfigError
from millrace.report.format_numbers import format_4_digits, format_exact

WORDS_A_TOKEN = 0.75  # of English prose, by most tokenizers
CHARACTERS_A_TOKEN = 4.0
DAY_S, YEAR_S = 86_400.0, 365 * 86_400.0
PERIODS = {
    "second": 1.0, "minute": 60.0, "hour": 3600.0, "day": DAY_S, "week": 7 * DAY_S, "month": YEAR_S / 12,
    "year": YEAR_S,
}  # fmt: skip
_MAX_MEAN = 1e9


def per_second(n: float, period: str) -> float:
    """Convert n requests per period ("second" to "year") to requests/s. raises ConfigError"""
    if period not in PERIODS:
        raise ConfigError(f"requests per {period}", f"per {', '.join(PERIODS)}", "say it per one of them")
    return _positive(n, f"requests per {period}") / PERIODS[period]


def tokens(n: float, unit: str, words_a_token: float = WORDS_A_TOKEN) -> float:
    """Convert n "tokens", "words" or "characters" of English prose to tokens. raises ConfigError"""
    characters = CHARACTERS_A_TOKEN * words_a_token / WORDS_A_TOKEN
    shares = {"tokens": 1.0, "words": 1 / words_a_token, "characters": 1 / characters}
    if unit not in shares:
        raise ConfigError(f"lengths in {unit}", f"in {', '.join(shares)}", "say it in one of them")
    return _positive(n, unit) * shares[unit]


def poisson_quantile(share: float, mean: float) -> int:
    """Return the `share` quantile of a Poisson distribution: the least count with at least that probability.

    Sums probabilities, computed as logarithms, from where they are representable. raises ConfigError
    """
    if not 0 < share < 1:
        raise ConfigError(f"a percentile of {share:g}", "a share between 0 and 1, such as 0.95", "correct it")
    if not 0 < mean <= _MAX_MEAN:
        raise ConfigError(
            f"a mean of {format_exact(mean)} arrivals", f"above 0, and at most {format_exact(_MAX_MEAN)}", "correct it"
        )
    spread = 40 * math.sqrt(mean) + 40  # beyond this, probabilities underflow
    count = max(0, int(mean - spread))
    total = 0.0
    while count <= mean + spread:
        total += math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))
        if total >= share:
            return count
        count += 1
    return count


@dataclass(frozen=True, slots=True)
class Peak:
    """The peak load. rate, average: requests/s; how: derivation, for people"""

    rate: float
    average: float
    how: str


def peak(
    average: float, *, percentile: float = 0.95, window_s: float = 1.0, burst: float = 1.0, split: int = 1
) -> Peak:
    """Return the rate that `percentile` of all windows stay within if arrivals are Poisson.

    average: requests/s; burst: ratio of the busiest period's mean to the average
    window_s: over which the peak is counted; long requests average over longer windows
    split: replicas with independent random arrivals, each with its own peak; 1: any replica takes any request
    raises ConfigError
    """
    _positive(window_s, "a window in seconds")
    if burst < 1 or split < 1:
        raise ConfigError(f"a burst of {burst:g}, split {split} ways", "at least 1 each", "correct them")
    busiest = _positive(average, "requests a second") * burst
    rate = split * poisson_quantile(percentile, busiest * window_s / split) / window_s
    how = f"{percentile:.0%} of windows of {window_s:g} s stay within {format_4_digits(rate)} requests/s at "
    how += f"{format_4_digits(busiest)} on average" + (f", each of {split} replicas by itself" if split > 1 else "")
    return Peak(rate, average, how)


def _positive(n: float, label: str) -> float:
    if not (0 < n < math.inf):
        raise ConfigError(f"{label}: {n:g}", "a number above 0 that is not endless", "correct it")
    return n
