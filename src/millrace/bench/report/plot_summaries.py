"""Statistics behind the plots: TTFT by prompt length, drift of ITL along answers, spread of latencies."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millrace.bench.analysis.intervals import Interval, mean_interval, student_t
from millrace.bench.analysis.metrics import ttft_ms
from millrace.bench.client.request_record import BenchRecord

Floats = npt.NDArray[np.float64]
_FEWEST = 10


@dataclass(frozen=True, slots=True)
class Fit:
    """A least-squares line y = start + slope x. interval: 95 % of the slope, None below 10 points"""

    start: float
    slope: float
    interval: Interval | None


def fit_line(x: Floats, y: Floats) -> Fit | None:
    """Fit a line; None if x does not vary."""
    n, across = x.size, x - x.mean() if x.size else x
    square = float(across @ across)
    if n < 3 or square <= 1e-9 * n:
        return None
    slope = float(across @ y) / square
    start = float(y.mean() - slope * x.mean())
    if n < _FEWEST:
        return Fit(start, slope, None)
    left = y - start - slope * x
    half = student_t(n - 2) * float(np.sqrt(left @ left / (n - 2) / square))
    return Fit(start, slope, (slope - half, slope + half))


def ttft_by_length(answers: Sequence[BenchRecord]) -> Fit | None:
    """Fit TTFT in ms over input tokens."""
    points = [(a.n_prompt, t) for a in answers if a.n_prompt is not None and (t := ttft_ms(a)) is not None]
    x, y = np.array(points, dtype=np.float64).reshape(-1, 2).T
    return fit_line(x, y)


def chunk_positions(answer: BenchRecord) -> Floats:
    """Return cumulative output tokens at each chunk: reported by the server, otherwise evenly spread."""
    if len(answer.chunk_tokens) == len(answer.chunk_s):
        return np.array(answer.chunk_tokens, dtype=np.float64)
    return np.linspace(answer.n_first, max(answer.n_output, answer.n_first), len(answer.chunk_s))


def gaps_by_position(answers: Sequence[BenchRecord]) -> tuple[Floats, Floats]:
    """Return for every gap between chunks the token position at its end, and the ms per token."""
    positions, gaps = [np.empty(0)], [np.empty(0)]
    for answer in answers:
        if len(answer.chunk_s) > 1:
            at = chunk_positions(answer)
            tokens = np.diff(at)
            some = tokens > 0
            positions.append(at[1:][some])
            gaps.append(1e3 * np.diff(answer.chunk_s)[some] / tokens[some])
    return np.concatenate(positions), np.concatenate(gaps)


@dataclass(frozen=True, slots=True)
class Drift:
    """Slowdown of the second half of an answer's tokens against the first, in percent of the mean ITL."""

    percent: float
    interval: Interval | None


def itl_drift(answers: Sequence[BenchRecord]) -> Drift | None:
    """Return the mean drift over answers; differences are averaged, because ratios would be biased upwards."""
    halves = []
    for answer in answers:
        if len(answer.chunk_s) >= 5:
            at, s, middle = chunk_positions(answer), answer.chunk_s, len(answer.chunk_s) // 2
            first = (s[middle] - s[0]) / max(at[middle] - at[0], 1)
            second = (s[-1] - s[middle]) / max(at[-1] - at[middle], 1)
            halves.append((first, second))
    mean = float(np.mean(halves)) if halves else 0.0
    if mean <= 0:
        return None
    percents = np.array([100 * (second - first) / mean for first, second in halves])
    return Drift(float(percents.mean()), mean_interval(percents))


def spread_percent(values: Sequence[float]) -> float | None:
    """Return the range from the 10th to the 90th percentile, in percent of the median."""
    if not len(values):
        return None
    low, middle, high = np.percentile(values, (10, 50, 90))
    return float(100 * (high - low) / middle) if middle > 0 else None
