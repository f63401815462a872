"""Comparison of goodput: the shares of requests within limits on both sides, with confidence intervals."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from millrace.bench.analysis.compare import FEWEST, ComparedRun, SavedResult, quantiles
from millrace.bench.analysis.goodput import GoodputLimits
from millrace.bench.analysis.intervals import Z99, Interval, Z
from millrace.bench.analysis.metrics import NOT_COUNTED
from millrace.bench.client.request_record import BenchRecord
from millrace.evaluate.paired_comparison import wilson

Counts = tuple[int, int]  # requests within the limits, and all


@dataclass(frozen=True, slots=True)
class GoodputDifference:
    """Difference of goodput. a, b: shares of requests, without those that the client cancelled

    points: B - A in percentage points; interval, surely: its 95 and 99 %; of_b: 95 % interval of B's share
    """

    limits: str
    a: float
    b: float
    points: float
    interval: Interval
    surely: Interval
    of_b: Interval

    @property
    def verdict(self) -> str:
        if self.interval[0] <= 0 <= self.interval[1]:
            return "no difference seen"
        return "better" if self.points > 0 else "worse"

    def is_worse_by(self, allowed_points: float) -> bool:
        """Whether all of `surely` lies beyond the allowed points."""
        return self.surely[1] < -allowed_points


def compare_goodput_rounds(a: ComparedRun, b: ComparedRun, limits: GoodputLimits) -> GoodputDifference | None:
    """Compare the rounds that both sides have. None if nothing was sent."""
    rounds = [
        tuple(_counts((r.answer for r in run.records), limits) for run in pair)
        for pair in zip(a.runs, b.runs, strict=False)
    ]
    return compare_shares(limits.description, [r for r in rounds if all(n for _, n in r)])


def compare_goodput_results(a: SavedResult, b: SavedResult, limits: GoodputLimits) -> GoodputDifference | None:
    """Compare two saved results; failures count as outside the limits."""
    both = tuple((_counts(results.answers, limits)[0], results.n) for results in (a, b))
    return compare_shares(limits.description, [both])


def _counts(answers: Iterable[BenchRecord], limits: GoodputLimits) -> Counts:
    counted = [a for a in answers if a.failure not in NOT_COUNTED]
    return sum(map(limits.meets, counted)), len(counted)


def compare_shares(limits: str, rounds: Sequence[tuple[Counts, ...]]) -> GoodputDifference | None:
    """Compare shares of requests. rounds: counts of A and B in each round

    Takes the wider of two intervals: Newcombe's for independent requests, and Student's t over the rounds, because a
    disturbance affects many requests of a round.
    """
    if not rounds:
        return None
    a, b = ((sum(r[i][0] for r in rounds), sum(r[i][1] for r in rounds)) for i in (0, 1))
    shares = np.array([[n_within / n for n_within, n in r] for r in rounds])
    differences = shares[:, 1] - shares[:, 0]
    error = float(differences.std(ddof=1)) / math.sqrt(len(rounds)) if len(rounds) >= FEWEST else 0.0
    t = quantiles(max(1, len(rounds) - 1))
    middle = b[0] / b[1] - a[0] / a[1]
    bounds = []
    for z, of_rounds in zip((Z, Z99), t, strict=True):
        low, high = newcombe(a, b, z)
        half = of_rounds * error
        bounds.append((100 * min(low, middle - half), 100 * max(high, middle + half)))
    return GoodputDifference(limits, a[0] / a[1], b[0] / b[1], 100 * middle, bounds[0], bounds[1], wilson(*b))


def newcombe(a: Counts, b: Counts, z: float) -> Interval:
    """Return the interval of the difference of two shares, B - A, from Wilson's intervals (Newcombe 1998, method
    10)."""
    (low_a, high_a), (low_b, high_b) = wilson(*a, z), wilson(*b, z)
    share_a, share_b = a[0] / a[1], b[0] / b[1]
    below, above = math.hypot(share_b - low_b, high_a - share_a), math.hypot(high_b - share_b, share_a - low_a)
    return share_b - share_a - below, share_b - share_a + above
