"""How sure a share of right answers is."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """`right` out of `of`, with the 95 % interval of Wilson (1927)."""

    right: int
    of: int

    @property
    def share(self) -> float:
        return self.right / self.of if self.of else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        if not self.of:
            return 0.0, 1.0
        z, n, p = 1.959964, self.of, self.share
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, middle - half), min(1.0, middle + half)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.share:.1%} ({self.right} of {self.of}, 95 % interval {low:.1%} to {high:.1%})"

    def as_json(self) -> dict[str, float | int]:
        low, high = self.interval
        return {"right": self.right, "of": self.of, "share": self.share, "low": low, "high": high}


def count(outcomes: list[bool]) -> Share:
    return Share(sum(outcomes), len(outcomes))
