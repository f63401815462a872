"""Duration counters and histograms: count, total nanoseconds and distribution.

Recording a duration costs one addition and one index operation, whatever is exported.
"""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

N_BOUNDS = 27  # 1, 2, 4, ... microseconds, up to 67 s
RECENT_S, MAX_RECENT = 60.0, 4096  # time and number of durations that a summary covers


@dataclass(slots=True)
class Duration:
    """Number and total of durations."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        self.count += 1
        if ns > 0:
            self.ns += ns

    def to_dict(self) -> dict[str, int]:
        return {"count": self.count, "ns": self.ns}


class DurationHistogram:
    """Histogram with power-of-two bounds in microseconds, so that a duration's bucket is its bit length."""

    __slots__ = ("_n_in", "ns")

    def __init__(self) -> None:
        self.ns = 0
        self._n_in = [0] * 64  # up to 1 us, 2 us, 4 us, ...; the last exceed any clock

    @property
    def count(self) -> int:
        return sum(self._n_in)

    def add(self, ns: int) -> None:
        if ns > 0:
            self.ns += ns
            self._n_in[((ns - 1) // 1000).bit_length()] += 1
        else:
            self._n_in[0] += 1

    def to_dict(self) -> dict[str, int]:
        return {"count": self.count, "ns": self.ns}

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """Yield bounds and cumulative counts, without the final unbounded bucket."""
        for i, n in zip(range(N_BOUNDS), accumulate(self._n_in), strict=False):
            yield str(1 << i), n


class BoundedHistogram(DurationHistogram):
    """Histogram with custom bounds. bounds: ascending, in units of `unit_ns` nanoseconds"""

    __slots__ = ("_bounds", "_limits_ns")

    def __init__(self, bounds: Sequence[float], unit_ns: int) -> None:
        super().__init__()
        self._bounds, self._limits_ns = bounds, [bound * unit_ns for bound in bounds]
        self._n_in = [0] * (len(bounds) + 1)

    def add(self, ns: int) -> None:
        self.ns += max(ns, 0)
        self._n_in[bisect_left(self._limits_ns, ns)] += 1

    def cumulative(self) -> Iterator[tuple[str, int]]:
        for bound, n in zip(self._bounds, accumulate(self._n_in), strict=False):
            yield f"{bound:g}", n


class WholeUnitHistogram(BoundedHistogram):
    """Histogram of durations truncated to whole units, so that the sum is a whole number, as in Triton."""

    __slots__ = ("_unit_ns",)

    def __init__(self, bounds: Sequence[float], unit_ns: int) -> None:
        super().__init__(bounds, unit_ns)
        self._unit_ns = unit_ns

    def add(self, ns: int) -> None:
        super().add(ns - ns % self._unit_ns)


class RecentWindow:
    """A histogram together with its most recent durations, for quantiles without bucket rounding."""

    __slots__ = ("_histogram", "_last")

    def __init__(self, histogram: DurationHistogram) -> None:
        self._histogram = histogram
        self._last: deque[tuple[float, int]] = deque(maxlen=MAX_RECENT)  # time of arrival, duration

    def add(self, ns: int) -> None:
        self._histogram.add(ns)
        self._last.append((time.monotonic(), max(ns, 0)))

    @property
    def count(self) -> int:
        return self._histogram.count

    @property
    def ns(self) -> int:
        return self._histogram.ns

    def to_dict(self) -> dict[str, int]:
        return self._histogram.to_dict()

    def cumulative(self) -> Iterator[tuple[str, int]]:
        return self._histogram.cumulative()

    def quantiles(self, fractions: Sequence[float]) -> list[tuple[float, float]]:
        """Return quantiles in microseconds over the last RECENT_S; NaN without durations."""
        since_s = time.monotonic() - RECENT_S
        durations_ns = sorted(ns for at_s, ns in self._last if at_s >= since_s)
        if not durations_ns:
            return [(q, float("nan")) for q in fractions]
        return [(q, durations_ns[min(len(durations_ns) - 1, int(q * len(durations_ns)))] / 1000) for q in fractions]
