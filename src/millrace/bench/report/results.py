"""A finished run as data: the JSON report, and one line per request from which all metrics can be recomputed.

No texts are stored.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from millrace.bench.analysis.goodput import GoodputLimits, goodput
from millrace.bench.analysis.intervals import Summary
from millrace.bench.analysis.latency_breakdown import Waterfall, breakdown_text
from millrace.bench.analysis.metrics import (
    CHUNK_GAP,
    CHUNK_GAP_SAYS,
    NOT_COUNTED,
    OTHER_TOOLS,
    OURS,
    RateEstimate,
    RunMetrics,
    compute_metrics,
)
from millrace.bench.client.certify import Certificate, doubts, kept_up
from millrace.bench.client.client_load import ClientHealth
from millrace.bench.run.plan import BenchPlan, patterns
from millrace.bench.run.run import Run, TurnRecord

SCHEMA = 1
OSL_OFF = 0.1  # relative deviation from the requested output length that is reported if most answers exceed it
DEFINITIONS = {m.name: (m.unit, m.definition) for m in (*OURS, *OTHER_TOOLS)} | {CHUNK_GAP: ("ms", CHUNK_GAP_SAYS)}


@dataclass(frozen=True, slots=True)
class RunResult:
    """A run with its metrics. epoch_s: Unix time at the zero of the monotonic clock"""

    plan: BenchPlan
    run: Run
    metrics: RunMetrics
    limits: Sequence[GoodputLimits]
    epoch_s: float
    effort: ClientHealth  # of this client
    certificate: Certificate | None = None
    waterfall: Waterfall | None = None  # if the server has traces of requests
    contradicted: bool = False  # the server's traces contradict the client's times

    @classmethod
    def from_run(
        cls, plan: BenchPlan, run: Run, limits: Sequence[GoodputLimits], certificate: Certificate | None = None,
        waterfall: Waterfall | None = None,
    ) -> "RunResult":  # fmt: skip
        """Create the result; a waterfall that contradicts the client's times is dropped, with a note."""
        epoch_s, contradicted = time.time() - time.perf_counter(), waterfall is not None and waterfall.contradicts
        return cls(
            plan,
            run,
            compute_metrics(run.records),
            limits,
            epoch_s,
            ClientHealth.from_run(run),
            certificate,
            None if contradicted else waterfall,
            contradicted,
        )

    @property
    def valid(self) -> bool | None:
        """Whether the client kept up (a saturated client measures its own delay); None if not certified."""
        return kept_up(self.certificate, [self.effort])


def report(result: RunResult) -> dict[str, Any]:
    """Convert a result to JSON data. Times in ms, each metric with its definition."""
    return {
        "schema": SCHEMA,
        **_target_to_dict(result.plan),
        "load": _load(result.plan),
        "started": _iso(result.epoch_s + result.run.started_s),
        "ended_early": result.run.ended or None,
        "valid": result.valid,
        "client": {
            "cpu_share": result.run.share.mean,
            **asdict(result.effort),
            "certificate": None
            if result.certificate is None
            else {**asdict(result.certificate), "holds": result.certificate.holds},
        },
        **_figures(result.run.records, result.metrics, result.limits),
        "patterns": {
            label: _figures(records, compute_metrics(records), result.limits)
            for label, records in patterns(result.run.records).items()
        },
        "waterfall": None if result.waterfall is None else breakdown_text(result.waterfall),
        "notes": notes(result),
    }


def _target_to_dict(plan: BenchPlan) -> dict[str, str | None]:
    """Return the identification of the target; an engine in this process has only a name."""
    target = plan.target
    names = {"url": target.url, "endpoint": target.endpoint.name, "model": target.model, "engine": None}
    return {**dict.fromkeys(names), "engine": plan.engine} if plan.engine else names


def _figures(records: Sequence[TurnRecord], metrics: RunMetrics, limits: Sequence[GoodputLimits]) -> dict[str, Any]:
    return {
        "requests": {"whole": metrics.n, "failed": metrics.n_failed, "by_failure": metrics.failures},
        "duration_s": metrics.duration_s,
        "mean_concurrency": metrics.mean_concurrency,
        "token_source": metrics.token_source,
        "output_tokens_per_s": _rate(metrics.output_tokens_per_s),
        "requests_per_s": _rate(metrics.requests_per_s),
        "goodput": [
            {
                "limits": g.limits.description,
                "requests_per_s": g.requests_per_s,
                "share": g.share,
                "interval": g.interval,
            }
            for g in (goodput(records, limit, metrics.duration_s) for limit in limits)
        ],
        "metrics": {name: _metric(name, stats) for name, stats in metrics.of_requests.items()},
    }


def _metric(name: str, stats: Summary) -> dict[str, Any]:
    unit, definition = DEFINITIONS[name]
    return {
        "unit": unit, "definition": definition, "n": stats.n, "mean": stats.mean, "std": stats.std, "min": stats.min,
        "max": stats.max, **{f"p{p}": value for p, value in stats.percentiles.items()}, "intervals": stats.intervals,
    }  # fmt: skip


def _rate(rate: RateEstimate) -> dict[str, Any]:
    return {"value": rate.value, "interval": rate.interval}


def _load(plan: BenchPlan) -> dict[str, Any]:
    load, arrivals = plan.load, plan.load.arrivals
    return {
        "concurrency": load.concurrency, "request_rate": arrivals.rate_per_s if arrivals else None,
        "arrival_pattern": arrivals.pattern if arrivals else None, "requests": load.n_sessions,
        "duration_s": load.duration_s, "warm_up": plan.warm_up, "seed": load.seed,
    }  # fmt: skip


def notes(result: RunResult) -> list[str]:
    """Return the caveats of a result."""
    answers = [r for r in result.run.records if r.answer.failure is None]
    sentences = [f"The run ended early: {result.run.ended}."] if result.run.ended else []
    sentences += doubts(result.certificate, [result.effort], "in the run")
    kinds: dict[str, str] = {}
    for r in result.run.records:
        if r.answer.failure is not None and r.answer.failure not in NOT_COUNTED:
            kinds.setdefault(str(r.answer.failure), r.answer.detail)
    sentences += [
        f"{result.metrics.failures[kind]} requests failed ({kind}), the first: {reason}"
        for kind, reason in kinds.items()
    ]
    has_output = result.plan.target.endpoint.streams  # embeddings have none
    lengths = [(r.turn.max_tokens, r.answer.n_output) for r in answers if r.turn.max_tokens and has_output]
    off = sum(abs(got - n_expected) > OSL_OFF * n_expected for n_expected, got in lengths)
    if off > len(lengths) / 2:
        sentences.append(
            f"{off} of {len(lengths)} answers were not of the length asked for; --ignore-eos asks for exactly it."
        )
    if result.contradicted:
        sentences.append(
            "Where the time went is left out: the server tells of requests that took longer than we waited."
        )
    if answers and all(r.answer.n_prompt is None for r in answers):
        sentences.append("The server tells no input lengths: prompts have as many words as tokens were asked for.")
    n_chunks = sum(len(r.answer.chunk_s) for r in answers)
    n_reads = sum(len(set(r.answer.chunk_s)) for r in answers)
    if n_chunks > 1.1 * n_reads:
        sentences.append(
            f"{n_chunks / n_reads:.1f} chunks came in one read: times between chunks tell little, ITL is by tokens."
        )
    if result.metrics.n and result.metrics.token_source != "the server's usage" and has_output:
        sentences.append(f"Output tokens are from {result.metrics.token_source}.")
    return sentences


def line_of(record: TurnRecord, epoch_s: float) -> str:
    """Convert one request to a JSON line. Times in ms after sending."""
    a = record.answer
    return json.dumps(
        {
            "id": a.id, "session": record.session, "turn": record.number, "pattern": record.label,
            "sent": round(epoch_s + a.sent_s, 6), "intended_ms": _ms(a.intended_s - a.sent_s),
            "chunk_ms": [_ms(at_s - a.sent_s) for at_s in a.chunk_s], "chunk_tokens": a.chunk_tokens,
            "end_ms": _ms(a.end_s - a.sent_s), "n_prompt": a.n_prompt, "n_prompt_asked": record.turn.n_input,
            "n_output": a.n_output, "n_output_told": a.n_reported, "n_output_asked": record.turn.max_tokens,
            "finish_reason": a.finish_reason, "status": a.status,
            "failure": None if a.failure is None else str(a.failure), "detail": a.detail,
        }
    )  # fmt: skip


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 4)


def _iso(epoch_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch_s))
