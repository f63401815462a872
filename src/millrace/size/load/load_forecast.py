"""From what people know of their load to the peak that systems must bear, the hours of a day, and what that makes."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from millrace.errors import ConfigError
from millrace.report.format_numbers import exact, format_4_digits, pluralize
from millrace.size.load.peak_load import DAY_S, PERIODS, Peak, peak, per_second
from millrace.size.question.settings import LoadSettings
from millrace.tune.recorded_requests import Recording, read_recording

_CALLS = re.compile(r"(\d[\d,_]*(?:\.\d+)?(?:e\d+)?)\s*([kMB]?)\s*(?:/|\s+(?:per|a)\s+)\s*([a-z]+)")
_TIMES = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9}
_HOURS, _MOST_WINDOWS = 24, 10_000_000
_MORNING = 8  # o'clock, from when on people ask, where only for how many hours is said
_MOST_BURST = 1e4  # as --burst
USER_REQUESTS = 3.0  # a day, where nobody says


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests a second. busy: in the busiest hours; average: of whole days; both None where only the peak is known

    hours: (24,) the mean of each hour; how: in words, for the answer; trace: what was recorded
    """

    peak: float
    busy: float | None
    average: float | None
    hours: tuple[float, ...]
    how: tuple[str, ...]
    trace: Recording | None = None

    @property
    def a_day(self) -> float | None:
        return None if self.average is None else self.average * DAY_S


def demand(asked: LoadSettings) -> Demand:
    """raises ConfigError for a load that is missing, said twice, or contradicts itself"""
    given = [name for name in ("average", "users", "calls") if getattr(asked, name) is not None]
    if len(given) > 1:
        raise ConfigError(f"the load is said {len(given)} times: by {' and '.join(given)}", "one of them",
                          "leave the others out")  # fmt: skip
    if not given and asked.rate is None and asked.trace is None:
        raise ConfigError(
            "how many requests come is not said",
            "--rate (a second, at the peak), --average, --users, --calls or --trace",
            "say it: --rate 31, --users 10000, --calls 30M/year",
        )  # fmt: skip
    trace = None if asked.trace is None else read_recording(Path(asked.trace))
    curve = _curve(asked)
    if not given and trace is None:
        return _peak_alone(asked)
    average, how = _average(asked, trace)
    share = max(curve) / (sum(curve) / _HOURS)
    busy = average * share
    if share > 1:
        how = (*how, f"in their busiest hours {format_4_digits(busy)} requests/s")
    top, told = _peak(asked, busy, trace)
    if top > busy * _MOST_BURST:
        raise ConfigError(f"a peak of {exact(top)} requests/s, and {how[0]}",
                          f"a peak of at most {_MOST_BURST:,.0f} times the average, "
                           f"{format_4_digits(busy * _MOST_BURST)}",
                          "leave one of them out, or correct it (--requests-each, --hours)")  # fmt: skip
    if top < busy * (1 - 1e-9):
        raise ConfigError(f"a peak of {exact(top)} requests/s, and {format_4_digits(busy)} on average when they come",
                          "a peak above that", "correct one of them, or --percentile")  # fmt: skip
    hours = tuple(busy * h / max(curve) for h in curve)
    return Demand(top, busy, average, hours, (*how, *told), trace)


def hourly_peaks(asked: LoadSettings, found: Demand) -> tuple[float, ...]:
    """(24,) What each hour's systems must bear, by the rule that gave the peak of all."""
    if found.busy is None:
        return (found.peak,) * _HOURS
    if asked.rate is not None or found.trace is not None or not asked.percentile:
        return tuple(found.peak * mean / found.busy for mean in found.hours)
    return tuple(max(mean * asked.burst, _poisson(asked, mean).rate) if mean > 0 else 0.0 for mean in found.hours)


def users(rate: float, hours: float, requests_each: float = USER_REQUESTS) -> float:
    """Who can ask so many times a day where the rate is borne through so many hours."""
    return rate * hours * 3600 / requests_each


def window_counts(trace: Recording, window_s: float) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Arrivals in each whole window from the first one on. raises ConfigError where there is none"""
    n = int(trace.span_s / window_s)
    if not 1 <= n <= _MOST_WINDOWS:
        raise ConfigError(f"a trace of {trace.span_s:g} s in windows of {window_s:g} s",
                          f"1 to {_MOST_WINDOWS} windows", "choose another --window-s")  # fmt: skip
    places = ((trace.at_s - trace.at_s[0]) / window_s).astype(np.int64)
    return np.bincount(places[places < n], minlength=n)


def _peak_alone(asked: LoadSettings) -> Demand:
    """The peak is what was said: nothing makes it higher."""
    assert asked.rate is not None
    wrong = [name for name, usual in (("burst", 1), ("split", 1), ("hours", None), ("daily", None),
                                      ("requests_each", None), ("percentile", 95), ("window_s", 1))
             if getattr(asked, name) != usual]  # fmt: skip
    if wrong:
        raise ConfigError(f"{' and '.join(wrong)} beside a peak that is said", "an average that they make a peak of",
                          "say --average instead of --rate, or leave them out")  # fmt: skip
    how = f"peak: {exact(asked.rate)} requests/s, as said"
    return Demand(asked.rate, None, None, (asked.rate,) * _HOURS, (how,))


def _average(asked: LoadSettings, trace: Recording | None) -> tuple[float, tuple[str, ...]]:
    """Requests a second of whole days."""
    if asked.average is not None:
        return asked.average, (f"average: {exact(asked.average)} requests/s, as said",)
    if asked.users is not None:
        each = asked.requests_each or USER_REQUESTS
        rate = per_second(asked.users * each, "day")
        return rate, (
            f"{pluralize(asked.users, 'user')} with {pluralize(each, 'request')} a day are "
            f"{format_4_digits(rate)} requests/s on average"
            + ("" if asked.hours or asked.daily else ", through all 24 hours"),
        )
    if asked.calls is not None:
        n, period = parse_calls(asked.calls)
        each = asked.requests_each or 1.0
        rate = per_second(n * each, period)
        return rate, (
            f"{pluralize(n, 'call')} a {period} of {pluralize(each, 'request')} are "
            f"{format_4_digits(rate)} requests/s on average",
        )
    assert trace is not None
    if trace.span_s <= 0:
        raise ConfigError("all requests of the trace came at once", "times that differ", "say the rate instead")
    rate = len(trace) / trace.span_s
    return rate, (
        f"trace: {len(trace):,} requests in {trace.span_s:,.0f} s are {format_4_digits(rate)} requests/s on average",
    )


def parse_calls(text: str) -> tuple[float, str]:
    """ "30M/year" as (3e7, "year"). raises ConfigError"""
    found = _CALLS.fullmatch(text.strip())
    if not found or found[3] not in PERIODS:
        raise ConfigError(f'calls are "{text:.60}"', f"a number and a period ({', '.join(PERIODS)})", "write 30M/year")
    n = float(found[1].replace(",", "").replace("_", "")) * _TIMES[found[2]]
    if not 0 < n <= 1e18:
        raise ConfigError(f"{exact(n)} calls a {found[3]}", "above 0, and at most 1e18", "correct it")
    return n, found[3]


def _curve(asked: LoadSettings) -> Sequence[float]:
    """(24,) The weight of each hour."""
    if asked.daily is None:
        hours = _HOURS if asked.hours is None else asked.hours
        first = min(_MORNING, _HOURS - math.ceil(hours))
        return [min(1.0, max(0.0, hours - (i - first))) if i >= first else 0.0 for i in range(_HOURS)]
    if asked.hours is not None:
        raise ConfigError("hours and daily are both given", "one of them", "leave one out")
    try:
        weights = [float(part) for part in asked.daily.split(",")]
    except ValueError:
        weights = []
    if len(weights) != _HOURS or not all(0 <= w < 1e9 for w in weights) or not any(weights):
        raise ConfigError(f'daily is "{asked.daily:.80}"',
                          "24 numbers from 0, below 1e9, not all 0, with commas between",
                          "write one for each hour from midnight")  # fmt: skip
    return weights


def _peak(asked: LoadSettings, busy: float, trace: Recording | None) -> tuple[float, tuple[str, ...]]:
    if asked.rate is not None:
        makes = asked.burst != 1 or asked.split != 1 or asked.percentile != 95 or asked.window_s != 1
        if makes or trace is not None:
            raise ConfigError(
                "the peak is said, and what would make one of the average, too",
                "one of them",
                "leave --rate out, or --burst, --split, --percentile, --window-s and --trace",
            )
        return asked.rate, (f"peak: {exact(asked.rate)} requests/s, as said",)
    if trace is not None:
        return _recorded(asked, busy, trace)
    if not asked.percentile:
        if asked.split != 1:
            raise ConfigError("--split without a percentile", "--percentile above 0", "leave --split out")
        top = busy * asked.burst
        return top, (
            f"peak: {format_4_digits(top)} requests/s, {exact(asked.burst)} times that, nothing added for chance",
        )
    found = _poisson(asked, busy)
    if found.rate >= busy * asked.burst:
        return found.rate, (found.how,)
    rate = busy * asked.burst  # most windows are empty: what comes on average has to be borne all the same
    return rate, (found.how, f"peak: {format_4_digits(rate)} requests/s, the average, as most windows have none")


def _poisson(asked: LoadSettings, busy: float) -> Peak:
    return peak(busy, percentile=asked.percentile / 100, window_s=asked.window_s, burst=asked.burst, split=asked.split)


def _recorded(asked: LoadSettings, busy: float, trace: Recording) -> tuple[float, tuple[str, ...]]:
    """The percentile of its windows; where the average was said too, the trace tells how far a peak is above it."""
    if asked.burst != 1 or asked.split != 1 or not asked.percentile:
        raise ConfigError("a trace, and --burst, --split or --percentile 0", "its own windows tell the peak",
                          "leave one of them out")  # fmt: skip
    counts = window_counts(trace, asked.window_s)
    mean, own = float(counts.mean()), len(trace) / trace.span_s
    top = float(np.quantile(counts, asked.percentile / 100, method="higher")) / asked.window_s
    by_chance = _poisson(asked, own).rate
    told = (
        f"peak: {asked.percentile:g} % of the trace's windows of {asked.window_s:g} s have at most "
        f"{format_4_digits(top)} "
        f"requests/s; Poisson arrivals would have {format_4_digits(by_chance)} (the counts' variance is "
        f"{float(counts.var()) / mean:.1f} times the mean, theirs is 1)"
    )
    if abs(busy / own - 1) < 1e-9:
        return top, (told,)
    rate = top * busy / own
    return rate, (
        told,
        f"peak: {format_4_digits(rate)} requests/s, as far above the average of this load as the trace's is",
    )
