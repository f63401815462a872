"""How long is searched by simulation, and what is told of it meanwhile."""

import math
import time
from collections.abc import Callable

Progress = Callable[[str, int, int], None]  # what is simulated, seconds so far, of so many
_TELL_S = 0.1


class TimeIsUp(Exception):  # noqa: N818 (no mistake: what was found so far is the answer)
    """Within a simulation, which is given up."""


class Search:
    """All simulations of an answer. left: configurations that were not simulated to the end; over: there are such"""

    def __init__(
        self, limit_s: float = math.inf, tell: Progress = lambda *_: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tell, self._clock, self._what = tell, clock, ""
        self.left: tuple[str, ...] = ()
        self.again(limit_s)

    def again(self, limit_s: float) -> None:
        """From now on so long, for something else."""
        self._begun_s, self.limit_s, self.over = self._clock(), limit_s, False
        self._told_s = -math.inf

    def begins(self, what: str) -> None:
        self._what = what

    def tick(self) -> None:
        """Called by simulations as they go on. raises TimeIsUp"""
        passed_s = self._clock() - self._begun_s
        if passed_s > self.limit_s:
            self.over = True
            raise TimeIsUp
        if passed_s > self._told_s + _TELL_S:
            self._told_s = passed_s
            self._tell(f"Simulating {self._what}", int(passed_s), math.ceil(min(self.limit_s, 1e9)))

    def cut(self, what: str) -> None:
        if what not in self.left:
            self.left = (*self.left, what)
