"""Day and night: the hours of the clock that a recording's requests differ most between."""

from dataclasses import dataclass

import numpy as np

from millrace.tune.recorded_requests import Floats, Ints, Recording
from millrace.tune.traffic import FEWEST, Mask, Proposal, TrafficSummary, propose

HOUR_S, HOURS = 3600.0, 24
SHORTEST, LONGEST = 4, 20  # hours of either part
APART = 1.5  # times as much of anything: less is not worth an engine of its own


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The hours of the clock from `first` until before `end`, across midnight where that is the smaller.

    mask: (N,) of the requests that came then
    """

    name: str
    first: int
    end: int
    mask: Mask

    @property
    def hours(self) -> int:
        return (self.end - self.first - 1) % HOURS + 1


def day_and_night(recording: Recording) -> tuple[Part, Part] | None:
    """The busier part first; None where less than a day was recorded, or one part holds too few requests."""
    if recording.span_s < HOURS * HOUR_S:
        return None
    hour = np.asarray(recording.at_s // HOUR_S % HOURS, np.int64)
    told = _told(recording, hour)
    first, n_hours = max(
        ((first, n) for n in range(SHORTEST, LONGEST + 1) for first in range(HOURS)),
        key=lambda arc: _difference(told, *arc),
    )
    end = (first + n_hours) % HOURS
    within = (hour - first) % HOURS < n_hours
    if min(within.sum(), (~within).sum()) < FEWEST:
        return None
    one, other = (first, end, within), (end, first, ~within)
    if within.sum() / n_hours < (~within).sum() / (HOURS - n_hours):
        one, other = other, one
    return Part("day", *one), Part("night", *other)


def _told(recording: Recording, hour: Ints) -> Floats:
    """(24, 3) of each hour the logarithms of requests, and of their mean prompt and answer."""
    n = np.bincount(hour, minlength=HOURS)
    columns = [np.log1p(n)]
    for lengths in (recording.n_input, recording.n_output):
        mean = np.bincount(hour, lengths, HOURS) / np.maximum(n, 1)
        columns.append(np.log1p(np.where(n > 0, mean, lengths.mean())))
    return np.asarray(np.stack(columns, axis=1), np.float64)


def _difference(told: Floats, first: int, n: int) -> float:
    """Between the means of both parts, as far as hours are from being one cloud."""
    within = (np.arange(HOURS) - first) % HOURS < n
    apart = told[within].mean(axis=0) - told[~within].mean(axis=0)
    return float(n * (HOURS - n) * np.sum(apart**2))


def distance(recording: Recording, asked: TrafficSummary) -> list[tuple[Part, Proposal]]:
    """Day and night with what each needs, where that differs; else nothing."""
    parts = day_and_night(recording)
    if parts is None:
        return []
    day, night = ((part, propose(recording, asked, part.mask)) for part in parts)
    sizes = ("context", "batch", "pages_kept")
    pairs = [(getattr(day[1], size) or 1, getattr(night[1], size) or 1) for size in sizes]
    return [day, night] if any(max(pair) >= APART * min(pair) for pair in pairs) else []
