"""Answers to a load: the course's exercises, arithmetic by hand, recorded traces, contradictions."""

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import ConfigError
from millrace.size.load.load_forecast import forecast_demand, hourly_peaks, parse_calls, supported_users
from millrace.size.question.settings import DemandSettings
from tests.support.shared import NOT_BESIDE, SHARED

DAY = 86_400
AZURE = SHARED / "data" / "traces" / "AzureLLMInferenceTrace_conv.csv"


def test_the_course_exercise() -> None:
    """30 M calls a year of 10 minutes with 3 requests a minute, and a peak of 7 times that: 28.5 and 200 a second."""
    found = forecast_demand(DemandSettings(calls="30M/year", requests_each=30, burst=7, percentile=0))
    assert found.average == pytest.approx(28.5, abs=0.05) and found.peak == pytest.approx(200, abs=0.5)
    assert found.a_day == pytest.approx(30e6 * 30 / 365)


@pytest.mark.parametrize("asked, peak", [
    ({"average": 64}, 77), ({"average": 7}, 12), ({"average": 200}, 224), ({"average": 31}, 40),
    ({"average": 64, "window_s": 30}, 66.4), ({"average": 64, "split": 8}, 104), ({"average": 32, "burst": 2}, 77),
    ({"average": 64, "percentile": 0}, 64), ({"average": 64, "percentile": 0, "burst": 2}, 128),
    ({"rate": 31}, 31), ({"rate": 31, "average": 7}, 31),
    ({"users": 64 * DAY / 3}, 77), ({"users": 64 * DAY, "requests_each": 1}, 77), ({"calls": f"{64 * DAY}/day"}, 77),
    ({"calls": "64/second"}, 77), ({"calls": f"{64 * DAY * 365 / 12} a month"}, 77),
    ({"average": 0.03}, 0.03), ({"average": 0.03, "burst": 1.5}, 0.045), ({"average": 0.3}, 1),
    ({"average": 64 / 3, "hours": 8}, 77), ({"average": 64 / 3, "daily": ",".join(["0"] * 16 + ["5"] * 8)}, 77),
])  # fmt: skip
def test_peaks(asked: dict[str, Any], peak: float) -> None:
    assert forecast_demand(DemandSettings(**asked)).peak == pytest.approx(peak, abs=0.05)


def test_users_of_a_rate_are_the_way_back() -> None:
    """70.7 requests/s through 8 hours, 3 of each: 679 k users, who need that rate on average in these hours."""
    n = supported_users(70.7, 8, 3)
    assert n == pytest.approx(679e3, rel=1e-3)
    assert forecast_demand(DemandSettings(users=n, hours=8, percentile=0)).peak == pytest.approx(70.7)


def test_hours_of_a_day() -> None:
    asked = DemandSettings(average=10, daily=",".join(["1"] * 12 + ["3"] * 12))
    found = forecast_demand(asked)
    assert found.hours == pytest.approx([5.0] * 12 + [15.0] * 12) and sum(found.hours) / 24 == pytest.approx(10)
    assert hourly_peaks(asked, found) == (9.0,) * 12 + (22.0,) * 12, "ppf(0.95, 5) and ppf(0.95, 15) of SciPy"
    alone = DemandSettings(rate=5)
    assert hourly_peaks(alone, forecast_demand(alone)) == (5.0,) * 24
    part = forecast_demand(DemandSettings(average=10, hours=7.5, percentile=0))
    assert part.hours[14:17] == (part.peak, part.peak / 2, 0) and part.peak == pytest.approx(32)
    for hours, busy in ((8, range(8, 16)), (16, range(8, 24)), (20.5, range(3, 24)), (24, range(24))):
        found = forecast_demand(DemandSettings(average=10, hours=hours, percentile=0))
        assert [i for i in range(24) if found.hours[i] > 0] == list(busy), "by day, and nobody asks at midnight"


def trace(tmp_path: Path, times_s: list[float]) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({"timestamp": t * 1e3, "input_length": 100, "output_length": 10}) + "\n"
                            for t in times_s))  # fmt: skip
    return str(path)


def test_a_trace_has_its_own_peak(tmp_path: Path) -> None:
    """100 seconds with one request each, but six of them with ten: 95 % of seconds have at most ten, 90 % one."""
    times = [float(s) for s in range(101)] + [s + 0.01 * i for s in range(6) for i in range(1, 10)]
    path = trace(tmp_path, sorted(times))
    assert forecast_demand(DemandSettings(trace=path)).peak == 10
    with pytest.raises(ConfigError, match=r"a peak of 1 requests/s, and 1\.55 on average"):
        forecast_demand(DemandSettings(trace=path, percentile=90))
    assert forecast_demand(DemandSettings(trace=path, percentile=90, window_s=50)).peak == (50 + 54) / 50
    doubled = forecast_demand(DemandSettings(trace=path, average=2 * len(times) / 100))
    assert doubled.peak == pytest.approx(20), "a peak is as far above the mean as there"
    assert "Poisson" in doubled.how[-2]


@pytest.mark.parametrize("text, n, period", [
    ("30M/year", 3e7, "year"), ("5000/day", 5000, "day"), ("1,500 per hour", 1500, "hour"),
    ("2.5k a month", 2500, "month"), ("1e6/week", 1e6, "week"), ("2B/year", 2e9, "year"),
])  # fmt: skip
def test_calls(text: str, n: float, period: str) -> None:
    assert parse_calls(text) == (n, period)


@pytest.mark.parametrize("asked, said", [
    ({}, "how many requests come is not said"),
    ({"average": 5, "users": 100}, "said 2 times: by average and users"),
    ({"rate": 5, "average": 6}, "a peak of 5 requests/s"),
    ({"rate": 5, "average": 2, "hours": 8}, "a peak of 5 requests/s, and 6 on average when they come"),
    ({"rate": 5, "burst": 2}, "burst beside a peak"),
    ({"rate": 5, "average": 2, "burst": 2}, "the peak is said, and what would make one"),
    ({"average": 5, "percentile": 0, "split": 2}, "--split without a percentile"),
    ({"average": 5, "hours": 8, "daily": "1"}, "hours and daily"),
    ({"average": 5, "daily": "1,2,3"}, "24 numbers"), ({"average": 5, "daily": "0," * 23 + "0"}, "24 numbers"),
    ({"average": 5, "daily": "1," * 23 + "nan"}, "24 numbers"),
    ({"calls": "many/day"}, "a number and a period"), ({"calls": "5/fortnight"}, "a number and a period"),
    ({"calls": "0/day"}, "above 0"), ({"average": float("nan")}, "--average"),
    ({"trace": "none.jsonl"}, "cannot be read"),
])  # fmt: skip
def test_contradictions_are_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as found:
        forecast_demand(DemandSettings(**asked))
    assert said in str(found.value)


def test_broken_traces_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1}\n{"timestamp": "x"}\n')
    with pytest.raises(ConfigError, match=r"t\.jsonl, line 2"):
        forecast_demand(DemandSettings(trace=str(path)))
    at_once = trace(tmp_path, [1.0, 1.0])
    with pytest.raises(ConfigError, match="all requests of the trace came at once"):
        forecast_demand(DemandSettings(trace=at_once))
    with pytest.raises(ConfigError, match="in windows of 60 s"):
        forecast_demand(DemandSettings(trace=trace(tmp_path, [0.0, 30.0]), window_s=60))
    with pytest.raises(ConfigError, match="its own windows"):
        raise_burst = DemandSettings(trace=trace(tmp_path, [0.0, 30.0]), burst=2)
        forecast_demand(raise_burst)


@pytest.mark.skipif(not AZURE.is_file(), reason=NOT_BESIDE)
def test_an_hour_of_real_conversations() -> None:
    """Azure's of 2023, as counted elsewhere: 5.53 requests/s on average, p95 of a second 11, of Poisson arrivals 10."""
    found = forecast_demand(DemandSettings(trace=str(AZURE)))
    assert found.average == pytest.approx(5.53, abs=0.005) and found.peak == 11
    assert "Poisson arrivals would have 10 " in found.how[-1] and found.trace is not None and len(found.trace) == 19_366


def test_what_was_said_stands_in_its_own_digits() -> None:
    assert forecast_demand(DemandSettings(rate=29_170_125.0)).how == ("peak: 29,170,125 requests/s, as said",)
    assert forecast_demand(DemandSettings(average=0.25)).how[0] == "average: 0.25 requests/s, as said"
