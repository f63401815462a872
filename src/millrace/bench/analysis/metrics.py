"""What was measured, from records: each metric with its definition, and other tools' definitions beside ours.

Of one request: t_s its sending, t_1 its first chunk of tokens, t_2 the second, t_e the last, n its output tokens (as
the server tells, else the number of chunks), k those of its first chunk (as the server tells, else 1). Times in ms.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from millrace.bench.analysis.intervals import Interval, Summary, student_t, summary
from millrace.bench.client.request_record import Answer, Failure
from millrace.bench.run.run import Record

SLICES = 10  # of a run, whose rates give the interval of its rate
_FEWEST_EVENTS = 100
NOT_COUNTED = (Failure.CANCELLED, Failure.INTERRUPTED)  # ours, not the server's


@dataclass(frozen=True, slots=True)
class Metric:
    """Of one request. value: None where the request has none (a single token has no time between tokens)"""

    name: str
    unit: str
    definition: str
    value: Callable[[Answer], float | None]


def ttft_ms(a: Answer) -> float | None:
    return 1e3 * (a.chunk_s[0] - a.sent_s) if a.chunk_s else None


def ttft_from_intended_ms(a: Answer) -> float | None:
    return 1e3 * (a.chunk_s[0] - a.intended_s) if a.chunk_s else None


def itl_ms(a: Answer) -> float | None:
    """By tokens: those of the first chunk came with it."""
    n_later = a.n_output - a.n_first
    return 1e3 * (a.chunk_s[-1] - a.chunk_s[0]) / n_later if len(a.chunk_s) > 1 and n_later > 0 else None


def latency_ms(a: Answer) -> float:
    """To the last token; of an answer in one piece to its end."""
    return 1e3 * (last_s(a) - a.sent_s)


def latency_from_intended_ms(a: Answer) -> float:
    return 1e3 * (last_s(a) - a.intended_s)


def last_s(a: Answer) -> float:
    return a.chunk_s[-1] if a.chunk_s else a.end_s


def _each(value: float | None, share: Callable[[float], float]) -> float | None:
    return None if not value else share(value)


OURS = (
    Metric("time_to_first_token", "ms", "t_1 - t_s", ttft_ms),
    Metric("time_to_second_token", "ms", "t_2 - t_1; 0 where both came in one read",
           lambda a: 1e3 * (a.chunk_s[1] - a.chunk_s[0]) if len(a.chunk_s) > 1 else None),
    Metric("inter_token_latency", "ms", "(t_e - t_1) / (n - k), for each request", itl_ms),
    Metric("request_latency", "ms", "t_e - t_s", latency_ms),
    Metric("output_token_throughput_per_user", "tokens/sec", "1 / inter_token_latency",
           lambda a: _each(itl_ms(a), lambda itl: 1e3 / itl)),
    Metric("output_sequence_length", "tokens", "n", lambda a: float(a.n_output)),
    Metric("input_sequence_length", "tokens", "the prompt's tokens, as the server tells",
           lambda a: None if a.n_prompt is None else float(a.n_prompt)),
    Metric("time_to_first_token_from_intended", "ms", "t_1 - the time at which it should have been sent",
           ttft_from_intended_ms),
    Metric("request_latency_from_intended", "ms", "t_e - the time at which it should have been sent",
           latency_from_intended_ms),
    Metric("send_delay", "ms", "t_s - the time at which it should have been sent",
           lambda a: 1e3 * (a.sent_s - a.intended_s)),
)  # fmt: skip
OTHERS = (
    Metric("inter_token_latency_genai_perf", "ms", "(t_e - t_1) / (n - 1): GenAI-Perf's and AIPerf's ITL, vLLM's TPOT",
           lambda a: 1e3 * (a.chunk_s[-1] - a.chunk_s[0]) / (a.n_output - 1)
           if len(a.chunk_s) > 1 and a.n_output > 1 else None),
    Metric("time_per_output_token_guidellm", "ms", "(t_e - t_s) / n: GuideLLM's TPOT, which includes TTFT",
           lambda a: latency_ms(a) / a.n_output if a.n_output else None),
    Metric("output_token_throughput_per_user_guidellm", "tokens/sec", "n / (t_e - t_s)",
           lambda a: _each(latency_ms(a), lambda ms: 1e3 * a.n_output / ms)),
)  # fmt: skip
CHUNK_GAP = "inter_chunk_latency"
CHUNK_GAP_SAYS = "t_(i+1) - t_i of all chunks of all requests: vLLM's ITL, AIPerf's inter_chunk_latency"


@dataclass(frozen=True, slots=True)
class Rate:
    """Of whole answers, over the whole run: from the first sending to the last token or failure."""

    value: float
    interval: Interval | None


@dataclass(frozen=True, slots=True)
class Metrics:
    """Of one run, or of one pattern of it. failures: by kind, also cancelled and interrupted ones

    duration_s: from the first sending to the last token or failure; mean_concurrency: over that time. What we gave up
    ourselves is in neither.
    """

    n: int  # whole answers
    failures: dict[str, int]
    duration_s: float
    of_requests: dict[str, Summary]  # by name, in the order of OURS and OTHERS
    output_tokens_per_s: Rate
    requests_per_s: Rate
    mean_concurrency: float
    token_source: str  # of output tokens

    @property
    def n_failed(self) -> int:
        """Those that are the server's."""
        return sum(n for kind, n in self.failures.items() if kind not in NOT_COUNTED)


def good(records: Sequence[Record]) -> list[Answer]:
    return [r.answer for r in records if r.answer.failure is None]


def measured(records: Sequence[Record]) -> Metrics:
    answers = good(records)
    failures = Counter(str(r.answer.failure) for r in records if r.answer.failure is not None)
    of_requests = {}
    for metric in (*OURS, *OTHERS):
        found = summary([v for v in map(metric.value, answers) if v is not None])
        if found is not None:
            of_requests[metric.name] = found
    gaps = [np.diff(a.chunk_s) * 1e3 for a in answers if len(a.chunk_s) > 1]
    if gaps and (found := summary(np.concatenate(gaps).tolist(), independent=False)):  # those of a request are alike
        of_requests[CHUNK_GAP] = found
    # time in which requests failed is the server's, too: without it, one that stopped midway would keep its rate
    spans_s = [(r.answer.sent_s, _over_s(r.answer)) for r in records if r.answer.failure not in NOT_COUNTED]
    start_s = min((begin_s for begin_s, _ in spans_s), default=0.0)
    end_s = max((until_s for _, until_s in spans_s), default=0.0)
    told = sum(a.n_told is not None for a in answers)
    busy_s = sum(until_s - begin_s for begin_s, until_s in spans_s)
    return Metrics(
        len(answers), dict(failures), end_s - start_s, of_requests, _token_rate(answers, start_s, end_s),
        _rate(np.array([last_s(a) for a in answers]), np.ones(len(answers)), start_s, end_s),
        busy_s / (end_s - start_s) if end_s > start_s else 0.0,
        "the server's usage" if told == len(answers) else
        "chunks, each counted as one token" if not told else f"the server's usage of {told} answers, else chunks",
    )  # fmt: skip


def _over_s(a: Answer) -> float:
    """When it took no more of anybody's time."""
    return last_s(a) if a.failure is None else a.end_s


def _token_rate(answers: Sequence[Answer], start_s: float, end_s: float) -> Rate:
    """A request's tokens are spread over its chunks as the server tells, else evenly."""
    times, tokens = [], []
    for a in answers:
        chunks = a.chunk_s or [a.end_s]
        told = len(a.chunk_tokens) == len(chunks)
        times.append(np.asarray(chunks))
        tokens.append(np.diff(a.chunk_tokens, prepend=0) if told else np.full(len(chunks), a.n_output / len(chunks)))
    if not times:
        return Rate(0.0, None)
    return _rate(np.concatenate(times), np.concatenate(tokens).astype(np.float64), start_s, end_s)


def _rate(
    at_s: "np.ndarray[tuple[int], np.dtype[np.float64]]", amount: "np.ndarray[tuple[int], np.dtype[np.float64]]",
    start_s: float, end_s: float,
) -> Rate:  # fmt: skip
    """Amounts a second; its interval by Student's t from the rates of equal slices of the time, never below 0; None for
    few events."""
    if end_s <= start_s:
        return Rate(0.0, None)
    value = float(amount.sum()) / (end_s - start_s)
    if at_s.size < _FEWEST_EVENTS:
        return Rate(value, None)
    parts, _ = np.histogram(at_s, bins=SLICES, range=(start_s, end_s), weights=amount)
    rates = parts * SLICES / (end_s - start_s)
    half = student_t(SLICES - 1) * float(rates.std(ddof=1)) / SLICES**0.5
    return Rate(value, (max(0.0, value - half), value + half))
