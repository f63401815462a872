"""Splits a recording into day and night: the two ranges of hours between which requests differ most."""

from dataclasses import dataclass

import numpy as np

from millrace.tune.recorded_requests import Floats, Ints, Recording
from millrace.tune.traffic import FEWEST, Mask, Proposal, TrafficSummary, propose

HOUR_S, HOURS = 3600.0, 24
SHORTEST, LONGEST = 4, 20  # hours of either part
APART = 1.5  # ratio of any size from which separate engines are worthwhile


@dataclass(frozen=True, slots=True, eq=False)
class DayPart:
    """The hours from `first` up to `end` (exclusive), across midnight if `end` is smaller.

    mask: (N,) requests that arrived then
    """

    name: str
    first: int
    end: int
    mask: Mask

    @property
    def hours(self) -> int:
        return (self.end - self.first - 1) % HOURS + 1


def day_and_night(recording: Recording) -> tuple[DayPart, DayPart] | None:
    """Return both parts, the busier one first; None if the recording is shorter than a day, or a part is too small."""
    if recording.span_s < HOURS * HOUR_S:
        return None
    hour = np.asarray(recording.at_s // HOUR_S % HOURS, np.int64)
    profiles = _hour_profiles(recording, hour)
    first, n_hours = max(
        ((first, n) for n in range(SHORTEST, LONGEST + 1) for first in range(HOURS)),
        key=lambda arc: _difference(profiles, *arc),
    )
    end = (first + n_hours) % HOURS
    within = (hour - first) % HOURS < n_hours
    if min(within.sum(), (~within).sum()) < FEWEST:
        return None
    one, other = (first, end, within), (end, first, ~within)
    if within.sum() / n_hours < (~within).sum() / (HOURS - n_hours):
        one, other = other, one
    return DayPart("day", *one), DayPart("night", *other)


def _hour_profiles(recording: Recording, hour: Ints) -> Floats:
    """Return (24, 3) logarithms of requests, mean prompt and mean answer of each hour."""
    n = np.bincount(hour, minlength=HOURS)
    columns = [np.log1p(n)]
    for lengths in (recording.n_input, recording.n_output):
        mean = np.bincount(hour, lengths, HOURS) / np.maximum(n, 1)
        columns.append(np.log1p(np.where(n > 0, mean, lengths.mean())))
    return np.asarray(np.stack(columns, axis=1), np.float64)


def _difference(profiles: Floats, first: int, n: int) -> float:
    """Return the between-group variance of a split of the hours."""
    within = (np.arange(HOURS) - first) % HOURS < n
    apart = profiles[within].mean(axis=0) - profiles[~within].mean(axis=0)
    return float(n * (HOURS - n) * np.sum(apart**2))


def distance(recording: Recording, summary: TrafficSummary) -> list[tuple[DayPart, Proposal]]:
    """Return day and night with their proposals; [] if these do not differ enough."""
    parts = day_and_night(recording)
    if parts is None:
        return []
    day, night = ((part, propose(recording, summary, part.mask)) for part in parts)
    sizes = ("context", "batch", "pages_kept")
    pairs = [(getattr(day[1], size) or 1, getattr(night[1], size) or 1) for size in sizes]
    return [day, night] if any(max(pair) >= APART * min(pair) for pair in pairs) else []
