"""Shares with confidence intervals, and paired comparison of two models on the same questions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_Z = 1.959963984540054  # two-sided 95 % of a normal distribution


def wilson(n_right: int, n: int, z: float = _Z) -> tuple[float, float]:
    """Return Wilson's interval of a share, 95 % by default: within 0 and 1, and valid for few questions (1927)."""
    if n == 0:
        return 0.0, 1.0
    share, z2 = n_right / n, z * z
    centre, half = share + z2 / (2 * n), z * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(0.0, (centre - half) / (1 + z2 / n)), min(1.0, (centre + half) / (1 + z2 / n))


class Verdict(NamedTuple):
    """An answer (the index of a choice, or a text), and whether it is right."""

    choice: object
    right: bool


@dataclass(frozen=True, slots=True)
class Paired:
    """A comparison. gained: wrong before, right now; lost: the reverse; changed: another choice, right or wrong"""

    n: int
    gained: int
    lost: int
    changed: int

    @property
    def difference(self) -> float:
        """Return the difference of the shares, now minus before."""
        return (self.gained - self.lost) / self.n

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the difference, within -1 and 1.

        It uses the standard error of pairs, with one more flip each way among two more questions (Bonett and Price,
        2012), so its width is never zero: no flips at all may be chance.
        """
        n, gained, lost = self.n + 2, self.gained + 1, self.lost + 1
        middle = (gained - lost) / n
        error = math.sqrt(((gained + lost) / n - middle * middle) / n)
        return max(-1.0, middle - _Z * error), min(1.0, middle + _Z * error)

    @property
    def p_value(self) -> float:
        """Return McNemar's exact p-value: the probability of a split of flips at least as uneven for equal models."""
        n, least = self.gained + self.lost, min(self.gained, self.lost)
        if n == 0:
            return 1.0
        tail = sum(math.exp(_log_choose(n, k) - n * math.log(2)) for k in range(least + 1))
        return min(1.0, 2 * tail)


def paired(now: Sequence[Verdict], before: Sequence[Verdict]) -> Paired:
    """Compare answers to the same questions, in the same order."""
    both = list(zip(now, before, strict=True))
    gained = sum(mine.right and not other.right for mine, other in both)
    lost = sum(other.right and not mine.right for mine, other in both)
    return Paired(len(both), gained, lost, sum(mine.choice != other.choice for mine, other in both))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
