"""The search for the heaviest load that keeps the limits, on a server that is a formula."""

import asyncio
from dataclasses import replace

import pytest

from millrace.bench.analysis.intervals import Summary
from millrace.bench.analysis.metrics import RateEstimate, RunMetrics
from millrace.bench.client.client_load import ClientHealth
from millrace.bench.client.request_record import BenchRecord, Failure
from millrace.bench.load.inputs import Turn
from millrace.bench.report.sweep_page import sweep_page
from millrace.bench.run.run import TurnRecord
from millrace.bench.run.sweep import LevelResult, SweepLimits, SweepPoint, best, on_front, run_sweep
from millrace.errors import ConfigError


def metrics(level: float, capacity: float, failed: int = 0) -> RunMetrics:
    """Throughput that saturates at `capacity`; TTFT of level ms, the half of it before anything was sent."""
    rate, latency = capacity * level / (level + capacity), 100 + level

    def of(value: float) -> Summary:
        return Summary(10, value, 0, value, value, dict.fromkeys((50, 75, 90, 95, 99), value), {})

    found = {
        "time_to_first_token": of(level / 2), "time_to_first_token_from_intended": of(level),
        "inter_token_latency": of(level / 10), "request_latency": of(latency),
    }  # fmt: skip
    failures = {"timeout": failed} if failed else {}
    return RunMetrics(10, failures, 1.0, found, RateEstimate(rate, None), RateEstimate(rate / 10, None), 1.0, "")


def levels(
    first: float, most: float, limits: SweepLimits, whole: bool = True, fails_from: float = 1e9
) -> list[SweepPoint]:
    async def run(level: float) -> LevelResult | None:
        found = metrics(level, 100, failed=1 if level >= fails_from else 0)
        return LevelResult(found, surely=limits.meets(found))

    return asyncio.run(run_sweep(first, most, whole, limits, run))


@pytest.mark.parametrize("limit", [1.5, 5, 23, 60, 100])
def test_it_finds_the_last_level_that_keeps_the_limit(limit: float) -> None:
    points = levels(1, 256, SweepLimits(ttft_ms=limit))
    kept, broken = [p.level for p in points if p.meets], [p.level for p in points if not p.meets]
    assert max(kept) <= limit < min(broken) and (min(broken) / max(kept) <= 1.15 or min(broken) - max(kept) == 1)
    assert [p.level for p in points] == sorted(p.level for p in points) and len(points) < 14


def test_the_strictest_limit_counts_and_so_do_failures() -> None:
    assert max(p.level for p in levels(1, 256, SweepLimits(500, itl_ms=2)) if p.meets) <= 20
    assert max(p.level for p in levels(1, 256, SweepLimits(), fails_from=40) if p.meets) < 40


def answered(ttft_ms: float, itl_ms: float = 10, late_ms: float = 0, failure: Failure | None = None) -> TurnRecord:
    first_s = 5 + ttft_ms / 1e3
    chunks = [first_s, first_s + itl_ms / 1e3]
    answer = BenchRecord("x", 5 - late_ms / 1e3, 5, chunks, [], chunks[-1], 5, 2, failure=failure)
    return TurnRecord(Turn("a"), answer, 0, 0)


@pytest.mark.parametrize(
    "percentile, n, n_slow, surely",
    [
        (99, 3, 0, None), (99, 380, 0, None), (99, 381, 0, True), (90, 34, 0, None), (90, 35, 0, True),
        (90, 100, 10, None), (90, 400, 20, True), (90, 400, 60, False), (90, 3, 3, False), (50, 4, 0, True),
    ],
)  # fmt: skip
def test_few_requests_prove_no_percentile(percentile: int, n: int, n_slow: int, surely: bool | None) -> None:
    """All n within: Wilson's lower end is n / (n + 1.96^2)."""
    records = [answered(100)] * (n - n_slow) + [answered(501)] * n_slow
    ours = [answered(900, failure=kind) for kind in (Failure.CANCELLED, Failure.INTERRUPTED)]
    assert SweepLimits(500, None, percentile).surely_keeps(records + ours) is surely
    assert SweepLimits(500, 10.001, percentile).surely_keeps(records) is surely
    assert SweepLimits(percentile=percentile).surely_keeps(records) is True, "no limit, no failure"
    assert SweepLimits(500, 9, percentile).surely_keeps(records) is False
    assert SweepLimits(500, None, percentile).surely_keeps([answered(100, late_ms=401)] * 4) is False, "as intended"
    for limits in (SweepLimits(), SweepLimits(500, None, percentile)):
        assert limits.surely_keeps([*records, answered(1, failure=Failure.STATUS)]) is False
        assert limits.surely_keeps(ours) is False, "of no request nothing is kept"


def test_a_level_that_was_given_up_is_not_kept() -> None:
    """As where 65,536 requests waited: what there is are answers, and what was interrupted."""

    async def run(level: float) -> LevelResult | None:
        return LevelResult(metrics(level, 100), surely=True, ended="65536 requests wait" if level > 2 else "")

    points = asyncio.run(run_sweep(1, 4, False, SweepLimits(), run))
    assert [(p.level, p.meets, p.verdict) for p in points][:2] == [(1, True, "yes"), (2, True, "yes")]
    assert {(p.meets, p.verdict) for p in points[2:]} == {(False, "no")} and points[-1].level == 4


def test_limits_that_no_answer_could_break_are_refused() -> None:
    SweepLimits().check(streams=False)
    SweepLimits(ttft_ms=1, itl_ms=1).check(streams=True)
    for limits in (SweepLimits(ttft_ms=1), SweepLimits(itl_ms=1)):
        with pytest.raises(ConfigError, match="of answers that come in one piece"):
            limits.check(streams=False)


def test_nothing_breaks_or_everything_does() -> None:
    assert [p.level for p in levels(1, 10, SweepLimits())] == [1, 2, 4, 8, 10]
    (only,) = levels(3, 10, SweepLimits(ttft_ms=2))
    assert not only.meets


def test_rates_need_not_be_whole() -> None:
    points = levels(0.5, 64, SweepLimits(ttft_ms=3.3), whole=False)
    assert 3.3 / 1.16 <= max(p.level for p in points if p.meets) <= 3.3


def test_an_end_in_the_middle_keeps_what_there_is() -> None:
    async def run(level: float) -> LevelResult | None:
        return LevelResult(metrics(level, 100)) if level < 4 else None

    assert [p.level for p in asyncio.run(run_sweep(1, 64, True, SweepLimits(), run))] == [1, 2]


def test_the_chosen_points() -> None:
    points = levels(1, 256, SweepLimits(ttft_ms=40))
    found = best(points)
    assert found is not None and found.within is not None
    assert found.within.level == max(p.level for p in points if p.meets) and found.latency.level == 1
    assert found.throughput.level == max(p.level for p in points)
    power = {p.level: p.tokens_per_s / (100 + p.level) for p in points}
    assert found.knee.level == max(power, key=lambda level: power[level])
    lost = SweepPoint(512, replace(metrics(512, 1), n=0), False)
    assert best([lost]) is None and on_front([lost]) == []
    slow = SweepPoint(300, metrics(300, 20), False)
    assert on_front([*points, slow]) == points, "more tokens/s cost latency; what is worse in both is left out"


def test_embeddings_have_requests_but_no_tokens() -> None:
    """Requests/s grow to level 8 and fall from there; of tokens there are 0 everywhere."""

    def point(level: float) -> SweepPoint:
        rate = 8.0 - abs(8 - level) / 2
        return SweepPoint(
            level,
            replace(
                metrics(level, 100), output_tokens_per_s=RateEstimate(0, None), requests_per_s=RateEstimate(rate, None)
            ),
            True,
        )

    points = [point(level) for level in (1, 2, 4, 8, 16)]
    found = best(points)
    assert found is not None and found.within is not None
    assert (found.within.level, found.throughput.level, found.knee.level, found.latency.level) == (8, 8, 8, 1)
    assert [p.level for p in on_front(points)] == [1, 2, 4, 8]
    page = sweep_page("http://x", "concurrency", points, found, SweepLimits())
    assert "most requests/s" in page and "8 requests/s, " in page and "most tokens/s" not in page


@pytest.mark.parametrize("share, is_valid", [(0.79, True), (0.8, False)])
def test_levels_at_which_the_client_does_not_keep_up(share: float, is_valid: bool) -> None:
    async def run(level: float) -> LevelResult | None:
        return LevelResult(metrics(level, 100), effort=ClientHealth(share if level == 4 else 0.1), surely=True)

    points = asyncio.run(run_sweep(1, 4, True, SweepLimits(), run))
    assert [p.effort.keeps_up for p in points] == [True, True, is_valid]
    found = best(points)
    assert found is not None
    page = sweep_page("http://x", "concurrency", points, found, SweepLimits(), notes=["INVALID <at 4>"])
    assert page.count("<td>yes, INVALID") == (not is_valid) and "INVALID &lt;at 4&gt;" in page


def test_the_page_of_a_sweep() -> None:
    limits, points = SweepLimits(ttft_ms=40), levels(1, 64, SweepLimits(ttft_ms=40))
    found = best(points)
    assert found is not None
    page = sweep_page("http://x/<b>", "concurrency", points, found, limits)
    assert (
        page.count("<circle") == len(points) and "&lt;b&gt;" in page and "TTFT &lt;= 40 ms for 90 % of requests" in page
    )
    assert page.count("<td>yes") + page.count("<td>no") == len(points)
    unsure = [replace(p, surely=None) for p in points]
    assert sweep_page("http://x", "concurrency", unsure, found, limits).count("<td>too few to say") == len(points)
