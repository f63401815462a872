"""Client-side health of a run: CPU share, send lateness and chunk rate; decides whether results are valid."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from millrace.bench.analysis.intervals import quantile_at_least
from millrace.bench.client.core_share import SHORTEST_S, WINDOW_S
from millrace.bench.client.request_record import BenchRecord
from millrace.bench.run.run import Run

SATURATED = 0.8  # share of a core from which timestamps are delayed by the client itself
LATE_MS = 5.0  # at p99
_FEWEST_LATE = 3  # below this, lateness is ignored: any process may be descheduled for 5 ms
WITHIN = 0.02  # lateness relative to TTFT that does not matter


@dataclass(frozen=True, slots=True)
class ClientHealth:
    """Health of the client in a run. peak_share: of a core in the worst second, None if the run was too short

    streams: peak concurrency; chunks_per_s: in the busiest second; late_ms: lower bound of the p99 send lateness of
    requests that had a free slot; waited_ms: p99 of TTFT
    """

    peak_share: float | None = None
    streams: int = 0
    chunks_per_s: float = 0.0
    late_ms: float = 0.0
    waited_ms: float = 0.0

    @classmethod
    def from_run(cls, run: Run) -> "ClientHealth":
        answers = [r.answer for r in run.records if r.answer.sent_s]
        chunks = [np.asarray(a.chunk_s or [a.end_s]) for a in answers if a.chunk_s or a.failure is None]
        waited = [1e3 * ((a.chunk_s or [a.end_s])[0] - a.intended_s) for a in answers if a.failure is None]
        return cls(
            run.share.peak, max_concurrency(answers), _busiest(chunks, run.wall_s),
            1e3 * quantile_at_least(run.late_s, 0.99) if len(run.late_s) >= _FEWEST_LATE else 0.0,
            float(np.percentile(waited, 99)) if waited else 0.0,
        )  # fmt: skip

    @property
    def keeps_up(self) -> bool:
        return (self.peak_share or 0.0) < SATURATED and self.late_ms < max(LATE_MS, WITHIN * self.waited_ms)

    @property
    def description(self) -> str:
        share = "" if self.peak_share is None else f"{self.peak_share:.0%} of a core in the worst second, "
        return f"{share}requests sent {self.late_ms:.1f} ms late at p99"


def max_concurrency(answers: Sequence[BenchRecord]) -> int:
    changes = sorted([(a.sent_s, 1) for a in answers] + [(a.end_s, -1) for a in answers])
    return int(np.cumsum([by for _, by in changes]).max()) if changes else 0


def _busiest(chunks: Sequence["np.ndarray[tuple[int], np.dtype[np.float64]]"], wall_s: float) -> float:
    """Return the chunks of the busiest second, or chunks per second of a shorter run."""
    if not chunks:
        return 0.0
    at_s = np.concatenate(chunks)
    return float(np.bincount((at_s - at_s.min()).astype(np.int64)).max()) / max(min(wall_s, WINDOW_S), SHORTEST_S)
