"""Numbers for drawings: where a value lies, and which values an axis of bytes names."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scale:
    """`low` .. `high` onto `start` .. `end` of the drawing, which may run either way."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.0
        return round(self.start + share * (self.end - self.start), 2)


def byte_ticks(most: int, about: int = 5) -> list[int]:
    """From 0 to at most `most`, in steps of a power of two: more than half of `about`, and at most one more than it."""
    step = 1
    while most // step > about:
        step *= 2
    return list(range(0, most + 1, step))
