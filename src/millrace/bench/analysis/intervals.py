"""Summary statistics with confidence intervals, which are None if the sample is too small for them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

ALPHA = 0.05
PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)
Z, Z99 = 1.959963984540054, 2.5758293035489004  # of a normal distribution, both sides: 95 and 99 %
_FEWEST_FOR_MEAN = 10
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary of a sample. percentiles: linear interpolation between order statistics, as in NumPy, GenAI-Perf, AIPerf

    std: of the population; intervals: 95 % by name ("mean", "p50", ...), None if there are too few values
    """

    n: int
    mean: float
    std: float
    min: float
    max: float
    percentiles: dict[int, float]
    intervals: dict[str, Interval | None]


def summary(values: Sequence[float], independent: bool = True) -> Summary | None:
    """Summarise values; None if there are none. independent: False leaves out all intervals"""
    x = np.sort(np.asarray(values, dtype=np.float64))
    if not x.size:
        return None
    quantiles = np.percentile(x, PERCENTILES)
    intervals: dict[str, Interval | None] = dict.fromkeys(["mean", *(f"p{p}" for p in PERCENTILES)])
    if independent:
        intervals["mean"] = mean_interval(x)
        intervals |= {f"p{p}": quantile_interval(x, p / 100) for p in PERCENTILES}
    percentiles = dict(zip(PERCENTILES, map(float, quantiles), strict=True))
    return Summary(x.size, float(x.mean()), float(x.std()), float(x[0]), float(x[-1]), percentiles, intervals)


def quantile_interval(ordered: "npt.NDArray[np.float64]", share: float) -> Interval | None:
    """Return two order statistics that enclose the quantile with 95 % confidence, for any distribution.

    The number of values below the quantile is binomial; each side may miss with 2.5 %. None if there are too few
    values: a p99 needs 368, a median 6. Values must be independent.
    """
    n = ordered.size
    below = _binomial_cdf(n, share)  # P(at most k)
    low = int(np.searchsorted(below, ALPHA / 2, side="right"))  # P(fewer than low) <= 2.5 %, counted from 1
    high = int(np.searchsorted(below, 1 - ALPHA / 2, side="left")) + 1
    if low < 1 or high > n:
        return None
    return float(ordered[low - 1]), float(ordered[high - 1])


def quantile_at_least(values: Sequence[float], share: float) -> float:
    """Return the lower end of that interval, which exists for every sample; 0 for no values.

    For the p99 of 40 values this is the third largest, so a single outlier does not count.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    low = int(np.searchsorted(_binomial_cdf(ordered.size, share), ALPHA / 2, side="right"))
    return float(ordered[max(low, 1) - 1]) if ordered.size else 0.0


def _binomial_cdf(n: int, share: float) -> "npt.NDArray[np.float64]":
    """Return P(B <= k) for k = 0 .. n."""
    k = np.arange(n + 1)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])
    log_p = log_factorial[n] - log_factorial[k] - log_factorial[n - k]
    log_p += k * math.log(share) + (n - k) * math.log1p(-share)
    cdf: npt.NDArray[np.float64] = np.minimum(np.cumsum(np.exp(log_p)), 1.0)
    return cdf


def mean_interval(values: "npt.NDArray[np.float64]") -> Interval | None:
    """Return the interval of the mean by Student's t; None below 10 values. Values must be independent."""
    n = values.size
    if n < _FEWEST_FOR_MEAN:
        return None
    half = student_t(n - 1) * float(values.std(ddof=1)) / math.sqrt(n)
    mean = float(values.mean())
    return mean - half, mean + half


def student_t(freedom: int, z: float = Z) -> float:
    """Approximate the quantile of Student's t that corresponds to `z` of a normal distribution.

    Error below 0.1 % from 6 degrees of freedom (95 %) or 9 (99 %). Source: Abramowitz and Stegun, 26.7.5
    """
    v = freedom
    z3, z5, z7 = z**3, z**5, z**7
    return (
        z + (z3 + z) / (4 * v) + (5 * z5 + 16 * z3 + 3 * z) / (96 * v**2)
        + (3 * z7 + 19 * z5 + 17 * z3 - 15 * z) / (384 * v**3)
    )  # fmt: skip
