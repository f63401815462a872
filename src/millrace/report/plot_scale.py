"""Linear scales and byte-axis ticks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear map from `low` .. `high` to `start` .. `end` of the drawing, in either direction."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.0
        return round(self.start + share * (self.end - self.start), 2)


def byte_ticks(max_value: int, about: int = 5) -> list[int]:
    """Return ticks from 0 to at most `max_value`, a power of two apart: more than half of `about`, up to one more."""
    step = 1
    while max_value // step > about:
        step *= 2
    return list(range(0, max_value + 1, step))
