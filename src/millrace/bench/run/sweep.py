"""Load sweep: increases the load until a limit breaks, then bisects between the last good level and that one."""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from millrace.bench.analysis.goodput import GoodputLimits, check_limits
from millrace.bench.analysis.intervals import Interval
from millrace.bench.analysis.metrics import NOT_COUNTED, RunMetrics
from millrace.bench.client.client_load import ClientHealth
from millrace.bench.run.run import TurnRecord
from millrace.bench.run.server_load import NOTHING, ServerLoad
from millrace.evaluate.paired_comparison import wilson

MAX_POINTS = 40
_CLOSE = 1.15  # ratio of levels at which the bisection stops


@dataclass(frozen=True, slots=True)
class SweepLimits:
    """Latency limits in ms on a percentile of requests; None: no limit."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    percentile: int = 90

    def meets(self, metrics: RunMetrics) -> bool:
        """Whether a run meets the limits. TTFT counts from the intended send time, so a rate that is not reached fails.
        Answers of one token have no ITL. Any failure, or a run without answers, breaks the limits."""
        if not metrics.n or metrics.n_failed:
            return False
        ttft, itl = (metrics.of_requests.get(n) for n in ("time_to_first_token_from_intended", "inter_token_latency"))
        if self.ttft_ms is not None and (ttft is None or ttft.percentiles[self.percentile] > self.ttft_ms):
            return False
        return self.itl_ms is None or itl is None or itl.percentiles[self.percentile] <= self.itl_ms

    def surely_keeps(self, records: Sequence[TurnRecord]) -> bool | None:
        """Whether the limits are met with 95 % confidence (Wilson's interval of the share within each limit); None if
        the interval includes the percentile. Any failure breaks the limits."""
        counted = [r.answer for r in records if r.answer.failure not in NOT_COUNTED]
        if not counted or any(answer.failure is not None for answer in counted):
            return False
        shares = [wilson(sum(map(limit_set.meets, counted)), len(counted)) for limit_set in self._limit_sets]
        if any(100 * high < self.percentile for _, high in shares):
            return False
        return True if all(100 * low >= self.percentile for low, _ in shares) else None

    @property
    def _limit_sets(self) -> list[GoodputLimits]:
        names = (("time_to_first_token", self.ttft_ms), ("inter_token_latency", self.itl_ms))
        return [GoodputLimits(((name, most),)) for name, most in names if most is not None]

    def check(self, streams: bool) -> None:
        """Refuse limits that answers without streaming cannot break. raises ConfigError"""
        check_limits(self._limit_sets, streams)

    @property
    def description(self) -> str:
        parts = [f"{name} <= {most:g} ms" for name, most in (("TTFT", self.ttft_ms), ("ITL", self.itl_ms)) if most]
        return f"{' and '.join(parts)} for {self.percentile} % of requests" if parts else "no failures"


@dataclass(frozen=True, slots=True)
class LevelResult:
    """Measurements of one level. server: its load, from its metrics; effort: health of this client

    surely: result of `surely_keeps`; ended: why it ended early, "" otherwise
    """

    metrics: RunMetrics
    server: ServerLoad | None = None
    effort: ClientHealth = ClientHealth()  # noqa: RUF009 (frozen)
    surely: bool | None = None
    ended: str = ""


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """A level of a sweep. level: concurrency, or requests/s; meets: the sample is within the limits

    surely: the limits are met with confidence; None if there are too few requests to tell
    """

    level: float
    metrics: RunMetrics
    meets: bool
    server: ServerLoad | None = None
    effort: ClientHealth = ClientHealth()  # noqa: RUF009
    surely: bool | None = None
    ended: str = ""

    @property
    def tokens_per_s(self) -> float:
        return self.metrics.output_tokens_per_s.value

    @property
    def requests_per_s(self) -> float:
        return self.metrics.requests_per_s.value

    @property
    def verdict(self) -> str:
        """Return "yes", "no" or "too few to say"."""
        return {True: "yes", False: "no", None: "too few to say"}[self.surely]

    def value(self, name: str, percentile: int = 50) -> float | None:
        stats = self.metrics.of_requests.get(name)
        return None if stats is None else stats.percentiles[percentile]

    def interval(self, name: str, at: str) -> Interval | None:
        """Return the interval of a percentile ("p50"); None if there are too few requests."""
        stats = self.metrics.of_requests.get(name)
        return None if stats is None else stats.intervals.get(at)


async def run_sweep(
    first: float,
    max_level: float,
    whole_levels: bool,
    limits: SweepLimits,
    run: Callable[[float], Awaitable[LevelResult | None]],
) -> list[SweepPoint]:
    """Double the level from `first` to `max_level`, then bisect. run: measures a level; None ends the sweep"""
    points: list[SweepPoint] = []

    async def at(level: float) -> bool | None:
        reached = await run(level)
        if reached is None:
            return None
        meets = limits.meets(reached.metrics) and not reached.ended  # an aborted load does not count as met
        surely = False if reached.ended else reached.surely
        points.append(SweepPoint(level, reached.metrics, meets, reached.server, reached.effort, surely, reached.ended))
        return points[-1].meets

    level, good, bad = first, None, None
    while bad is None and len(points) < MAX_POINTS:
        within = await at(level)
        if within is None:
            return _sort_by_level(points)
        good, bad = (level, None) if within else (good, level)
        if level >= max_level:
            break
        level = min(level * 2, max_level)
    while good and bad and bad / good > _CLOSE and len(points) < MAX_POINTS:
        level = math.sqrt(good * bad)
        level = round(level) if whole_levels else float(f"{level:.3g}")
        if level in (good, bad):
            break
        within = await at(level)
        if within is None:
            break
        good, bad = (level, bad) if within else (good, level)
    return _sort_by_level(points)


def _sort_by_level(points: Sequence[SweepPoint]) -> list[SweepPoint]:
    return sorted(points, key=lambda p: p.level)


@dataclass(frozen=True, slots=True)
class Throughput:
    """The throughput metric by which levels are compared."""

    unit: str
    value: Callable[[SweepPoint], float]


def throughput(points: Sequence[SweepPoint]) -> Throughput:
    """Return output tokens/s as the metric, or requests/s if there are no output tokens (embeddings)."""
    if any(p.tokens_per_s for p in points):
        return Throughput("tokens/s", lambda p: p.tokens_per_s)
    return Throughput("requests/s", lambda p: p.requests_per_s)


@dataclass(frozen=True, slots=True)
class Best:
    """The best levels. within: highest throughput within the limits; latency: lowest latency; throughput: highest

    knee: highest ratio of throughput to latency
    """

    within: SweepPoint | None
    latency: SweepPoint
    throughput: SweepPoint
    knee: SweepPoint


def best(points: Sequence[SweepPoint]) -> Best | None:
    """Return the best levels; None if nothing was answered."""
    answered = [p for p in points if p.metrics.n]
    if not answered:
        return None
    within_limits, value_of = [p for p in answered if p.meets], throughput(points).value

    def latency(point: SweepPoint) -> float:
        return point.value("request_latency") or math.inf

    return Best(
        max(within_limits, key=value_of, default=None), min(answered, key=latency), max(answered, key=value_of),
        max(answered, key=lambda p: value_of(p) / latency(p)),
    )  # fmt: skip


def limiting_factor(points: Sequence[SweepPoint]) -> str:
    """Describe what limits the server, at the first level that breaks a limit or at the highest throughput."""
    best_points = best(points)
    if best_points is None:
        return NOTHING
    broken = [p for p in points if not p.meets and p.metrics.n]
    point = min(broken, key=lambda p: p.level) if broken else best_points.throughput
    return NOTHING if point.server is None else f"At {point.level:g}: {point.server.description}"


def on_front(points: Sequence[SweepPoint]) -> list[SweepPoint]:
    """Return the Pareto front of throughput and latency."""
    answered, value_of = [p for p in points if p.metrics.n], throughput(points).value

    def beaten(point: SweepPoint) -> bool:
        latency = point.value("request_latency") or 0.0
        return any(
            value_of(p) >= value_of(point) and (p.value("request_latency") or 0.0) <= latency and p is not point
            and (value_of(p), p.value("request_latency")) != (value_of(point), latency)
            for p in answered
        )  # fmt: skip

    return [p for p in answered if not beaten(p)]
