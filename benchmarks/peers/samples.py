"""Samples of one run and what follows from them: medians, ratios of pairs, shares of what the machine can do."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """One engine on one workload in one round; bytes a second of the machine before and after."""

    round: int
    workload: str
    engine: str
    seconds: float
    read_before: float
    read_after: float

    @property
    def read_rate(self) -> float:
        return (self.read_before + self.read_after) / 2


@dataclass(frozen=True, slots=True)
class Peaks:
    """Operations a second of the instructions themselves, in one round."""

    int8: float
    bf16: float


class Samples:
    """All samples of a run, asked by workload and engine."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    def of(self, workload: str, engine: str) -> list[Sample]:
        return [s for s in self._samples if s.workload == workload and s.engine == engine]

    def median_s(self, workload: str, engine: str) -> float | None:
        """None: it did not run."""
        found = [s.seconds for s in self.of(workload, engine)]
        return statistics.median(found) if found else None

    def fastest(self, workload: str, engines: Sequence[str]) -> str | None:
        medians = {e: m for e in engines if (m := self.median_s(workload, e)) is not None}
        return min(medians, key=medians.__getitem__) if medians else None

    def speedup(self, workload: str, ours: str, theirs: str) -> float | None:
        """How many times as fast `ours` is: the median over rounds of the ratio within a round."""
        taken_s = {s.round: s.seconds for s in self.of(workload, theirs)}
        pairs = [taken_s[s.round] / s.seconds for s in self.of(workload, ours) if s.round in taken_s]
        return statistics.median(pairs) if pairs else None

    def share_of_bandwidth(self, workload: str, engine: str, bytes_per_sample: float) -> float | None:
        """Of the read bandwidth measured beside each sample; `counted` says whether it is one. None: it did not run."""
        shares = [bytes_per_sample / s.seconds / s.read_rate for s in self.of(workload, engine)]
        return statistics.median(shares) if shares else None
