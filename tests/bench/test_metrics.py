"""Metrics of answers that were written by hand, against definitions computed here in plain NumPy."""

import numpy as np
import pytest

from millrace.bench.analysis.goodput import GoodputLimits, check_limits, goodput, parse_limits
from millrace.bench.analysis.metrics import compute_metrics
from millrace.bench.client.request_record import BenchRecord, Failure
from millrace.bench.load.inputs import Turn
from millrace.bench.run.run import TurnRecord
from millrace.errors import ConfigError
from millrace.evaluate.paired_comparison import wilson


def record(
    sent_s: float, chunk_ms: list[float], n: int | None, told: list[int] | None = None, **more: object
) -> TurnRecord:
    chunks = [sent_s + ms / 1e3 for ms in chunk_ms]
    end_s = chunks[-1] + 0.5 if chunks else sent_s + 0.2
    answer = BenchRecord("x", sent_s - 0.05, sent_s, chunks, told or [], end_s, 10, n, status=200, finish_reason="stop")
    for name, value in more.items():
        setattr(answer, name, value)
    return TurnRecord(Turn("a b"), answer, 0, 0)


def mean_of(records: list[TurnRecord], name: str) -> float:
    return compute_metrics(records).of_requests[name].mean


def test_each_metric_of_one_answer() -> None:
    """Three chunks of 2, 3 and 1 tokens: 100, 160 and 200 ms after sending, which was 50 ms late."""
    records = [record(5.0, [100, 160, 200], 6, [2, 5, 6])]
    for name, value in {
        "time_to_first_token": 100, "time_to_second_token": 60, "inter_token_latency": 100 / 4,
        "request_latency": 200, "output_token_throughput_per_user": 40, "output_sequence_length": 6,
        "input_sequence_length": 10, "time_to_first_token_from_intended": 150, "request_latency_from_intended": 250,
        "send_delay": 50, "inter_token_latency_genai_perf": 100 / 5, "time_per_output_token_guidellm": 200 / 6,
        "output_token_throughput_per_user_guidellm": 30, "inter_chunk_latency": 50,
    }.items():  # fmt: skip
        assert mean_of(records, name) == pytest.approx(value), name


def test_without_a_usage_each_chunk_is_a_token_and_that_is_said() -> None:
    metrics = compute_metrics([record(0.0, [10, 20, 40], None)])
    assert metrics.of_requests["inter_token_latency"].mean == pytest.approx(15)
    assert "chunks" in metrics.token_source


def test_one_token_has_no_time_between_tokens() -> None:
    names = compute_metrics([record(0.0, [10], 1)]).of_requests
    assert "inter_token_latency" not in names and "time_to_second_token" not in names
    assert "inter_token_latency" not in compute_metrics([record(0.0, [10], 5)]).of_requests, "five that came at once"


def test_an_answer_in_one_piece_has_a_latency_alone() -> None:
    names = compute_metrics([record(0.0, [], 5)]).of_requests
    assert names["request_latency"].mean == pytest.approx(200) and "time_to_first_token" not in names


def test_totals_over_the_whole_time_and_failures_by_kind() -> None:
    rng = np.random.default_rng(1)
    records = [record(i * 0.1, np.cumsum(rng.exponential(20, 10)).tolist(), 10) for i in range(100)]
    lost = [record(3.0, [10], 1, failure=kind) for kind in (Failure.STATUS, Failure.STATUS, Failure.CANCELLED)]
    metrics = compute_metrics(records + lost)
    end_s = max(r.answer.chunk_s[-1] for r in records)
    assert metrics.n == 100 and metrics.failures == {"status": 2, "cancelled": 1} and metrics.n_failed == 2
    assert metrics.output_tokens_per_s.value == pytest.approx(1000 / end_s)
    slices = np.histogram([s for r in records for s in r.answer.chunk_s], 10, (0, end_s))[0] * 10 / end_s
    half = 2.2622 * slices.std(ddof=1) / np.sqrt(10)
    assert metrics.output_tokens_per_s.interval == pytest.approx((slices.mean() - half, slices.mean() + half), rel=1e-3)
    assert metrics.requests_per_s.value == pytest.approx(100 / end_s) and metrics.requests_per_s.interval is not None
    busy_s = [r.answer.chunk_s[-1] - r.answer.sent_s for r in records] + [0.51, 0.51]  # the two that failed
    assert metrics.mean_concurrency == pytest.approx(sum(busy_s) / end_s)
    assert compute_metrics(records[:9]).requests_per_s.interval is None


def test_no_rate_is_below_zero() -> None:
    """Answers in two moments: seven of ten slices are empty, and half of Student's interval is more than the mean."""
    records = [record(0.0, [10, 1000], 2) for _ in range(60)]
    rate = compute_metrics(records).output_tokens_per_s
    assert rate.interval is not None and rate.interval[0] == 0 < rate.value < rate.interval[1]


def test_time_in_which_everything_fails_is_in_every_rate() -> None:
    """100 answers of 10 tokens in 2 s, then timeouts of 60 s each until 64 s: what we gave up later counts nowhere."""
    whole = [record(i * 0.01, [100, 1010], 10) for i in range(100)]
    lost = [record(2.0 + i * 0.02, [], None, failure=Failure.TIMEOUT, end_s=62 + i * 0.02) for i in range(101)]
    ours = [record(70.0, [10], 1, failure=kind, end_s=99.0) for kind in (Failure.CANCELLED, Failure.INTERRUPTED)]
    early = [record(-16.0, [], None, failure=Failure.UNREACHABLE, end_s=-15.0)]
    limits = GoodputLimits((("time_to_first_token", 500.0),))
    for records, span_s, failed_s in (
        (whole, 2.0, 0.0), (whole + ours, 2.0, 0.0), (whole + lost, 64.0, 101 * 60), (early + whole + lost, 80.0, 6061),
    ):  # fmt: skip
        metrics = compute_metrics(records)
        assert metrics.duration_s == pytest.approx(span_s, abs=1e-9 + (span_s == 2) * 1e-6)
        assert metrics.requests_per_s.value == pytest.approx(100 / span_s)
        assert metrics.output_tokens_per_s.value == pytest.approx(1000 / span_s)
        assert metrics.mean_concurrency == pytest.approx((100 * 1.01 + failed_s) / span_s)
        assert goodput(records, limits, metrics.duration_s).requests_per_s == pytest.approx(100 / span_s)
    spread = compute_metrics(whole + lost).requests_per_s.interval
    assert spread is not None and spread[0] == 0 < spread[1], "nine tenths of the time have none"


def test_gaps_of_one_request_have_no_interval() -> None:
    """500 gaps of one request say how it went with that request."""
    gaps = compute_metrics([record(0.0, [100 + 10 * i for i in range(501)], 501)]).of_requests["inter_chunk_latency"]
    assert gaps.n == 500 and set(gaps.intervals.values()) == {None}
    assert set(gaps.intervals) == {"mean", *(f"p{p}" for p in gaps.percentiles)}


def test_nothing_was_answered() -> None:
    metrics = compute_metrics([record(0.0, [], None, failure=Failure.TIMEOUT)])
    assert metrics.n == 0 and metrics.of_requests == {} and metrics.output_tokens_per_s.value == 0
    assert metrics.duration_s == pytest.approx(0.2) and metrics.requests_per_s.value == 0


def test_goodput_counts_failures_as_not_good_and_ours_not_at_all() -> None:
    records = [record(0.0, [ms, ms + 20], 2) for ms in (50, 100, 150, 200)]
    records += [record(0.0, [1, 2], 2, failure=f) for f in (Failure.BROKEN_OFF, Failure.CANCELLED)]
    # each was sent 50 ms after it should have been
    found = goodput(records, GoodputLimits((("time_to_first_token", 200.001),)), duration_s=2.0)
    assert (found.requests_per_s, found.share, found.interval) == (1.5, 3 / 5, wilson(3, 5))
    both = GoodputLimits((("time_to_first_token", 1e3), ("inter_token_latency", 19)))
    assert goodput(records, both, 2.0).share == 0
    assert goodput([record(0.0, [10], 1)], both, 1.0).share == 1, "one token has no time between tokens"
    in_one_piece = [record(0.0, [], 9)]
    for name in ("time_to_first_token", "inter_token_latency", "time_to_second_token"):
        limits = [GoodputLimits(((name, 1e6),))]
        assert goodput(in_one_piece, limits[0], 1.0).share == 0, "what nobody measured is not kept"
        check_limits(limits, streams=True)
        with pytest.raises(ConfigError, match=f"{name} <= 1e.06 ms, of answers that come in one piece"):
            check_limits(limits, streams=False)
    check_limits([GoodputLimits((("request_latency", 1.0),))], streams=False)


def test_limits_as_they_are_written() -> None:
    first, slow, slower = parse_limits(["ttft:500", "inter_token_latency:50", "reading-speed"])
    assert first.max_ms == (("time_to_first_token", 500), ("inter_token_latency", 50))
    assert [slow.max_ms, slower.max_ms] == [(("inter_token_latency", 90),), (("inter_token_latency", 200),)]
    for wrong in ("tft:5", "ttft", "ttft:0", "ttft:x", "ttft:nan", "output_sequence_length:5"):
        with pytest.raises(ConfigError):
            parse_limits([wrong])
