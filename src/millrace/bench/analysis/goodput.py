"""Requests that keep all limits: how many a second, and which share with its interval. A failure keeps none."""

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.bench.analysis.intervals import Interval
from millrace.bench.analysis.metrics import NOT_COUNTED, OURS
from millrace.bench.client.request_record import Answer
from millrace.bench.names import READING
from millrace.bench.run.run import Record
from millrace.errors import ConfigError, nearest
from millrace.evaluate.paired_comparison import wilson

SHORT = {
    "ttft": "time_to_first_token", "ttst": "time_to_second_token", "itl": "inter_token_latency",
    "tpot": "inter_token_latency", "latency": "request_latency", "e2el": "request_latency",
}  # fmt: skip
READING_MS = (90.0, 200.0)  # a token: as fast as people read, and as slow as they bear
_METRICS = {m.name: m for m in OURS if m.unit == "ms"}
# What a user felt who came when the load wanted it, not when a client had a place for it (coordinated omission)
_FELT = {name: f"{name}_from_intended" for name in ("time_to_first_token", "request_latency")}
_OF_TOKENS = ("time_to_second_token", "inter_token_latency")  # which an answer of one token does not have
OF_STREAMS = ("time_to_first_token", "time_to_first_token_from_intended", *_OF_TOKENS)


@dataclass(frozen=True, slots=True)
class Limits:
    """Each a metric's name and the most it may be, in ms. A request must keep all."""

    most_ms: tuple[tuple[str, float], ...]

    @property
    def says(self) -> str:
        return " and ".join(f"{name} <= {most:g} ms" for name, most in self.most_ms)

    def keeps(self, answer: Answer) -> bool:
        """Times count from when the load wanted it sent. A single token has no time between tokens, and keeps any."""
        return answer.failure is None and all(_keeps(answer, name, most) for name, most in self.most_ms)


def _keeps(answer: Answer, name: str, most_ms: float) -> bool:
    value = _METRICS[_FELT.get(name, name)].value(answer)
    return name in _OF_TOKENS and answer.n_output <= 1 if value is None else value <= most_ms


def check_limits(limits: Sequence[Limits], streams: bool) -> None:
    """raises ConfigError for those that no answer could break"""
    for name, most in (pair for one in limits for pair in one.most_ms):
        if name in OF_STREAMS and not streams:
            raise ConfigError(
                f"{name} <= {most:g} ms, of answers that come in one piece", "limits on request_latency",
                "leave it out, or let answers be streamed",
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Goodput:
    """share: of all requests that were not cancelled by us"""

    limits: Limits
    requests_per_s: float
    share: float
    interval: Interval


def parse_limits(words: Sequence[str]) -> list[Limits]:
    """`ttft:500 itl:50` is one set of limits, `reading-speed` two more. raises ConfigError"""
    found, presets = [], []
    for word in words:
        name, _, most = word.partition(":")
        if word == READING:
            presets = [Limits((("inter_token_latency", ms),)) for ms in READING_MS]
            continue
        metric = SHORT.get(name, name)
        if metric not in _METRICS:
            raise ConfigError(f'--goodput knows no "{name}"', nearest(name, [*SHORT, *_METRICS, READING]), "correct it")
        try:
            most_ms = float(most)
        except ValueError:
            most_ms = -1.0
        if not 0 < most_ms <= 1e9:
            raise ConfigError(f'--goodput {word} has the limit "{most}"', "milliseconds", f"{name}:500")
        found.append((metric, most_ms))
    return ([Limits(tuple(found))] if found else []) + presets


def goodput(records: Sequence[Record], limits: Limits, duration_s: float) -> Goodput:
    counted = [r.answer for r in records if r.answer.failure not in NOT_COUNTED]
    n = sum(map(limits.keeps, counted))
    rate = n / duration_s if duration_s > 0 else 0.0
    return Goodput(limits, rate, n / len(counted) if counted else 0.0, wilson(n, len(counted)))
