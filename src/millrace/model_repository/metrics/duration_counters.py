"""How long things took: so many, their nanoseconds together, and how many were how long.

A duration costs a request one addition and one index, whatever is told of it.
"""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

N_BOUNDS = 27  # 1, 2, 4, ... microseconds, up to 67 s
RECENT_S, MOST_RECENT = 60.0, 4096  # what a summary looks back on


@dataclass(slots=True)
class Duration:
    """So many, and their nanoseconds together."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        self.count += 1
        if ns > 0:
            self.ns += ns

    def add_all(self, each_ns: Sequence[int]) -> None:
        """None of them negative."""
        self.count += len(each_ns)
        self.ns += sum(each_ns)

    def told(self) -> dict[str, int]:
        return {"count": self.count, "ns": self.ns}


class Histogram:
    """Of microseconds: each bound is twice the one before, so that the place of a duration is its length in bits."""

    __slots__ = ("_n_in", "ns")

    def __init__(self) -> None:
        self.ns = 0
        self._n_in = [0] * 64  # up to 1 us, 2 us, 4 us, ...; the last are longer than any clock tells

    @property
    def count(self) -> int:
        return sum(self._n_in)

    def add(self, ns: int) -> None:
        if ns > 0:
            self.ns += ns
            self._n_in[((ns - 1) // 1000).bit_length()] += 1
        else:
            self._n_in[0] += 1

    def add_all(self, each_ns: Sequence[int]) -> None:
        for ns in each_ns:
            self.add(ns)

    def told(self) -> dict[str, int]:
        return {"count": self.count, "ns": self.ns}

    def up_to(self) -> Iterator[tuple[str, int]]:
        """Bounds, and how many were not longer; without the last, which is all of them."""
        for i, n in zip(range(N_BOUNDS), accumulate(self._n_in), strict=False):
            yield str(1 << i), n


class BoundedHistogram(Histogram):
    """With bounds of its own. bounds: ascending, in units of so many nanoseconds"""

    __slots__ = ("_bounds", "_limits_ns")

    def __init__(self, bounds: Sequence[float], unit_ns: int) -> None:
        super().__init__()
        self._bounds, self._limits_ns = bounds, [bound * unit_ns for bound in bounds]
        self._n_in = [0] * (len(bounds) + 1)

    def add(self, ns: int) -> None:
        self.ns += max(ns, 0)
        self._n_in[bisect_left(self._limits_ns, ns)] += 1

    def up_to(self) -> Iterator[tuple[str, int]]:
        for bound, n in zip(self._bounds, accumulate(self._n_in), strict=False):
            yield f"{bound:g}", n


class WholeUnits(BoundedHistogram):
    """Of durations that are cut to whole units, so that their sum is one of whole numbers, as Triton tells it."""

    __slots__ = ("_unit_ns",)

    def __init__(self, bounds: Sequence[float], unit_ns: int) -> None:
        super().__init__(bounds, unit_ns)
        self._unit_ns = unit_ns

    def add(self, ns: int) -> None:
        super().add(ns - ns % self._unit_ns)


class RecentWindow:
    """Beside a histogram: the last durations themselves, for quantiles that no bucket rounds."""

    __slots__ = ("_beside", "_last")

    def __init__(self, beside: Histogram) -> None:
        self._beside = beside
        self._last: deque[tuple[float, int]] = deque(maxlen=MOST_RECENT)  # when it came, how long it was

    def add(self, ns: int) -> None:
        self._beside.add(ns)
        self._last.append((time.monotonic(), max(ns, 0)))

    def add_all(self, each_ns: Sequence[int]) -> None:
        for ns in each_ns:
            self.add(ns)

    @property
    def count(self) -> int:
        return self._beside.count

    @property
    def ns(self) -> int:
        return self._beside.ns

    def told(self) -> dict[str, int]:
        return self._beside.told()

    def up_to(self) -> Iterator[tuple[str, int]]:
        return self._beside.up_to()

    def quantiles(self, wanted: Sequence[float]) -> list[tuple[float, float]]:
        """Microseconds of those of the last RECENT_S; NaN where there are none."""
        since_s = time.monotonic() - RECENT_S
        found = sorted(ns for at_s, ns in self._last if at_s >= since_s)
        if not found:
            return [(q, float("nan")) for q in wanted]
        return [(q, found[min(len(found) - 1, int(q * len(found)))] / 1000) for q in wanted]
