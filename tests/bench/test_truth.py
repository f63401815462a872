"""Every metric against what the null server did, computed apart from its own stamps in NumPy."""

import asyncio
from typing import Any

import numpy as np
import pytest
import uvloop

from millrace.bench.analysis.goodput import GoodputLimits, goodput
from millrace.bench.analysis.intervals import PERCENTILES
from millrace.bench.analysis.metrics import CHUNK_GAP, OTHER_TOOLS, OURS, RunMetrics, compute_metrics
from millrace.bench.client.client import BenchTarget, Client
from millrace.bench.client.endpoints import CHAT
from millrace.bench.load.arrivals import Arrivals
from millrace.bench.load.distribution import Spread
from millrace.bench.load.inputs import LengthPattern, synthetic
from millrace.bench.load.prompt_text import PromptWords
from millrace.bench.null_server.ledger import NullTiming, Sent
from millrace.bench.null_server.process import NullProcess
from millrace.bench.run.run import Run, RunLoad, TurnRecord

pytestmark = pytest.mark.alone
WITHIN = 0.02
WHOLE_MS, FIRST_MS = 1.0, 5.0
IN_MS = {m.name for m in (*OURS, *OTHER_TOOLS) if m.unit == "ms"} | {CHUNK_GAP}
ROBUST = ("time_to_first_token", "inter_token_latency", "request_latency", "output_sequence_length")
Stamps = np.ndarray[Any, np.dtype[np.float64]]


def driven(url: str, load: RunLoad, n_tokens: int, warm_up: int) -> Run:
    async def driving() -> Run:
        async with Client(BenchTarget(url, CHAT, each_usage=True)) as client:
            sessions = synthetic([LengthPattern(Spread(20), Spread.normal(n_tokens, n_tokens / 5))], PromptWords(), 1)
            warming = RunLoad(warm_up, n_sessions=warm_up, ramp_s=load.ramp_s)
            await Run(client, warming).drive(sessions)  # connections are open then
            run = Run(client, load)
            await run.drive(sessions)
            return run

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(driving())


def by_numpy(start_s: Stamps, chunk_s: list[list[float]], n_tokens: list[list[int]]) -> dict[str, Stamps]:
    """Each metric in ms or tokens, by request, of any side's stamps."""
    first = np.array([s[0] for s in chunk_s]) - start_s
    last = np.array([s[-1] for s in chunk_s]) - start_s
    later = np.array([sum(n[1:]) for n in n_tokens])
    return {
        "time_to_first_token": 1e3 * first,
        "time_to_second_token": 1e3 * np.array([s[1] - s[0] for s in chunk_s]),
        "inter_token_latency": 1e3 * (last - first) / later,
        "request_latency": 1e3 * last,
        "output_token_throughput_per_user": later / (last - first),
        "output_sequence_length": np.array([float(sum(n)) for n in n_tokens]),
        "inter_token_latency_genai_perf": 1e3 * (last - first) / (later + [n[0] - 1 for n in n_tokens]),
        "time_per_output_token_guidellm": 1e3 * last / [sum(n) for n in n_tokens],
        "inter_chunk_latency": 1e3 * np.concatenate([np.diff(s) for s in chunk_s]),
    }


def assert_computed(records: list[TurnRecord], n_tokens: list[list[int]]) -> None:
    """What is told is what follows from the client's stamps, to the last digits."""
    answers, metrics = [r.answer for r in records], compute_metrics(records)
    start_s = np.array([a.sent_s for a in answers])
    for name, values in by_numpy(start_s, [a.chunk_s for a in answers], n_tokens).items():
        found = metrics.of_requests[name]
        assert (found.mean, found.std) == pytest.approx((values.mean(), values.std()), rel=1e-6, abs=1e-6), name
        assert list(found.percentiles.values()) == pytest.approx(np.percentile(values, PERCENTILES).tolist(), rel=1e-6)


def assert_true(metrics: RunMetrics, sent: list[Sent], whole: bool) -> None:
    """Within 2 % of what the server did with the same requests: each mean and each percentile.

    whole: or within 1 ms, which is how far stamps of both sides may be apart; else what is robust against a machine
    that computes other things, too: means and the lower half, a first token within 5 ms.
    """
    wrong, start_s = [], np.array([s.arrived_s for s in sent])
    for name, values in by_numpy(start_s, [s.sent_s for s in sent], [s.n_tokens for s in sent]).items():
        if whole or name in ROBUST:
            apart = (
                (WHOLE_MS if whole else FIRST_MS) if name == "time_to_first_token" or (whole and name in IN_MS) else 0
            )
            wrong += off(metrics, name, values, PERCENTILES if whole else (25, 50), apart)
    assert not wrong, wrong
    span_s = max(s.sent_s[-1] for s in sent) - min(s.arrived_s for s in sent)
    assert metrics.output_tokens_per_s.value == pytest.approx(sum(sum(s.n_tokens) for s in sent) / span_s, rel=WITHIN)
    assert metrics.requests_per_s.value == pytest.approx(len(sent) / span_s, rel=WITHIN)


def off(
    metrics: RunMetrics, name: str, values: Stamps, percentiles: tuple[int, ...], apart: float
) -> list[tuple[str, str, float, float]]:
    """What is told of a metric and is neither within 2 % of these values' own nor that close to it."""
    found = metrics.of_requests[name]
    told = {"mean": (found.mean, float(values.mean()))}
    told |= {f"p{p}": (found.percentiles[p], float(np.percentile(values, p))) for p in percentiles}
    return [
        (name, what, value, true)
        for what, (value, true) in told.items() if abs(value - true) > max(WITHIN * abs(true), apart)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "streams, requests, rate, n_tokens, tokens_per_chunk",
    [
        (1, 4, 100, 25, 3),
        (64, 128, 50, 20, 1),
        pytest.param(1, 30, 50, 50, 1, marks=pytest.mark.timing),
        pytest.param(64, 384, 50, 100, 3, marks=pytest.mark.timing),
        pytest.param(512, 1536, 5, 20, 1, marks=pytest.mark.timing),
    ],
)
def test_every_metric_is_what_the_server_did(
    request: pytest.FixtureRequest, streams: int, requests: int, rate: int, n_tokens: int, tokens_per_chunk: int
) -> None:
    itl_ms = 1000 / rate
    timing = NullTiming("lognormal:200,40", f"normal:{itl_ms},{itl_ms / 5}", tokens_per_chunk, seed=5)
    with NullProcess(timing) as server:
        ramp_s = streams / 256  # the null server takes requests one after the other, as fast as Python is
        run = driven(server.url, RunLoad(streams, n_sessions=requests, ramp_s=ramp_s), n_tokens, warm_up=streams)
        by_id = server.truth
    assert [r.answer.failure for r in run.records] == [None] * requests
    sent = [by_id[r.answer.id] for r in run.records]
    assert_computed(run.records, [s.n_tokens for s in sent])
    assert_true(compute_metrics(run.records), sent, whole=request.node.get_closest_marker("timing") is not None)


def test_what_users_waited_for_a_place_is_what_the_server_did() -> None:
    """Due every 10 ms, four at a time, 60 ms each: every request waits longer than the one before."""
    rate, n, place_ms = 100.0, 48, 60
    with NullProcess(NullTiming("50", "2.5")) as server:
        run = driven(server.url, RunLoad(4, Arrivals(rate, "constant"), n), n_tokens=5, warm_up=4)
        sent = server.truth_list[4:]
    assert [s.id for s in sent] == [r.answer.id for r in sorted(run.records, key=lambda r: r.answer.sent_s)]
    metrics, due_s = compute_metrics(run.records), run.started_s + np.arange(n) / rate
    waited = {
        "send_delay": 1e3 * (np.array([s.arrived_s for s in sent]) - due_s),
        "time_to_first_token_from_intended": 1e3 * (np.array([s.sent_s[0] for s in sent]) - due_s),
        "request_latency_from_intended": 1e3 * (np.array([s.sent_s[-1] for s in sent]) - due_s),
    }
    assert waited["send_delay"][-1] > (n / 4 - 1) * place_ms - 1e3 * n / rate > 100, "by arithmetic, at least"
    wrong = [one for name, values in waited.items() for one in off(metrics, name, values, PERCENTILES, FIRST_MS)]
    assert not wrong, wrong
    assert metrics.of_requests["input_sequence_length"].mean == np.mean([s.n_prompt for s in sent])
    ordered = np.sort(waited["time_to_first_token_from_intended"])
    gap = int(np.argmax(np.diff(ordered)[8:-8])) + 8  # between two that are far apart
    limits = GoodputLimits((("time_to_first_token", float(ordered[gap : gap + 2].mean())),))
    found = goodput(run.records, limits, metrics.duration_s)
    span_s = max(s.sent_s[-1] for s in sent) - sent[0].arrived_s
    assert found.share == pytest.approx((gap + 1) / n, abs=1.1 / n)
    assert found.requests_per_s == pytest.approx((gap + 1) / span_s, rel=0.05 + 1.1 / gap)
