"""The whole answer: published cases from a table, what must hold of every answer, what contradicts itself."""

from pathlib import Path
from typing import Any

import pytest

from millrace.errors import ConfigError
from millrace.size import plan
from millrace.size.answer import Answer
from millrace.size.told import told
from tests.size.tables import SIZING, needs_tables

COMMON: dict[str, Any] = {"model": "llama-3-8b", "isl": 2000, "osl": 200, "ttft_ms": 500}
HEAD = "model,gpu,precision,tp,isl,osl,concurrency,ttft_ms,itl_ms,e2e_ms,req_s,ttft_p95_ms,itl_p95_ms,e2e_p95_ms"
# Rows of the published decision table (Llama-3-8B, 2,000 in and 200 out, H100), rates of one instance.
ROWS = (
    "8b,H100,fp8,1,2000,200,10,221,8.6,1924,5.195,268,9,1990",
    "8b,H100,fp8,1,2000,200,25,489.5,11.73,2825,8.843,640,13,3000",
    "8b,H100,fp8,2,2000,200,25,367,9.1,2176,11.48,479,10,2300",
    "8b,H100,fp8,1,2000,200,250,1163,83.6,17794,13.8275,1609,90,19000",
)


@pytest.fixture
def runs(tmp_path: Path) -> str:
    path = tmp_path / "runs.csv"
    path.write_text("\n".join((HEAD, *ROWS)) + "\n")
    return str(path)


def asked(runs: str, **more: Any) -> Answer:
    return plan(**{"isl": 2000, "osl": 200, "ttft_ms": 500, "measured": runs, **more})


def test_the_mean_beside_the_p95(runs: str) -> None:
    """70.75 requests/s of 8 GPUs with the mean below 500 ms, 45.92 with the p95: 54 % more machines."""
    mean = asked(runs, rate=707.5)
    assert mean.plan.fractional == pytest.approx(10.0, abs=0.01) and mean.other is not None
    assert mean.other.point.rate_of_system == pytest.approx(45.92)
    assert mean.other.fractional / mean.plan.fractional == pytest.approx(1.54, abs=0.005)
    p95 = asked(runs, rate=707.5, of="p95")
    assert p95.plan.point == mean.other.point and p95.other is not None and p95.other.point == mean.plan.point


def test_the_course_exercise(runs: str) -> None:
    """30 M calls a year with 30 requests each, a peak of 7 times: 4.8 machines at 300 ms, 2.8 at 500 ms."""
    load = {"calls": "30M/year", "requests_each": 30, "burst": 7, "percentile": 0}
    assert asked(runs, **load, ttft_ms=300).plan.fractional == pytest.approx(4.8, abs=0.05)
    assert asked(runs, **load).plan.fractional == pytest.approx(2.8, abs=0.05)


@needs_tables
def test_the_published_table_whole() -> None:
    found = plan(
        measured=str(SIZING / "nim_dli_concurrency.csv"), model="meta-llama3-8b-instruct", isl=2000, osl=200,
        ttft_ms=500, rate=70.74, hardware="NVIDIA H100 80GB HBM3",
    )  # fmt: skip
    assert found.plan.systems == 1 and found.plan.fractional == pytest.approx(1, abs=2e-4)
    assert (found.offers.left_out, len(found.table)) == (11, 4), "fp8 and fp16, TP1 and TP2"


def test_systems_that_are_there_are_the_way_back(runs: str) -> None:
    given = asked(runs, systems=4, spare=1, utilisation=0.8)
    assert given.plan.systems == 4 and given.follows.rate == pytest.approx(3 * 0.8 * 70.744)
    needed = asked(runs, rate=given.follows.rate * 0.999, spare=1, utilisation=0.8)
    assert needed.plan.systems == 4
    assert asked(runs, rate=given.follows.rate * 1.001, spare=1, utilisation=0.8).plan.systems == 5


def test_users_of_a_rate() -> None:
    """70.7 requests/s through 8 hours with 3 requests each are 679 k users."""
    follows = plan(**COMMON, systems=1).follows
    assert follows.users == pytest.approx(679e3 * follows.rate / 70.7, rel=1e-3)
    assert follows.requests_a_day == pytest.approx(follows.rate * 86_400)
    assert follows.tokens_a_day == pytest.approx(follows.requests_a_day * 2200)


def test_more_load_and_tighter_limits_never_need_less() -> None:
    before = 0
    for rate in (1, 30, 140, 500, 2000):
        found = plan(**COMMON, rate=rate).plan
        assert found.systems >= before and found.low <= found.systems <= found.high
        before = found.systems
    before = 1 << 30
    for ttft_ms in (30, 60, 200, 500, 5000):
        found = plan(**{**COMMON, "ttft_ms": ttft_ms}, rate=2000).plan
        assert found.systems <= before
        before = found.systems


def test_a_waterfall_only_goes_up_to_what_is_bought() -> None:
    found = plan(**COMMON, rate=1000, utilisation=0.7, spare=2)
    systems = [step.systems for step in found.why]
    assert systems == sorted(systems) and systems[-1] == found.plan.systems
    assert found.instances * found.plan.point.tp <= 8 * (found.plan.systems - 2)


def test_calls_in_a_row_add_up() -> None:
    """Two equal calls take two times as long and serve half as many; the first token is the second call's."""
    one = plan(**COMMON, tp=1, precision="fp8", rate=10)
    two = plan(**{**COMMON, "ttft_ms": 1e6}, tp=1, precision="fp8", rate=10, pipeline="same:2000/200>answer")
    by_n = {p.concurrency: p for p in one.offers.points}
    for point in two.offers.points:
        alone = by_n[point.concurrency]
        assert point.rate == pytest.approx(alone.rate / 2)
        assert point.mean.e2e_s == pytest.approx(2 * alone.mean.e2e_s)
        assert point.mean.ttft_s == pytest.approx(alone.mean.e2e_s + alone.mean.ttft_s)
        assert point.concurrency == pytest.approx(point.rate * point.mean.e2e_s), "Little's law"


def test_memory_adds_up() -> None:
    """Llama-3-8B in fp16: 131,072 bytes a token; weights of 16.06 GB; 80 GB less a tenth and 3 GB for all."""
    found = plan(**COMMON, rate=10, precision="fp16", tp=1)
    m = found.memory
    assert m is not None and m.kv_bytes_request == pytest.approx(2200 * 131_072)
    assert m.weights_bytes == pytest.approx(16.06e9, rel=2e-3)
    assert m.kv_tokens * 131_072 + m.weights_bytes + m.kept_free_bytes == pytest.approx(80e9)
    assert m.kv_bytes <= m.kv_tokens * 131_072


def test_an_answer_as_data(runs: str) -> None:
    found = told(asked(runs, rate=707.5))
    assert found["answer"]["systems"] == 11 and found["answer"]["point"]["requests_per_s_of_system"] == 70.744
    assert found["answer"]["limits"] == {"ttft_ms": 500, "itl_ms": None, "e2e_ms": None, "of": "mean"}
    assert found["question"]["rate"] == 707.5 and found["memory"] is None


@pytest.mark.parametrize("more, said", [
    ({"rate": 5, "systems": 2}, "systems are given, and a load by rate"),
    ({"systems": 1, "spare": 1}, "more than those"),
    ({"rate": 5, "hardware": "H1000"}, 'did you mean "h100"'), ({"rate": 5, "model": "llama-3-9b"}, "llama-3-8b"),
    ({"rate": 5, "ttft_ms": 1}, "nothing here keeps the limit on TTFT"),
    ({"rate": 5, "isl": 9000}, "at most the context"),
    ({"rate": 5, "model": "llama-3-70b", "tp": 1, "hardware": "T4"}, "have "), ({"rate": 5, "model": None}, "no model"),
    ({"rate": 5, "precision": "fp8", "hardware": "A100"}, "does not multiply fp8"),
])  # fmt: skip
def test_what_cannot_be_answered(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as found:
        plan(**{**COMMON, **more})
    assert said in str(found.value)


@pytest.mark.parametrize("more, said", [
    ({"isl": 100}, "lengths that were measured: 2000/200"), ({"hardware": "L4"}, "nothing was measured on L4"),
    ({"model": "8bb"}, 'did you mean "8b"'), ({"tp": 8}, "fp8 TP1, fp8 TP2"), ({"factor": 0.5}, "--factor with"),
    ({"pipeline": "guard:5/5>answer"}, "no measurements of 5 tokens in"), ({"ttft_ms": 100}, "the closest is fp8 TP1"),
])  # fmt: skip
def test_what_was_not_measured(runs: str, more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as found:
        asked(runs, rate=5, **more)
    assert said in str(found.value)
