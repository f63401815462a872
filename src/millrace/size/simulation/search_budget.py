"""Time budget and progress of a search by simulation."""

import math
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int, int], None]  # label, elapsed seconds, seconds in total
_TELL_S = 0.1


class SearchTimeoutError(Exception):
    """Raised within a simulation to abandon it when its time is up."""


class SearchBudget:
    """Time budget of all simulations of an answer. left: configurations whose simulation was cut; over: there are
    some"""

    def __init__(
        self, limit_s: float = math.inf, tell: Progress = lambda *_: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tell, self._clock, self._what = tell, clock, ""
        self._left: dict[Hashable, list[str]] = {}
        self.restart(limit_s)

    @property
    def left(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(what for some in self._left.values() for what in some))

    def restart(self, limit_s: float) -> None:
        """Start a new budget of limit_s seconds."""
        self._begun_s, self.limit_s, self.over = self._clock(), limit_s, False
        self._until_s, self._reported_s = self._begun_s + limit_s, -math.inf

    @property
    def has_time(self) -> bool:
        return self._clock() <= self._until_s

    @contextmanager
    def part(self, share: float) -> Iterator[None]:
        """Limit simulations in this context to a share of the remaining time."""
        now_s, until_s = self._clock(), self._until_s
        self._until_s = min(until_s, now_s + max(0.0, until_s - now_s) * share)
        try:
            yield
        finally:
            self._until_s = until_s

    def begin(self, label: str) -> None:
        self._what = label

    def tick(self) -> None:
        """Report progress; called repeatedly by simulations. raises SearchTimeoutError"""
        now_s = self._clock()
        if now_s > self._until_s:
            raise SearchTimeoutError
        passed_s = now_s - self._begun_s
        if passed_s > self._reported_s + _TELL_S:
            self._reported_s = passed_s
            self._tell(f"Simulating {self._what} (seconds)", int(passed_s), math.ceil(min(self.limit_s, 1e9)))

    def cut(self, label: str, owner: Hashable = None) -> None:
        """Note that a simulation was cut. owner: the search it belongs to, for `forget`"""
        self.over = True
        self._left.setdefault(owner, []).append(label)

    def forget(self, owner: Hashable) -> None:
        """Drop the notes of an owner, which is simulated again."""
        self._left.pop(owner, None)
