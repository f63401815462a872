"""CPU share of this thread over time."""

import asyncio
import time
from collections import deque

WINDOW_S, EVERY_S = 1.0, 0.25
SHORTEST_S = 0.1  # shorter runs are dominated by their start and end


class CoreShare:
    """Share of a core used by this thread from `start` to `stop`, sampled four times a second.

    mean: over the whole time; peak: over the worst second, or the whole time if it is shorter; None below `SHORTEST_S`
    """

    def __init__(self) -> None:
        self.mean: float | None = None
        self.peak: float | None = None
        self._looks: deque[tuple[float, float]] = deque()  # of the last second: wall and CPU seconds
        self._start = (0.0, 0.0)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._start = (time.perf_counter(), time.thread_time())
        self._look()

    def stop(self) -> float:
        """Stop sampling, and return the wall seconds since the start."""
        assert self._timer is not None
        self._timer.cancel()
        wall_s, cpu_s = (now - then for now, then in zip(self._now(), self._start, strict=True))
        if wall_s >= SHORTEST_S:
            self.mean = cpu_s / wall_s
            self.peak = self.mean if self.peak is None else self.peak
        return wall_s

    def _look(self) -> None:
        self._now()
        self._timer = asyncio.get_running_loop().call_later(EVERY_S, self._look)

    def _now(self) -> tuple[float, float]:
        now = (time.perf_counter(), time.thread_time())
        self._looks.append(now)
        while len(self._looks) > 2 and now[0] - self._looks[1][0] >= WINDOW_S:
            self._looks.popleft()
        wall_s, cpu_s = now[0] - self._looks[0][0], now[1] - self._looks[0][1]
        if wall_s >= WINDOW_S:
            self.peak = max(self.peak or 0.0, cpu_s / wall_s)
        return now
