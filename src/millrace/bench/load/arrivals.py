"""Arrival times of requests: constant, Poisson or gamma, with an optional ramp-up."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain


@dataclass(frozen=True, slots=True)
class Arrivals:
    """An arrival process. rate_per_s: mean rate; ramp_s: time in which the rate grows linearly from 0

    burstiness: shape of `gamma`: 1 is Poisson, below 1 is bursty, above 1 more even (as in `vllm bench serve`)
    at_once: shift all arrivals so that the first is at 0
    """

    rate_per_s: float
    pattern: str = "poisson"
    burstiness: float = 1.0
    ramp_s: float = 0.0
    at_once: bool = False

    def times(self, rng: random.Random) -> Iterator[float]:
        """Yield arrival times in seconds after the start, without end; a constant rate without ramp starts at 0."""
        times = self._times(rng)
        if self.at_once:
            first_s = next(times)
            times = chain([0.0], (at_s - first_s for at_s in times))
        return times

    def _times(self, rng: random.Random) -> Iterator[float]:
        n = 0.0  # requests that should have come by now
        while True:
            gap = self._gap(rng)
            if self.pattern == "constant":
                yield self._when(n)
                n += gap
            else:
                n += gap
                yield self._when(n)

    def _gap(self, rng: random.Random) -> float:
        """Return a random gap of mean 1."""
        match self.pattern:
            case "poisson":
                return rng.expovariate(1.0)
            case "gamma":
                return rng.gammavariate(self.burstiness, 1 / self.burstiness)
        return 1.0

    def _when(self, n: float) -> float:
        """Return the time by which n requests are expected: n = rate t^2 / (2 ramp), then rate (t - ramp / 2)."""
        in_ramp = self.rate_per_s * self.ramp_s / 2
        if n <= in_ramp:
            return math.sqrt(2 * self.ramp_s * n / self.rate_per_s) if n else 0.0
        return n / self.rate_per_s + self.ramp_s / 2
