"""Whether B still satisfies the traffic: which share of its requests keeps limits, beside A's, and how surely."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from millrace.bench.analysis.compare import FEWEST, ComparedRun, SavedResult, quantiles
from millrace.bench.analysis.goodput import Limits
from millrace.bench.analysis.intervals import Z99, Interval, Z
from millrace.bench.analysis.metrics import NOT_COUNTED
from millrace.bench.client.request_record import Answer
from millrace.evaluate.paired_comparison import wilson

Counts = tuple[int, int]  # requests that keep the limits, and all


@dataclass(frozen=True, slots=True)
class GoodputDifference:
    """a, b: shares of all requests but those that we gave up; points: B less A, in points of a hundred, with its
    intervals of 95 and 99 %; of_b: 95 % of B's own share"""

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
        """Surely: all of `surely` lies beyond."""
        return self.surely[1] < -allowed_points


def of_rounds(a: ComparedRun, b: ComparedRun, limits: Limits) -> GoodputDifference | None:
    """Of the rounds that both have. None where nothing was asked."""
    rounds = [
        tuple(_counts((r.answer for r in run.records), limits) for run in pair)
        for pair in zip(a.runs, b.runs, strict=False)
    ]
    return satisfied(limits.says, [r for r in rounds if all(n for _, n in r)])


def of_written(a: SavedResult, b: SavedResult, limits: Limits) -> GoodputDifference | None:
    """Of two results. Their failures keep no limits."""
    both = tuple((_counts(one.answers, limits)[0], one.n) for one in (a, b))
    return satisfied(limits.says, [both])


def _counts(answers: Iterable[Answer], limits: Limits) -> Counts:
    counted = [a for a in answers if a.failure not in NOT_COUNTED]
    return sum(map(limits.keeps, counted)), len(counted)


def satisfied(says: str, rounds: Sequence[tuple[Counts, ...]]) -> GoodputDifference | None:
    """rounds: A's counts and B's of each. The wider of two intervals: of two shares of requests that are independent of
    each other (Newcombe's, of Wilson's), and of the rounds' differences (Student's t), for what disturbs a round
    disturbs many of its requests."""
    if not rounds:
        return None
    a, b = ((sum(r[i][0] for r in rounds), sum(r[i][1] for r in rounds)) for i in (0, 1))
    shares = np.array([[kept / n for kept, n in r] for r in rounds])
    differences = shares[:, 1] - shares[:, 0]
    error = float(differences.std(ddof=1)) / math.sqrt(len(rounds)) if len(rounds) >= FEWEST else 0.0
    t = quantiles(max(1, len(rounds) - 1))
    middle = b[0] / b[1] - a[0] / a[1]
    found = []
    for z, of_rounds in zip((Z, Z99), t, strict=True):
        low, high = newcombe(a, b, z)
        half = of_rounds * error
        found.append((100 * min(low, middle - half), 100 * max(high, middle + half)))
    return GoodputDifference(says, a[0] / a[1], b[0] / b[1], 100 * middle, found[0], found[1], wilson(*b))


def newcombe(a: Counts, b: Counts, z: float) -> Interval:
    """Of the difference of two shares, B less A, by Wilson's interval of each (Newcombe, 1998, method 10)."""
    (low_a, high_a), (low_b, high_b) = wilson(*a, z), wilson(*b, z)
    share_a, share_b = a[0] / a[1], b[0] / b[1]
    below, above = math.hypot(share_b - low_b, high_a - share_a), math.hypot(high_b - share_b, share_a - low_a)
    return share_b - share_a - below, share_b - share_a + above
