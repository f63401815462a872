"""Durations: what histograms and summaries tell of them, against plain counting."""

import random
from collections.abc import Callable

import pytest

from millrace.errors import ConfigError
from millrace.model_repository.config.message_fields import empty
from millrace.model_repository.config.model_config import ModelConfig
from millrace.model_repository.metrics.duration_counters import (
    N_BOUNDS,
    BoundedHistogram,
    Duration,
    DurationHistogram,
    RecentWindow,
)
from millrace.model_repository.metrics.metrics_config import MetricsConfig


def edges() -> list[int]:
    """Nanoseconds around each bound, and some that are none."""
    found = [-5, 0, 1, 999]
    for i in range(N_BOUNDS + 2):
        found += [(1000 << i) - 1, 1000 << i, (1000 << i) + 1]
    return found + [random.Random(0).randrange(1 << 40) for _ in range(200)]


@pytest.mark.parametrize(
    "make, bounds_ns",
    [
        (DurationHistogram, {str(1 << i): 1000 << i for i in range(N_BOUNDS)}),
        (lambda: BoundedHistogram((0.5, 3.0, 200.0), 1_000_000), {"0.5": 500_000, "3": 3_000_000, "200": 200_000_000}),
    ],
)
def test_a_bucket_holds_what_is_not_longer_than_its_bound(
    make: Callable[[], DurationHistogram], bounds_ns: dict[str, int]
) -> None:
    histogram, durations_ns = make(), edges()
    for ns in durations_ns:
        histogram.add(ns)
    assert dict(histogram.cumulative()) == {
        le: sum(ns <= bound for ns in durations_ns) for le, bound in bounds_ns.items()
    }
    assert histogram.count == len(durations_ns)
    assert histogram.ns == sum(ns for ns in durations_ns if ns > 0)


def test_a_summary_has_the_last_durations_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr("millrace.model_repository.metrics.duration_counters.time.monotonic", lambda: now_s[0])
    recent = RecentWindow(DurationHistogram())
    recent.add(77_000_000)
    now_s[0] = 61.0
    assert str(recent.quantiles((0.5,))[0][1]) == "nan", "that was more than a minute ago"
    for us in random.Random(1).sample(range(1, 101), 100):
        recent.add(us * 1000)
    assert recent.quantiles((0.0, 0.5, 0.99, 1.0)) == [(0.0, 1.0), (0.5, 51.0), (0.99, 100.0), (1.0, 100.0)]
    assert recent.count == 101 and recent.ns == 77_000_000 + 5050 * 1000, "these two are of all"


def test_what_is_measured_is_said_in_tritons_words() -> None:
    assert MetricsConfig.from_flags(()) == MetricsConfig(True, True, False)
    said = ("summary_latencies=true", "histogram_latencies=FALSE", "summary_quantiles=0.5:0.05,0.9:0.01")
    assert MetricsConfig.from_flags(said) == MetricsConfig(True, False, True, (0.5, 0.9))
    assert MetricsConfig.from_flags(("counter_latencies=0",)) == MetricsConfig(False, False, False), (
        "a histogram's sum is the counter"
    )
    assert MetricsConfig.from_flags(("counter_latencies=0", "histogram_latencies=1")) == MetricsConfig(
        False, True, False
    )


def test_first_responses_are_told_in_whole_milliseconds() -> None:
    first = MetricsConfig.from_flags(()).first_response(empty(ModelConfig))
    first.add(1_999_999)
    first.add(100_000_001)
    assert first.ns == 101_000_000 and dict(first.cumulative())["100"] == 2


@pytest.mark.parametrize(
    "said, fragment",
    [
        (("histogram_latency=true",), 'did you mean "histogram_latencies"'),
        (("summary_latencies",), "KEY=VALUE"),
        (("summary_latencies=yes",), "true or false"),
        (("summary_quantiles=2",), "numbers from 0 to 1"),
        (("summary_quantiles=a",), "numbers from 0 to 1"),
        (("counter_latencies=1", "counter_latencies=1"), "twice"),
    ],
)
def test_a_mistake_in_what_is_measured_is_said(said: tuple[str, ...], fragment: str) -> None:
    with pytest.raises(ConfigError, match=fragment):
        MetricsConfig.from_flags(said)


@pytest.mark.parametrize(
    "make",
    [
        Duration,
        DurationHistogram,
        lambda: BoundedHistogram((0.5, 3.0), 1_000_000),
        lambda: RecentWindow(DurationHistogram()),
    ],
)
def test_durations_are_counted_and_summed(make: Callable[[], Duration | DurationHistogram | RecentWindow]) -> None:
    each_ns = [ns for ns in edges() if ns >= 0]
    measured = make()
    for ns in each_ns:
        measured.add(ns)
    assert measured.to_dict() == {"count": len(each_ns), "ns": sum(each_ns)}
