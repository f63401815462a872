"""One load after another, each heavier, until a limit breaks; then between the last that kept it and that one."""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from millrace.bench.analysis.goodput import Limits, check_limits
from millrace.bench.analysis.intervals import Interval
from millrace.bench.analysis.metrics import NOT_COUNTED, Metrics
from millrace.bench.client.client_load import Effort
from millrace.bench.run.run import Record
from millrace.bench.run.server_load import NOTHING, ServerLoad
from millrace.evaluate.paired_comparison import wilson

MOST_POINTS = 40
_CLOSE = 1.15  # levels that differ by less are not told apart


@dataclass(frozen=True, slots=True)
class SweepLimits:
    """In ms, of a percentile of requests; None: no limit."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    percentile: int = 90

    def keeps(self, metrics: Metrics) -> bool:
        """First tokens count from when the load wanted them asked for: a rate that is not reached is not kept. Answers
        of one token have no ITL. A failure breaks them, too, and so does a run without an answer."""
        if not metrics.n or metrics.n_failed:
            return False
        ttft, itl = (metrics.of_requests.get(n) for n in ("time_to_first_token_from_intended", "inter_token_latency"))
        if self.ttft_ms is not None and (ttft is None or ttft.percentiles[self.percentile] > self.ttft_ms):
            return False
        return self.itl_ms is None or itl is None or itl.percentiles[self.percentile] <= self.itl_ms

    def surely_keeps(self, records: Sequence[Record]) -> bool | None:
        """Whether it is so of all such requests: None where the interval of a share within its limit (Wilson, 95 %)
        has the percentile in it. A failure is a failure, however few."""
        counted = [r.answer for r in records if r.answer.failure not in NOT_COUNTED]
        if not counted or any(answer.failure is not None for answer in counted):
            return False
        shares = [wilson(sum(map(one.keeps, counted)), len(counted)) for one in self._each]
        if any(100 * high < self.percentile for _, high in shares):
            return False
        return True if all(100 * low >= self.percentile for low, _ in shares) else None

    @property
    def _each(self) -> list[Limits]:
        names = (("time_to_first_token", self.ttft_ms), ("inter_token_latency", self.itl_ms))
        return [Limits(((name, most),)) for name, most in names if most is not None]

    def check(self, streams: bool) -> None:
        """raises ConfigError where no answer could break them"""
        check_limits(self._each, streams)

    @property
    def says(self) -> str:
        parts = [f"{name} <= {most:g} ms" for name, most in (("TTFT", self.ttft_ms), ("ITL", self.itl_ms)) if most]
        return f"{' and '.join(parts)} for {self.percentile} % of requests" if parts else "no failures"


@dataclass(frozen=True, slots=True)
class LevelResult:
    """What was measured of one level. server: what it says of its own load meanwhile; effort: of this client; surely:
    what `surely_keeps` says; ended: why it ended before its time, else "" """

    metrics: Metrics
    server: ServerLoad | None = None
    effort: Effort = Effort()  # noqa: RUF009 (frozen)
    surely: bool | None = None
    ended: str = ""


@dataclass(frozen=True, slots=True)
class Point:
    """level: users at a time, or requests a second; keeps: these requests; surely: all such requests, None where they
    are too few to say"""

    level: float
    metrics: Metrics
    keeps: bool
    server: ServerLoad | None = None
    effort: Effort = Effort()  # noqa: RUF009
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
        """yes, no, or "too few to say"."""
        return {True: "yes", False: "no", None: "too few to say"}[self.surely]

    def value(self, name: str, percentile: int = 50) -> float | None:
        found = self.metrics.of_requests.get(name)
        return None if found is None else found.percentiles[percentile]

    def interval(self, name: str, at: str) -> Interval | None:
        """Of a percentile ("p50"); None, too, where there are too few requests."""
        found = self.metrics.of_requests.get(name)
        return None if found is None else found.intervals.get(at)


async def swept(
    first: float, most: float, whole: bool, limits: SweepLimits, run: Callable[[float], Awaitable[LevelResult | None]]
) -> list[Point]:
    """Doubles from `first` to `most`, then halves the gap. whole: levels are whole numbers. run: None ends the sweep"""
    points: list[Point] = []

    async def at(level: float) -> bool | None:
        reached = await run(level)
        if reached is None:
            return None
        keeps = limits.keeps(reached.metrics) and not reached.ended  # a load that was given up is not kept
        surely = False if reached.ended else reached.surely
        points.append(Point(level, reached.metrics, keeps, reached.server, reached.effort, surely, reached.ended))
        return points[-1].keeps

    level, good, bad = first, None, None
    while bad is None and len(points) < MOST_POINTS:
        kept = await at(level)
        if kept is None:
            return _ordered(points)
        good, bad = (level, None) if kept else (good, level)
        if level >= most:
            break
        level = min(level * 2, most)
    while good and bad and bad / good > _CLOSE and len(points) < MOST_POINTS:
        level = math.sqrt(good * bad)
        level = round(level) if whole else float(f"{level:.3g}")
        if level in (good, bad):
            break
        kept = await at(level)
        if kept is None:
            break
        good, bad = (level, bad) if kept else (good, level)
    return _ordered(points)


def _ordered(points: Sequence[Point]) -> list[Point]:
    return sorted(points, key=lambda p: p.level)


@dataclass(frozen=True, slots=True)
class Throughput:
    """By what levels are compared."""

    unit: str
    of: Callable[[Point], float]


def throughput(points: Sequence[Point]) -> Throughput:
    """Output tokens a second; requests a second where no level has such tokens (embeddings)."""
    if any(p.tokens_per_s for p in points):
        return Throughput("tokens/s", lambda p: p.tokens_per_s)
    return Throughput("requests/s", lambda p: p.requests_per_s)


@dataclass(frozen=True, slots=True)
class Best:
    """within: the most throughput of those whose requests keep the limits, surely or not; knee: the most throughput for
    its latency"""

    within: Point | None
    latency: Point
    throughput: Point
    knee: Point


def best(points: Sequence[Point]) -> Best | None:
    """None where nothing was answered."""
    answered = [p for p in points if p.metrics.n]
    if not answered:
        return None
    kept, of = [p for p in answered if p.keeps], throughput(points).of

    def latency(point: Point) -> float:
        return point.value("request_latency") or math.inf

    return Best(
        max(kept, key=of, default=None), min(answered, key=latency), max(answered, key=of),
        max(answered, key=lambda p: of(p) / latency(p)),
    )  # fmt: skip


def limited(points: Sequence[Point]) -> str:
    """What limits the server, by its own metrics: where a limit breaks first, else where the most throughput is."""
    found = best(points)
    if found is None:
        return NOTHING
    broken = [p for p in points if not p.keeps and p.metrics.n]
    point = min(broken, key=lambda p: p.level) if broken else found.throughput
    return NOTHING if point.server is None else f"At {point.level:g}: {point.server.says}"


def on_front(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats in both throughput and latency (Pareto)."""
    answered, of = [p for p in points if p.metrics.n], throughput(points).of

    def beaten(one: Point) -> bool:
        latency = one.value("request_latency") or 0.0
        return any(
            of(p) >= of(one) and (p.value("request_latency") or 0.0) <= latency and p is not one
            and (of(p), p.value("request_latency")) != (of(one), latency)
            for p in answered
        )  # fmt: skip

    return [p for p in answered if not beaten(p)]
