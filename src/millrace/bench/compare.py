"""Two servers, or two results, beside each other: how far apart they are, how surely, and what could have been seen.

Everything is on a logarithmic scale, where "B takes 5 % longer" and its interval mean the same for every metric. Rounds
go A B, B A, A B, ... with the same questions, so that a machine that slows down slows both.
"""

import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from millrace.bench.answer import Answer, Failure
from millrace.bench.intervals import Interval, student_t
from millrace.bench.metrics import itl_ms, latency_ms, measured, ttft_ms
from millrace.bench.plan import Plan, measure
from millrace.bench.run import Run
from millrace.errors import ConfigError

Measuring = Callable[[Plan, Callable[[Run], None]], Awaitable[Run]]
_POWER_Z = 0.8416212335729143  # 80 % of the effects of that size would be seen
_FEWEST = 3
MOST_LINES, MOST_LINE = 10_000_000, 64 << 20
# name, whether more is better, the value of one answer
PER_REQUEST: tuple[tuple[str, bool, Callable[[Answer], float | None]], ...] = (
    ("time_to_first_token", False, ttft_ms), ("inter_token_latency", False, itl_ms),
    ("request_latency", False, latency_ms),
)  # fmt: skip
RATES = (("output_tokens_per_s", True), ("requests_per_s", True))


@dataclass(frozen=True, slots=True)
class Difference:
    """percent: of B over A; interval: its 95 %; surely: its 99 %, since five metrics are looked at, and one of them
    would fall outside by chance too often; visible: percent that would have been seen four times out of five"""

    name: str
    more_is_better: bool
    a: float
    b: float
    n: int
    percent: float
    interval: Interval | None
    visible: float | None
    surely: Interval | None = None

    @property
    def verdict(self) -> str:
        """better, worse, "no difference seen", or "too few to say"."""
        if self.interval is None:
            return "too few to say"
        low, high = self.interval
        if low <= 0 <= high:
            return "no difference seen"
        return "better" if (low > 0) == self.more_is_better else "worse"

    def is_worse_by(self, allowed_percent: float) -> bool:
        """Surely, by more than that: all of `surely` lies beyond. A rate that is halved is worse by 100 %."""
        if self.surely is None:
            return False
        slower = (1 / (1 + self.surely[1] / 100) - 1) * 100 if self.more_is_better else self.surely[0]
        return slower > allowed_percent


def of_pairs(name: str, more_is_better: bool, a: Sequence[float], b: Sequence[float]) -> Difference:
    """One value of each round; what both rounds of a pair have in common cancels."""
    logs = np.log(np.asarray(b) / np.asarray(a))
    n = logs.size
    error = float(logs.std(ddof=1)) / math.sqrt(n) if n >= _FEWEST else None
    return _difference(name, more_is_better, (_geometric(a), _geometric(b), n), float(logs.mean()), error, n - 1)


def of_samples(name: str, more_is_better: bool, a: Sequence[float], b: Sequence[float]) -> Difference:
    """Values of requests; the ratio of the means, its error by the delta method (Welch's degrees of freedom)."""
    x, y = np.asarray(a), np.asarray(b)
    log, n = math.log(y.mean() / x.mean()), min(x.size, y.size)
    error, freedom = None, 1
    if n >= _FEWEST:
        parts = [float(v.var(ddof=1) / v.mean() ** 2 / v.size) for v in (x, y)]
        error = math.sqrt(sum(parts))
        below = sum(p * p / (v.size - 1) for p, v in zip(parts, (x, y), strict=True))
        freedom = max(1, int(sum(parts) ** 2 / below)) if below else n - 1
    return _difference(name, more_is_better, (float(x.mean()), float(y.mean()), n), log, error, freedom)


def _geometric(values: Sequence[float]) -> float:
    return float(np.exp(np.log(np.asarray(values)).mean()))


def _difference(
    name: str, more_is_better: bool, means: tuple[float, float, int], log: float, error: float | None, freedom: int
) -> Difference:
    a, b, n = means
    interval = surely = visible = None
    if error is not None:
        t, wide = _quantiles(freedom)
        interval = (_percent(log - t * error), _percent(log + t * error))
        surely = (_percent(log - wide * error), _percent(log + wide * error))
        visible = _percent((t + _POWER_Z) * error)
    return Difference(name, more_is_better, a, b, n, _percent(log), interval, visible, surely)


def _quantiles(freedom: int) -> tuple[float, float]:
    """Of Student's t, two-sided: 95 and 99 %."""
    if freedom in _SMALL_T:
        return _SMALL_T[freedom]
    return student_t(freedom), student_t(freedom, _Z99)


_Z99 = 2.5758293035489004
_SMALL_T = {1: (12.706, 63.657), 2: (4.303, 9.925), 3: (3.182, 5.841), 4: (2.776, 4.604), 5: (2.571, 4.032)}
_SMALL_T |= {6: (2.447, 3.707), 7: (2.365, 3.499), 8: (2.306, 3.355)}


def _percent(log: float) -> float:
    return 100 * math.expm1(log)


@dataclass(frozen=True, slots=True)
class Side:
    """Rounds of one of the two."""

    name: str
    runs: list[Run]

    @property
    def n_failed(self) -> int:
        return sum(measured(run.records).n_failed for run in self.runs)


async def interleaved(
    a: Callable[[int], Plan],
    b: Callable[[int], Plan],
    rounds: int,
    on_run: Callable[[Run], None] = lambda run: None,
    measuring: Measuring = measure,
) -> tuple[Side, Side]:
    """a, b: the plan of round 0, 1, ..., of the same questions. In turns: A B, B A, ...; it ends early where a run
    does. measuring: a server, unless said. raises MachineError"""
    sides = (Side(a(0).target.url, []), Side(b(0).target.url, []))
    for i in range(rounds):
        for which in (0, 1) if i % 2 == 0 else (1, 0):
            run = await measuring((a, b)[which](i), on_run)
            sides[which].runs.append(run)
            if run.ended:
                return sides
    return sides


def compared_rounds(a: Side, b: Side) -> list[Difference]:
    """Of each metric the means of rounds that both have."""
    found = []
    pairs = [(measured(x.records), measured(y.records)) for x, y in zip(a.runs, b.runs, strict=False)]
    for name, more_is_better in RATES:
        values = [(getattr(x, name).value, getattr(y, name).value) for x, y in pairs if x.n and y.n]
        found += _of_pairs(name, more_is_better, values)
    for name, more_is_better, _ in PER_REQUEST:
        values = [
            (x.of_requests[name].mean, y.of_requests[name].mean)
            for x, y in pairs if name in x.of_requests and name in y.of_requests
        ]  # fmt: skip
        found += _of_pairs(name, more_is_better, values)
    return found


def _of_pairs(name: str, more_is_better: bool, values: Sequence[tuple[float, float]]) -> list[Difference]:
    used = [(x, y) for x, y in values if x > 0 and y > 0]
    return [of_pairs(name, more_is_better, [x for x, _ in used], [y for _, y in used])] if used else []


def compared_answers(a: Sequence[Answer], b: Sequence[Answer]) -> list[Difference]:
    """Of results that were written; rates have one value there, and are left out."""
    found = []
    for name, more_is_better, value in PER_REQUEST:
        one, other = ([v for v in map(value, answers) if v is not None and v > 0] for answers in (a, b))
        if one and other:
            found.append(of_samples(name, more_is_better, one, other))
    return found


def read_answers(path: Path) -> list[Answer]:
    """Whole answers of `requests.jsonl`, or of the folder that holds it. raises ConfigError"""
    path = path / "requests.jsonl" if path.is_dir() else path
    found = []
    try:
        with path.open(encoding="utf-8") as file:
            for number in range(1, MOST_LINES):
                line = file.readline(MOST_LINE)
                if not line:
                    break
                answer = _read(path, number, line)
                if answer.failure is None:
                    found.append(answer)
    except OSError as error:
        what = f"{path} cannot be read: {error.strerror}"
        raise ConfigError(what, "a result of millrace bench -o", "check the path") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8", "requests.jsonl of millrace bench -o", "check the path") from None
    if not found:
        raise ConfigError(f"{path} holds no whole answer", "one at least", "measure again")
    return found


def _read(path: Path, number: int, line: str) -> Answer:
    try:
        told: Mapping[str, Any] = json.loads(line)
        failure = None if told["failure"] is None else Failure(told["failure"])
        sent_s = float(told["sent"])
        chunks = [sent_s + float(ms) / 1e3 for ms in told["chunk_ms"]]
        end_s, n_told = sent_s + float(told["end_ms"]) / 1e3, told["n_output_told"]
        tokens = [int(n) for n in told["chunk_tokens"]]
        return Answer(
            str(told["id"]), sent_s, sent_s, chunks, tokens, end_s, told["n_prompt"],
            None if n_told is None else int(n_told), failure=failure,
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(
            f"{path}, line {number}: {line.strip():.80}", "a line of requests.jsonl, as millrace bench -o writes it",
            "give that file, or its folder",
        ) from None  # fmt: skip
