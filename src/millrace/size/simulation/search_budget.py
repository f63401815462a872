"""How long is searched by simulation, and what is told of it meanwhile."""

import math
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int, int], None]  # what is simulated, seconds so far, of so many
_TELL_S = 0.1


class SearchTimeoutError(Exception):
    """Within a simulation, which is given up."""


class Search:
    """All simulations of an answer. left: configurations that were not simulated to the end; over: there are such"""

    def __init__(
        self, limit_s: float = math.inf, tell: Progress = lambda *_: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tell, self._clock, self._what = tell, clock, ""
        self._left: dict[Hashable, list[str]] = {}
        self.again(limit_s)

    @property
    def left(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(what for some in self._left.values() for what in some))

    def again(self, limit_s: float) -> None:
        """From now on so long, for something else."""
        self._begun_s, self.limit_s, self.over = self._clock(), limit_s, False
        self._until_s, self._told_s = self._begun_s + limit_s, -math.inf

    @property
    def has_time(self) -> bool:
        return self._clock() <= self._until_s

    @contextmanager
    def part(self, share: float) -> Iterator[None]:
        """Of the time that is left, no more than that share for what is simulated within."""
        now_s, until_s = self._clock(), self._until_s
        self._until_s = min(until_s, now_s + max(0.0, until_s - now_s) * share)
        try:
            yield
        finally:
            self._until_s = until_s

    def begins(self, what: str) -> None:
        self._what = what

    def tick(self) -> None:
        """Called by simulations as they go on. raises TimeIsUp"""
        now_s = self._clock()
        if now_s > self._until_s:
            raise SearchTimeoutError
        passed_s = now_s - self._begun_s
        if passed_s > self._told_s + _TELL_S:
            self._told_s = passed_s
            self._tell(f"Simulating {self._what} (seconds)", int(passed_s), math.ceil(min(self.limit_s, 1e9)))

    def cut(self, what: str, of: Hashable = None) -> None:
        """It was not simulated to the end. of: what it was a part of"""
        self.over = True
        self._left.setdefault(of, []).append(what)

    def forget(self, of: Hashable) -> None:
        """All of that is simulated once more."""
        self._left.pop(of, None)
