"""Comparison of two servers or results: differences with confidence intervals and the detectable effect size.

Statistics use a logarithmic scale, on which "B takes 5 % longer" means the same for every metric. Rounds alternate
A B, B A, A B, ... with the same requests, so that a machine that slows down affects both sides.
"""

import json
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from millrace.bench.analysis.intervals import Z99, Interval, student_t
from millrace.bench.analysis.metrics import (
    NOT_COUNTED,
    compute_metrics,
    good,
    itl_ms,
    latency_from_intended_ms,
    latency_ms,
    ttft_from_intended_ms,
    ttft_ms,
)
from millrace.bench.client.client_load import ClientHealth
from millrace.bench.client.request_record import BenchRecord, Failure
from millrace.bench.report.exports import REQUESTS, SUMMARY
from millrace.bench.run.plan import BenchPlan, measure
from millrace.bench.run.run import Run
from millrace.errors import ConfigError
from millrace.tune.trace_formats import MAX_TOKENS

Measuring = Callable[[BenchPlan, Callable[[Run], None]], Awaitable[Run]]
_POWER_Z = 0.8416212335729143  # 80 % power
FEWEST = 3
MAX_LINES, MAX_LINE, MAX_SUMMARY = 10_000_000, 64 << 20, 64 << 20
MAX_TIME = 1e12  # ms, or seconds since 1970
# name, whether more is better, the value of one answer
PER_REQUEST: tuple[tuple[str, bool, Callable[[BenchRecord], float | None]], ...] = (
    ("time_to_first_token", False, ttft_ms), ("inter_token_latency", False, itl_ms),
    ("request_latency", False, latency_ms), ("time_to_first_token_from_intended", False, ttft_from_intended_ms),
    ("request_latency_from_intended", False, latency_from_intended_ms),
)  # fmt: skip
RATES = (("output_tokens_per_s", True), ("requests_per_s", True))


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of one metric. percent: B relative to A; interval: 95 % confidence

    surely: 99 % confidence, because several metrics are tested together; visible: effect in percent that would be
    detected four times out of five
    """

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
        """Return "better", "worse", "no difference seen" or "too few to say"."""
        if self.interval is None:
            return "too few to say"
        low, high = self.interval
        if low <= 0 <= high:
            return "no difference seen"
        return "better" if (low > 0) == self.more_is_better else "worse"

    def is_worse_by(self, allowed_percent: float) -> bool:
        """Whether all of `surely` lies beyond the allowed percent. A rate that is halved is worse by 100 %."""
        if self.surely is None:
            return False
        slower = (1 / (1 + self.surely[1] / 100) - 1) * 100 if self.more_is_better else self.surely[0]
        return slower > allowed_percent


def compare_pairs(name: str, more_is_better: bool, a: Sequence[float], b: Sequence[float]) -> Difference:
    """Compare one value per round; what both rounds of a pair have in common cancels out."""
    logs = np.log(np.asarray(b) / np.asarray(a))
    n = logs.size
    error = float(logs.std(ddof=1)) / math.sqrt(n) if n >= FEWEST else None
    return _difference(name, more_is_better, (_geometric(a), _geometric(b), n), float(logs.mean()), error, n - 1)


def compare_samples(name: str, more_is_better: bool, a: Sequence[float], b: Sequence[float]) -> Difference:
    """Compare values of requests by the ratio of means, with the delta method (Welch's degrees of freedom)."""
    x, y = np.asarray(a), np.asarray(b)
    log, n = math.log(y.mean() / x.mean()), min(x.size, y.size)
    error, freedom = None, 1
    if n >= FEWEST:
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
        t, wide = quantiles(freedom)
        interval = (_percent(log - t * error), _percent(log + t * error))
        surely = (_percent(log - wide * error), _percent(log + wide * error))
        visible = _percent((t + _POWER_Z) * error)
    return Difference(name, more_is_better, a, b, n, _percent(log), interval, visible, surely)


def quantiles(freedom: int) -> tuple[float, float]:
    """Return the two-sided 95 and 99 % quantiles of Student's t."""
    if freedom in _SMALL_T:
        return _SMALL_T[freedom]
    return student_t(freedom), student_t(freedom, Z99)


_SMALL_T = {1: (12.706, 63.657), 2: (4.303, 9.925), 3: (3.182, 5.841), 4: (2.776, 4.604), 5: (2.571, 4.032)}
_SMALL_T |= {6: (2.447, 3.707), 7: (2.365, 3.499), 8: (2.306, 3.355)}


def _percent(log: float) -> float:
    return 100 * math.expm1(log)


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """The rounds of one side."""

    runs: list[Run]

    @property
    def answers(self) -> list[BenchRecord]:
        return [answer for run in self.runs for answer in good(run.records)]

    @property
    def n_failed(self) -> int:
        return sum(r.answer.failure not in (None, *NOT_COUNTED) for run in self.runs for r in run.records)

    @property
    def n(self) -> int:
        """Return the number of requests, without those that the client gave up."""
        return len(self.answers) + self.n_failed

    @property
    def efforts(self) -> list[ClientHealth]:
        """Return the health of this client in each round."""
        return [ClientHealth.from_run(run) for run in self.runs]


async def run_interleaved(
    a: Callable[[int], BenchPlan],
    b: Callable[[int], BenchPlan],
    rounds: int,
    on_run: Callable[[Run], None] = lambda run: None,
    measuring: Measuring = measure,
) -> tuple[ComparedRun, ComparedRun]:
    """Run rounds of both sides alternately: A B, B A, ...; ends early if a run does.

    a, b: return the plan of round 0, 1, ..., with the same requests; measuring: runs a plan. raises MachineError
    """
    sides = (ComparedRun([]), ComparedRun([]))
    for i in range(rounds):
        for which in (0, 1) if i % 2 == 0 else (1, 0):
            run = await measuring((a, b)[which](i), on_run)
            sides[which].runs.append(run)
            if run.ended:
                return sides
    return sides


def compare_rounds(a: ComparedRun, b: ComparedRun) -> list[Difference]:
    """Compare the means of rounds, for each metric that both sides have."""
    differences = []
    pairs = [(compute_metrics(x.records), compute_metrics(y.records)) for x, y in zip(a.runs, b.runs, strict=False)]
    for name, more_is_better in RATES:
        values = [(getattr(x, name).value, getattr(y, name).value) for x, y in pairs if x.n and y.n]
        differences += _of_pairs(name, more_is_better, values)
    for name, more_is_better, _ in PER_REQUEST:
        values = [
            (x.of_requests[name].mean, y.of_requests[name].mean)
            for x, y in pairs if name in x.of_requests and name in y.of_requests
        ]  # fmt: skip
        differences += _of_pairs(name, more_is_better, values)
    return differences


def _of_pairs(name: str, more_is_better: bool, values: Sequence[tuple[float, float]]) -> list[Difference]:
    used = [(x, y) for x, y in values if x > 0 and y > 0]
    return [compare_pairs(name, more_is_better, [x for x, _ in used], [y for _, y in used])] if used else []


@dataclass(frozen=True, slots=True)
class SavedResult:
    """A result read from a file. n_failed: failures of the server; valid: whether the client kept up, None if
    unknown"""

    answers: Sequence[BenchRecord]
    n_failed: int = 0
    valid: bool | None = None

    @property
    def n(self) -> int:
        """Return the number of requests, without those that the client gave up."""
        return len(self.answers) + self.n_failed


def compare_answers(a: Sequence[BenchRecord], b: Sequence[BenchRecord]) -> list[Difference]:
    """Compare saved results by request; rates have a single value there and are left out."""
    differences = []
    for name, more_is_better, value in PER_REQUEST:
        one, other = ([v for v in map(value, answers) if v is not None and v > 0] for answers in (a, b))
        if one and other:
            differences.append(compare_samples(name, more_is_better, one, other))
    return differences


def only_one_has(a: Sequence[BenchRecord], b: Sequence[BenchRecord]) -> dict[str, str]:
    """Return "A" or "B" for each metric that the other side lacks; such metrics are not compared."""
    owners = {}
    for name, _, value in PER_REQUEST:
        has = [any(value(answer) is not None for answer in answers) for answers in (a, b)]
        if has[0] != has[1]:
            owners[name] = "A" if has[0] else "B"
    return owners


def more_failures(n_failed: tuple[int, int], n: tuple[int, int]) -> bool:
    """Whether B has at least one failure more than A's failure rate would give."""
    return (n_failed[1] - 1) * n[0] >= n_failed[0] * n[1] and n_failed[1] > 0


def read_result(path: Path) -> SavedResult:
    """Read `requests.jsonl`, or a folder with it, and `summary.json` if there is one. raises ConfigError"""
    path = path / REQUESTS if path.is_dir() else path
    answers, n_failed = [], 0
    for number, line in _lines(path):
        answer = _read(path, number, line)
        if answer.failure is None:
            answers.append(answer)
        n_failed += answer.failure not in (None, *NOT_COUNTED)
    if not answers:
        raise ConfigError(f"{path} holds no whole answer", "one at least", "measure again")
    return SavedResult(answers, n_failed, _is_valid(path.with_name(SUMMARY)) if path.name == REQUESTS else None)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            number = 0
            while line := file.readline(MAX_LINE):
                number += 1
                if number > MAX_LINES:
                    raise ConfigError(
                        f"{path} has more than {MAX_LINES} lines", f"at most {MAX_LINES} lines", "measure fewer"
                    )
                yield number, line
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror}"
        raise ConfigError(message, "a result of millrace bench -o", "check the path") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8", f"{REQUESTS} of millrace bench -o", "check the path") from None


def _is_valid(path: Path) -> bool | None:
    """Return whether a summary says that its client kept up; None if it does not say."""
    if not path.exists():
        return None
    try:
        with path.open("rb") as file:
            summary = json.loads(file.read(MAX_SUMMARY))
        valid = summary["valid"]
        if valid is not None and not isinstance(valid, bool):
            raise ValueError(f'"valid" is {valid!r:.40}')
        return valid
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"is no summary: {_error_text(error)}"
    raise ConfigError(f"{path} {reason}", f"{SUMMARY} of millrace bench -o", "measure again, or remove it")


def _read(path: Path, number: int, line: str) -> BenchRecord:
    try:
        record: Mapping[str, Any] = json.loads(line)
        failure = None if record["failure"] is None else Failure(record["failure"])
        sent_s = _time("sent", record["sent"])
        intended_s = sent_s - _time("intended_ms", -record["intended_ms"]) / 1e3
        stamps_ms = [_time("chunk_ms", ms) for ms in record["chunk_ms"]]
        if stamps_ms != sorted(stamps_ms):
            raise ValueError('"chunk_ms" goes back')
        tokens = [_count("chunk_tokens", n) for n in record["chunk_tokens"]]
        n_prompt, n_reported = (
            None if record[name] is None else _count(name, record[name]) for name in ("n_prompt", "n_output_told")
        )
        end_s = sent_s + _time("end_ms", record["end_ms"]) / 1e3
        chunks = [sent_s + ms / 1e3 for ms in stamps_ms]
        return BenchRecord(
            str(record["id"]), intended_s, sent_s, chunks, tokens, end_s, n_prompt, n_reported, failure=failure
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{path}, line {number}: {_error_text(error)}",
            "a line of requests.jsonl, as millrace bench -o writes it",
            "give that file, or its folder",
        ) from None


def _error_text(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg}"
    return f'no "{error.args[0]}"' if isinstance(error, KeyError) else f"{error}"


def _time(name: str, value: object) -> float:
    """Check seconds since 1970, or ms. raises ValueError"""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_TIME:
        raise ValueError(f'"{name}" holds {value!r:.40}')
    return float(value)


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_TOKENS:
        raise ValueError(f'"{name}" holds {value!r:.40}')
    return value
