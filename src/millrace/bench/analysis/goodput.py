"""Goodput: rate and share of requests within all limits. A failed request is outside them."""

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.bench.analysis.intervals import Interval
from millrace.bench.analysis.metrics import NOT_COUNTED, OURS
from millrace.bench.client.request_record import BenchRecord
from millrace.bench.names import READING
from millrace.bench.run.run import TurnRecord
from millrace.errors import ConfigError, nearest
from millrace.evaluate.paired_comparison import wilson

SHORT = {
    "ttft": "time_to_first_token", "ttst": "time_to_second_token", "itl": "inter_token_latency",
    "tpot": "inter_token_latency", "latency": "request_latency", "e2el": "request_latency",
}  # fmt: skip
READING_MS = (90.0, 200.0)  # per token: fast reading speed, and the slowest that is tolerable
_METRICS = {m.name: m for m in OURS if m.unit == "ms"}
# Latencies from the intended send time, not from the actual one (coordinated omission).
_FELT = {name: f"{name}_from_intended" for name in ("time_to_first_token", "request_latency")}
_OF_TOKENS = ("time_to_second_token", "inter_token_latency")  # undefined for an answer of one token
OF_STREAMS = ("time_to_first_token", "time_to_first_token_from_intended", *_OF_TOKENS)


@dataclass(frozen=True, slots=True)
class GoodputLimits:
    """Limits of a request: names of metrics and their maximum in ms. A request must meet all of them."""

    max_ms: tuple[tuple[str, float], ...]

    @property
    def description(self) -> str:
        return " and ".join(f"{name} <= {most:g} ms" for name, most in self.max_ms)

    def meets(self, answer: BenchRecord) -> bool:
        """Whether a request meets the limits. Times count from the intended send time; one token meets any ITL."""
        return answer.failure is None and all(_meets(answer, name, most) for name, most in self.max_ms)


def _meets(answer: BenchRecord, name: str, max_ms: float) -> bool:
    value = _METRICS[_FELT.get(name, name)].value(answer)
    return name in _OF_TOKENS and answer.n_output <= 1 if value is None else value <= max_ms


def check_limits(limits: Sequence[GoodputLimits], streams: bool) -> None:
    """Refuse limits on token times if answers are not streamed. raises ConfigError"""
    for name, most in (pair for one in limits for pair in one.max_ms):
        if name in OF_STREAMS and not streams:
            raise ConfigError(
                f"{name} <= {most:g} ms, of answers that come in one piece", "limits on request_latency",
                "leave it out, or let answers be streamed",
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests/s within the limits, and their share of all requests that the client did not cancel."""

    limits: GoodputLimits
    requests_per_s: float
    share: float
    interval: Interval


def parse_limits(words: Sequence[str]) -> list[GoodputLimits]:
    """Parse --goodput: `ttft:500 itl:50` is one set of limits, `reading-speed` adds two. raises ConfigError"""
    limits, presets = [], []
    for word in words:
        name, _, most = word.partition(":")
        if word == READING:
            presets = [GoodputLimits((("inter_token_latency", ms),)) for ms in READING_MS]
            continue
        metric = SHORT.get(name, name)
        if metric not in _METRICS:
            raise ConfigError(f'--goodput knows no "{name}"', nearest(name, [*SHORT, *_METRICS, READING]), "correct it")
        try:
            limit_ms = float(most)
        except ValueError:
            limit_ms = -1.0
        if not 0 < limit_ms <= 1e9:
            raise ConfigError(f'--goodput {word} has the limit "{most}"', "milliseconds", f"{name}:500")
        limits.append((metric, limit_ms))
    return ([GoodputLimits(tuple(limits))] if limits else []) + presets


def goodput(records: Sequence[TurnRecord], limits: GoodputLimits, duration_s: float) -> Goodput:
    counted = [r.answer for r in records if r.answer.failure not in NOT_COUNTED]
    n = sum(map(limits.meets, counted))
    rate = n / duration_s if duration_s > 0 else 0.0
    return Goodput(limits, rate, n / len(counted) if counted else 0.0, wilson(n, len(counted)))
