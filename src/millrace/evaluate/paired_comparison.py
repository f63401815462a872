"""Shares with their intervals, and two models beside each other on the same questions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_Z = 1.959963984540054  # 95 % of a normal distribution, both sides


def wilson(n_right: int, n: int, z: float = _Z) -> tuple[float, float]:
    """95 % of a share, or as much as `z` says: never beyond 0 and 1, and right for few questions (Wilson, 1927)."""
    if n == 0:
        return 0.0, 1.0
    share, z2 = n_right / n, z * z
    centre, half = share + z2 / (2 * n), z * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(0.0, (centre - half) / (1 + z2 / n)), min(1.0, (centre + half) / (1 + z2 / n))


class Verdict(NamedTuple):
    """Of one answer: which it was (a number of a choice, or a text), and whether it is right."""

    choice: object
    right: bool


@dataclass(frozen=True, slots=True)
class Paired:
    """gained: wrong before, right now; lost: the other way; changed: another choice, right or wrong"""

    n: int
    gained: int
    lost: int
    changed: int

    @property
    def difference(self) -> float:
        """Of the shares, now less before."""
        return (self.gained - self.lost) / self.n

    @property
    def interval(self) -> tuple[float, float]:
        """95 % of the difference, never beyond -1 and 1, nor of no width: as many questions without a flip may have
        been luck. By the standard error of pairs, with one flip more each way among two questions more (Bonett and
        Price, 2012)."""
        n, gained, lost = self.n + 2, self.gained + 1, self.lost + 1
        middle = (gained - lost) / n
        error = math.sqrt(((gained + lost) / n - middle * middle) / n)
        return max(-1.0, middle - _Z * error), min(1.0, middle + _Z * error)

    @property
    def p_value(self) -> float:
        """McNemar's exact test: how likely as uneven a split of the flips is, were both models equally good."""
        n, least = self.gained + self.lost, min(self.gained, self.lost)
        if n == 0:
            return 1.0
        tail = sum(math.exp(_log_choose(n, k) - n * math.log(2)) for k in range(least + 1))
        return min(1.0, 2 * tail)


def paired(now: Sequence[Verdict], before: Sequence[Verdict]) -> Paired:
    """What was answered to the same questions, in the same order."""
    both = list(zip(now, before, strict=True))
    gained = sum(mine.right and not other.right for mine, other in both)
    lost = sum(other.right and not mine.right for mine, other in both)
    return Paired(len(both), gained, lost, sum(mine.choice != other.choice for mine, other in both))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
