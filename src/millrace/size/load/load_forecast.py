"""Load forecast: the peak and the daily curve from users, calls, an average rate or a trace."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from millrace.errors import ConfigError
from millrace.report.format_numbers import format_4_digits, format_exact, pluralize
from millrace.size.load.peak_load import DAY_S, PERIODS, Peak, peak, per_second
from millrace.size.question.settings import DemandSettings
from millrace.tune.recorded_requests import Recording, read_recording

_CALLS = re.compile(r"(\d[\d,_]*(?:\.\d+)?(?:e\d+)?)\s*([kMB]?)\s*(?:/|\s+(?:per|a)\s+)\s*([a-z]+)")
_TIMES = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9}
_HOURS, _MAX_WINDOWS = 24, 10_000_000
_MORNING = 8  # hour at which the day starts if only its length is given
_MAX_BURST = 1e4  # as --burst
USER_REQUESTS = 3.0  # requests of a user a day, by default


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests/s. busy: mean of the busiest hours; average: of whole days; both None if only the peak is known

    hours: (24,) mean of each hour; how: derivation, for people; trace: the recorded requests
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


def forecast_demand(settings: DemandSettings) -> Demand:
    """Forecast the load from settings. raises ConfigError if it is missing, given twice or contradictory"""
    load_flags = [name for name in ("average", "users", "calls") if getattr(settings, name) is not None]
    if len(load_flags) > 1:
        raise ConfigError(f"the load is said {len(load_flags)} times: by {' and '.join(load_flags)}", "one of them",
                          "leave the others out")  # fmt: skip
    if not load_flags and settings.rate is None and settings.trace is None:
        raise ConfigError(
            "how many requests come is not said",
            "--rate (a second, at the peak), --average, --users, --calls or --trace",
            "say it: --rate 31, --users 10000, --calls 30M/year",
        )  # fmt: skip
    trace = None if settings.trace is None else read_recording(Path(settings.trace))
    curve = _curve(settings)
    if not load_flags and trace is None:
        return _peak_alone(settings)
    average, how = _average(settings, trace)
    share = max(curve) / (sum(curve) / _HOURS)
    busy = average * share
    if share > 1:
        how = (*how, f"in their busiest hours {format_4_digits(busy)} requests/s")
    top, peak_how = _peak(settings, busy, trace)
    if top > busy * _MAX_BURST:
        raise ConfigError(f"a peak of {format_exact(top)} requests/s, and {how[0]}",
                          f"a peak of at most {_MAX_BURST:,.0f} times the average, "
                           f"{format_4_digits(busy * _MAX_BURST)}",
                          "leave one of them out, or correct it (--requests-each, --hours)")  # fmt: skip
    if top < busy * (1 - 1e-9):
        what = f"a peak of {format_exact(top)} requests/s, and {format_4_digits(busy)} on average when they come"
        raise ConfigError(what, "a peak above that", "correct one of them, or --percentile")
    hours = tuple(busy * h / max(curve) for h in curve)
    return Demand(top, busy, average, hours, (*how, *peak_how), trace)


def hourly_peaks(settings: DemandSettings, forecast: Demand) -> tuple[float, ...]:
    """Return the (24,) peak requests/s of each hour, by the rule that gave the overall peak."""
    if forecast.busy is None:
        return (forecast.peak,) * _HOURS
    if settings.rate is not None or forecast.trace is not None or not settings.percentile:
        return tuple(forecast.peak * mean / forecast.busy for mean in forecast.hours)
    return tuple(
        max(mean * settings.burst, _poisson(settings, mean).rate) if mean > 0 else 0.0 for mean in forecast.hours
    )


def supported_users(rate: float, hours: float, requests_each: float = USER_REQUESTS) -> float:
    """Return how many users a rate supports. hours: of the day in which they ask; requests_each: a day"""
    return rate * hours * 3600 / requests_each


def window_counts(trace: Recording, window_s: float) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Count the arrivals in each whole window. raises ConfigError if there is none"""
    n = int(trace.span_s / window_s)
    if not 1 <= n <= _MAX_WINDOWS:
        raise ConfigError(f"a trace of {trace.span_s:g} s in windows of {window_s:g} s",
                          f"1 to {_MAX_WINDOWS} windows", "choose another --window-s")  # fmt: skip
    places = ((trace.at_s - trace.at_s[0]) / window_s).astype(np.int64)
    return np.bincount(places[places < n], minlength=n)


def _peak_alone(settings: DemandSettings) -> Demand:
    """Return the demand if only the peak is given; settings that derive a peak from an average are refused."""
    assert settings.rate is not None
    wrong = [name for name, usual in (("burst", 1), ("split", 1), ("hours", None), ("daily", None),
                                      ("requests_each", None), ("percentile", 95), ("window_s", 1))
             if getattr(settings, name) != usual]  # fmt: skip
    if wrong:
        raise ConfigError(f"{' and '.join(wrong)} beside a peak that is said", "an average that they make a peak of",
                          "say --average instead of --rate, or leave them out")  # fmt: skip
    how = f"peak: {format_exact(settings.rate)} requests/s, as said"
    return Demand(settings.rate, None, None, (settings.rate,) * _HOURS, (how,))


def _average(settings: DemandSettings, trace: Recording | None) -> tuple[float, tuple[str, ...]]:
    """Return the mean requests/s of whole days, and its derivation."""
    if settings.average is not None:
        return settings.average, (f"average: {format_exact(settings.average)} requests/s, as said",)
    if settings.users is not None:
        per_user = settings.requests_each or USER_REQUESTS
        rate = per_second(settings.users * per_user, "day")
        return rate, (
            f"{pluralize(settings.users, 'user')} with {pluralize(per_user, 'request')} a day are "
            f"{format_4_digits(rate)} requests/s on average"
            + ("" if settings.hours or settings.daily else ", through all 24 hours"),
        )
    if settings.calls is not None:
        n, period = parse_calls(settings.calls)
        per_user = settings.requests_each or 1.0
        rate = per_second(n * per_user, period)
        return rate, (
            f"{pluralize(n, 'call')} a {period} of {pluralize(per_user, 'request')} are "
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
    """Parse "30M/year" as (3e7, "year"). raises ConfigError"""
    match = _CALLS.fullmatch(text.strip())
    if not match or match[3] not in PERIODS:
        raise ConfigError(f'calls are "{text:.60}"', f"a number and a period ({', '.join(PERIODS)})", "write 30M/year")
    n = float(match[1].replace(",", "").replace("_", "")) * _TIMES[match[2]]
    if not 0 < n <= 1e18:
        raise ConfigError(f"{format_exact(n)} calls a {match[3]}", "above 0, and at most 1e18", "correct it")
    return n, match[3]


def _curve(settings: DemandSettings) -> Sequence[float]:
    """Return the (24,) weights of the hours."""
    if settings.daily is None:
        hours = _HOURS if settings.hours is None else settings.hours
        first = min(_MORNING, _HOURS - math.ceil(hours))
        return [min(1.0, max(0.0, hours - (i - first))) if i >= first else 0.0 for i in range(_HOURS)]
    if settings.hours is not None:
        raise ConfigError("hours and daily are both given", "one of them", "leave one out")
    try:
        weights = [float(part) for part in settings.daily.split(",")]
    except ValueError:
        weights = []
    if len(weights) != _HOURS or not all(0 <= w < 1e9 for w in weights) or not any(weights):
        raise ConfigError(f'daily is "{settings.daily:.80}"',
                          "24 numbers from 0, below 1e9, not all 0, with commas between",
                          "write one for each hour from midnight")  # fmt: skip
    return weights


def _peak(settings: DemandSettings, busy: float, trace: Recording | None) -> tuple[float, tuple[str, ...]]:
    if settings.rate is not None:
        makes = settings.burst != 1 or settings.split != 1 or settings.percentile != 95 or settings.window_s != 1
        if makes or trace is not None:
            raise ConfigError(
                "the peak is said, and what would make one of the average, too",
                "one of them",
                "leave --rate out, or --burst, --split, --percentile, --window-s and --trace",
            )
        return settings.rate, (f"peak: {format_exact(settings.rate)} requests/s, as said",)
    if trace is not None:
        return _trace_peak(settings, busy, trace)
    if not settings.percentile:
        if settings.split != 1:
            raise ConfigError("--split without a percentile", "--percentile above 0", "leave --split out")
        top = busy * settings.burst
        return top, (
            f"peak: {format_4_digits(top)} requests/s, {format_exact(settings.burst)} times that, "
            "nothing added for chance",
        )
    by_chance = _poisson(settings, busy)
    if by_chance.rate >= busy * settings.burst:
        return by_chance.rate, (by_chance.how,)
    rate = busy * settings.burst  # most windows are empty: the average is the floor
    return rate, (by_chance.how, f"peak: {format_4_digits(rate)} requests/s, the average, as most windows have none")


def _poisson(settings: DemandSettings, busy: float) -> Peak:
    return peak(
        busy,
        percentile=settings.percentile / 100,
        window_s=settings.window_s,
        burst=settings.burst,
        split=settings.split,
    )


def _trace_peak(settings: DemandSettings, busy: float, trace: Recording) -> tuple[float, tuple[str, ...]]:
    """Return the percentile of the trace's windows, scaled to the average if that is given, too."""
    if settings.burst != 1 or settings.split != 1 or not settings.percentile:
        raise ConfigError("a trace, and --burst, --split or --percentile 0", "its own windows tell the peak",
                          "leave one of them out")  # fmt: skip
    counts = window_counts(trace, settings.window_s)
    mean, own = float(counts.mean()), len(trace) / trace.span_s
    top = float(np.quantile(counts, settings.percentile / 100, method="higher")) / settings.window_s
    by_chance = _poisson(settings, own).rate
    how = (
        f"peak: {settings.percentile:g} % of the trace's windows of {settings.window_s:g} s have at most "
        f"{format_4_digits(top)} "
        f"requests/s; Poisson arrivals would have {format_4_digits(by_chance)} (the counts' variance is "
        f"{float(counts.var()) / mean:.1f} times the mean, theirs is 1)"
    )
    if abs(busy / own - 1) < 1e-9:
        return top, (how,)
    rate = top * busy / own
    return rate, (
        how,
        f"peak: {format_4_digits(rate)} requests/s, as far above the average of this load as the trace's is",
    )
