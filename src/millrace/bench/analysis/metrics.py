"""Metrics computed from records, each with its definition, including those of other tools.

For one request: t_s send time, t_1 first chunk of tokens, t_2 second, t_e last, n output tokens (reported by the
server,
otherwise the number of chunks), k tokens of the first chunk (reported by the server, otherwise 1). Times in ms.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from millrace.bench.analysis.intervals import Interval, Summary, student_t, summary
from millrace.bench.client.request_record import BenchRecord, Failure
from millrace.bench.run.run import TurnRecord

SLICES = 10  # of a run, from which the interval of its rate is computed
_FEWEST_EVENTS = 100
NOT_COUNTED = (Failure.CANCELLED, Failure.INTERRUPTED)  # caused by the client, not the server


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """A metric of one request. value: None if undefined (a single token has no time between tokens)"""

    name: str
    unit: str
    definition: str
    value: Callable[[BenchRecord], float | None]


def ttft_ms(a: BenchRecord) -> float | None:
    return 1e3 * (a.chunk_s[0] - a.sent_s) if a.chunk_s else None


def ttft_from_intended_ms(a: BenchRecord) -> float | None:
    return 1e3 * (a.chunk_s[0] - a.intended_s) if a.chunk_s else None


def itl_ms(a: BenchRecord) -> float | None:
    """Return the mean time between tokens; tokens of the first chunk count as arrived together."""
    n_later = a.n_output - a.n_first
    return 1e3 * (a.chunk_s[-1] - a.chunk_s[0]) / n_later if len(a.chunk_s) > 1 and n_later > 0 else None


def latency_ms(a: BenchRecord) -> float:
    """Return the time to the last token, or to the end of an answer that is not streamed."""
    return 1e3 * (last_s(a) - a.sent_s)


def latency_from_intended_ms(a: BenchRecord) -> float:
    return 1e3 * (last_s(a) - a.intended_s)


def last_s(a: BenchRecord) -> float:
    return a.chunk_s[-1] if a.chunk_s else a.end_s


def _if_positive(value: float | None, share: Callable[[float], float]) -> float | None:
    return None if not value else share(value)


OURS = (
    MetricDefinition("time_to_first_token", "ms", "t_1 - t_s", ttft_ms),
    MetricDefinition("time_to_second_token", "ms", "t_2 - t_1; 0 where both came in one read",
           lambda a: 1e3 * (a.chunk_s[1] - a.chunk_s[0]) if len(a.chunk_s) > 1 else None),
    MetricDefinition("inter_token_latency", "ms", "(t_e - t_1) / (n - k), for each request", itl_ms),
    MetricDefinition("request_latency", "ms", "t_e - t_s", latency_ms),
    MetricDefinition("output_token_throughput_per_user", "tokens/sec", "1 / inter_token_latency",
           lambda a: _if_positive(itl_ms(a), lambda itl: 1e3 / itl)),
    MetricDefinition("output_sequence_length", "tokens", "n", lambda a: float(a.n_output)),
    MetricDefinition("input_sequence_length", "tokens", "the prompt's tokens, as the server tells",
           lambda a: None if a.n_prompt is None else float(a.n_prompt)),
    MetricDefinition("time_to_first_token_from_intended", "ms", "t_1 - the time at which it should have been sent",
           ttft_from_intended_ms),
    MetricDefinition("request_latency_from_intended", "ms", "t_e - the time at which it should have been sent",
           latency_from_intended_ms),
    MetricDefinition("send_delay", "ms", "t_s - the time at which it should have been sent",
           lambda a: 1e3 * (a.sent_s - a.intended_s)),
)  # fmt: skip
OTHER_TOOLS = (
    MetricDefinition(
        "inter_token_latency_genai_perf",
        "ms",
        "(t_e - t_1) / (n - 1): GenAI-Perf's and AIPerf's ITL, vLLM's TPOT",
        lambda a: (
            1e3 * (a.chunk_s[-1] - a.chunk_s[0]) / (a.n_output - 1) if len(a.chunk_s) > 1 and a.n_output > 1 else None
        ),
    ),
    MetricDefinition(
        "time_per_output_token_guidellm",
        "ms",
        "(t_e - t_s) / n: GuideLLM's TPOT, which includes TTFT",
        lambda a: latency_ms(a) / a.n_output if a.n_output else None,
    ),
    MetricDefinition(
        "output_token_throughput_per_user_guidellm",
        "tokens/sec",
        "n / (t_e - t_s)",
        lambda a: _if_positive(latency_ms(a), lambda ms: 1e3 * a.n_output / ms),
    ),
)
CHUNK_GAP = "inter_chunk_latency"
CHUNK_GAP_SAYS = "t_(i+1) - t_i of all chunks of all requests: vLLM's ITL, AIPerf's inter_chunk_latency"


@dataclass(frozen=True, slots=True)
class RateEstimate:
    """A rate of complete answers over the run: from the first request to the last token or failure."""

    value: float
    interval: Interval | None


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """Metrics of a run, or of one pattern of it. failures: by kind, including cancelled and interrupted requests

    duration_s: from the first request to the last token or failure; mean_concurrency: over that time; requests that the
    client gave up are in neither
    """

    n: int  # whole answers
    failures: dict[str, int]
    duration_s: float
    of_requests: dict[str, Summary]  # by name, in the order of OURS and OTHERS
    output_tokens_per_s: RateEstimate
    requests_per_s: RateEstimate
    mean_concurrency: float
    token_source: str  # of output tokens

    @property
    def n_failed(self) -> int:
        """Return the number of failures caused by the server."""
        return sum(n for kind, n in self.failures.items() if kind not in NOT_COUNTED)


def good(records: Sequence[TurnRecord]) -> list[BenchRecord]:
    return [r.answer for r in records if r.answer.failure is None]


def compute_metrics(records: Sequence[TurnRecord]) -> RunMetrics:
    answers = good(records)
    failures = Counter(str(r.answer.failure) for r in records if r.answer.failure is not None)
    of_requests = {}
    for metric in (*OURS, *OTHER_TOOLS):
        stats = summary([v for v in map(metric.value, answers) if v is not None])
        if stats is not None:
            of_requests[metric.name] = stats
    gaps = [np.diff(a.chunk_s) * 1e3 for a in answers if len(a.chunk_s) > 1]
    if gaps and (stats := summary(np.concatenate(gaps).tolist(), independent=False)):  # those of a request are alike
        of_requests[CHUNK_GAP] = stats
    # failed requests count towards the duration: otherwise a server that stopped midway would keep its rate
    spans_s = [(r.answer.sent_s, _over_s(r.answer)) for r in records if r.answer.failure not in NOT_COUNTED]
    start_s = min((begin_s for begin_s, _ in spans_s), default=0.0)
    end_s = max((until_s for _, until_s in spans_s), default=0.0)
    n_with_usage = sum(a.n_reported is not None for a in answers)
    busy_s = sum(until_s - begin_s for begin_s, until_s in spans_s)
    return RunMetrics(
        len(answers),
        dict(failures),
        end_s - start_s,
        of_requests,
        _token_rate(answers, start_s, end_s),
        _rate(np.array([last_s(a) for a in answers]), np.ones(len(answers)), start_s, end_s),
        busy_s / (end_s - start_s) if end_s > start_s else 0.0,
        "the server's usage"
        if n_with_usage == len(answers)
        else "chunks, each counted as one token"
        if not n_with_usage
        else f"the server's usage of {n_with_usage} answers, else chunks",
    )


def _over_s(a: BenchRecord) -> float:
    """Return the finish time of a request, for the measurement span."""
    return last_s(a) if a.failure is None else a.end_s


def _token_rate(answers: Sequence[BenchRecord], start_s: float, end_s: float) -> RateEstimate:
    """Return the rate of output tokens, spread over chunks as reported by the server, otherwise evenly."""
    times, tokens = [], []
    for a in answers:
        chunks = a.chunk_s or [a.end_s]
        has_counts = len(a.chunk_tokens) == len(chunks)
        times.append(np.asarray(chunks))
        tokens.append(
            np.diff(a.chunk_tokens, prepend=0) if has_counts else np.full(len(chunks), a.n_output / len(chunks))
        )
    if not times:
        return RateEstimate(0.0, None)
    return _rate(np.concatenate(times), np.concatenate(tokens).astype(np.float64), start_s, end_s)


def _rate(
    at_s: "np.ndarray[tuple[int], np.dtype[np.float64]]", amount: "np.ndarray[tuple[int], np.dtype[np.float64]]",
    start_s: float, end_s: float,
) -> RateEstimate:  # fmt: skip
    """Return an amount per second, with an interval by Student's t over equal time slices; None for few events."""
    if end_s <= start_s:
        return RateEstimate(0.0, None)
    value = float(amount.sum()) / (end_s - start_s)
    if at_s.size < _FEWEST_EVENTS:
        return RateEstimate(value, None)
    parts, _ = np.histogram(at_s, bins=SLICES, range=(start_s, end_s), weights=amount)
    rates = parts * SLICES / (end_s - start_s)
    half = student_t(SLICES - 1) * float(rates.std(ddof=1)) / SLICES**0.5
    return RateEstimate(value, (max(0.0, value - half), value + half))
