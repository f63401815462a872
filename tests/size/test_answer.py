"""The whole answer: published cases from a table, what must hold of every answer, what contradicts itself."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape

from millrace.errors import ConfigError
from millrace.machine.roofline import Compute, MemoryLevel, Rate, Roofline
from millrace.size import plan
from millrace.size.answer.answer import SizingAnswer, answer_question
from millrace.size.answer.multi_model import share_systems
from millrace.size.performance.models import PRESETS
from millrace.size.performance.operating_point import FigureSource
from millrace.size.question.question import SizingQuestion
from millrace.size.report.answer_json import answer_to_dict, interpretation_notes, point_to_dict, uncertainty_text
from millrace.size.report.answer_tables import tables
from millrace.size.report.page import size_page
from millrace.size.simulation import capacity
from tests.size.tables import SIZING, needs_tables

COMMON: dict[str, Any] = {"model": "llama-3-8b", "isl": 2000, "osl": 200, "ttft_ms": 500, "simulate": False}
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


def asked(runs: str, **more: Any) -> SizingAnswer:
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


def test_seed_a_by_a_table(tmp_path: Path) -> None:
    """43 B, 3,500 / 500, 32 in flight on a machine of 8: 2.606 s for prompts and 21.4 ms a token are 2.405 requests/s,
    and 13 systems for 31."""
    path = tmp_path / "runs.csv"
    path.write_text(f"{HEAD}\nnemo-43b,H100,fp16,8,3500,500,32,2606,21.4,{2606 + 500 * 21.4},2.405,,,\n")
    found = plan(measured=str(path), isl=3500, osl=500, rate=31, mode="offline").plan
    assert (found.systems, found.point.rate_of_system) == (13, 2.405)
    assert found.fractional == pytest.approx(12.89, abs=5e-3) and found.provenance == "measured"


@needs_tables
def test_the_published_table_whole() -> None:
    found = plan(
        measured=str(SIZING / "nim_dli_concurrency.csv"), model="meta-llama3-8b-instruct", isl=2000, osl=200,
        ttft_ms=500, rate=70.74, hardware="NVIDIA H100 80GB HBM3",
    )  # fmt: skip
    assert found.plan.systems == 1 and found.plan.fractional == pytest.approx(1, abs=2e-4)
    assert (found.offers.left_out, len(found.table)) == (11, 4), "fp8 and fp16, TP1 and TP2"


def test_systems_that_are_there_are_the_way_back(runs: str) -> None:
    given = asked(runs, systems="4", spare=1, utilisation=0.8)
    assert given.plan.systems == 4 and given.consequences.rate == pytest.approx(3 * 0.8 * 70.744)
    needed = asked(runs, rate=given.consequences.rate * 0.999, spare=1, utilisation=0.8)
    assert needed.plan.systems == 4
    assert asked(runs, rate=given.consequences.rate * 1.001, spare=1, utilisation=0.8).plan.systems == 5


def test_users_of_a_rate() -> None:
    """70.7 requests/s through 8 hours with 3 requests each are 679 k users."""
    follows = plan(**COMMON, systems="1").consequences
    assert follows.users == pytest.approx(679e3 * follows.rate / 70.7, rel=1e-3)
    assert follows.requests_a_day == pytest.approx(follows.rate * 86_400)
    assert follows.tokens_a_day == pytest.approx(follows.requests_a_day * 2200)


@pytest.mark.parametrize("load, a_day, n_users", [
    ({"users": 100_000, "hours": 8}, 300_000, 100_000),
    ({"users": 2e6, "requests_each": 5, "daily": ",".join(["1"] * 16 + ["5"] * 8)}, 10e6, 2e6),
    ({"calls": "30M/year", "requests_each": 30, "burst": 7, "percentile": 0}, 30e6 * 30 / 365, None),
])  # fmt: skip
def test_who_was_asked_for_is_served(load: dict[str, Any], a_day: float, n_users: float | None) -> None:
    """What is bought bears as many such days, one above the other, as it bears such peaks; a peak is not all day."""
    found = plan(**COMMON, **load)
    more = found.consequences.rate / found.plan.rate
    assert more >= 1 and found.consequences.requests_a_day == pytest.approx(more * a_day)
    if n_users is not None:
        assert found.consequences.users == pytest.approx(more * n_users)


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


def test_what_is_rounded_up_is_less_busy(runs: str) -> None:
    """Two systems for 1.1 of them: each instance bears 55 % of what it can, which 10 in flight do, and not 25."""
    found = asked(runs, rate=70.744 * 1.1)
    assert found.plan.systems == 2 and found.operating.concurrency == 10
    assert asked(runs, rate=70.744 * 1.99).operating == asked(runs, rate=70.744 * 1.99).plan.point


def test_one_system_at_least() -> None:
    found = plan(**COMMON, rate=1e-9, spare=1).plan
    assert (found.low, found.systems, found.high) == (2, 2, 2)


def test_a_waterfall_only_goes_up_to_what_is_bought() -> None:
    found = plan(**COMMON, rate=1000, utilisation=0.7, spare=2)
    systems = [step.systems for step in found.waterfall]
    assert systems == sorted(systems) and systems[-1] == found.plan.systems
    assert found.instances * found.plan.point.tp <= 8 * (found.plan.systems - 2)


def test_the_ideal_is_the_datasheets() -> None:
    """One token out, so that none is read again: 1,000 tokens at 1,979 TFLOPS, the head once, attention in 16 bits."""
    found = plan(model="llama-3-8b", isl=1000, osl=1, rate=31, precision=["fp8"], hardware=["H100"], mode="offline",
                 simulate=False)  # fmt: skip
    model = PRESETS["llama-3-8b"]
    flops = 2 * (model.parameters * 1000 + model.head_parameters)
    attention_s = 2 * 32 * 4096 * 1000**2 / (989e12 * 0.35)
    assert found.waterfall[0].systems == pytest.approx(31 * (flops / 1979e12 + attention_s) / 8, rel=0.02)


def test_the_ideal_of_calls_in_a_row_is_that_of_all_their_tokens() -> None:
    """As above, with three calls: tokens are so many together, the head is read once by each, attention is of each."""
    found = plan(model="llama-3-8b", isl=1000, osl=1, rate=31, precision=["fp8"], hardware=["H100"], mode="offline",
                 simulate=False, pipeline="guard:300/1>rag:2000/1>answer")  # fmt: skip
    model = PRESETS["llama-3-8b"]
    flops = 2 * (model.parameters * 3300 + 3 * model.head_parameters)
    attention_s = 2 * 32 * 4096 * (300**2 + 2000**2 + 1000**2) / (989e12 * 0.35)
    first = found.waterfall[0]
    assert first.systems == pytest.approx(31 * (flops / 1979e12 + attention_s) / 8, rel=0.03)
    assert first.why == "H100 SXM as its datasheet says, in fp8: every byte and operation of 3 calls"


@pytest.mark.parametrize("hardware, pp", [("H100", 1), ("L40S", 2)])
def test_two_equal_calls_have_a_waterfall_of_twice_the_systems(hardware: str, pp: int) -> None:
    asked: dict[str, Any] = {**COMMON, "ttft_ms": 1e6, "hardware": hardware, "pp": pp, "rate": 1000, "tp": 1,
                             "precision": "fp8"}  # fmt: skip
    one, two = plan(**asked).waterfall, plan(**asked, pipeline="same:2000/200>answer").waterfall
    assert len(one) == len(two) == 7, "from the datasheet to what is bought"
    for alone, both in zip(one[:3], two[:3], strict=True):
        assert both.systems == pytest.approx(2 * alone.systems)
        assert both.why.removesuffix(" of 2 calls") == alone.why


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
    waits, other = next(tables(two)), next(tables(one))
    told_of = "TTFT is from the request's beginning to the last call's first token, and ITL is that call's"
    assert told_of in waits.notes and told_of not in other.notes


def test_the_p95_of_measured_calls_is_said_to_be_a_bound(runs: str) -> None:
    """The sum of each call's: in words where it is shown, beside what a limit on it decides, and as data."""
    said = "the p95 of calls in a row is the sum of each call's p95: as a rule an upper bound, not measured"
    more = {"pipeline": "same:2000/200>answer", "ttft_ms": 1e5}
    one, two = asked(runs, rate=5, of="p95", ttft_ms=1e5), asked(runs, rate=5, of="p95", **more)
    first, both = one.plan.point.p95, two.plan.point.p95
    assert first is not None and both is not None and one.plan.point.concurrency == two.plan.point.concurrency
    assert both.ttft_s == pytest.approx(first.e2e_s + first.ttft_s) and both.e2e_s == pytest.approx(2 * first.e2e_s)
    assert (
        said in next(tables(two)).notes
        and two.plan.provenance == f"measured; {said}"
        and escape(said) in size_page(two)
    )
    assert said not in " ".join(next(tables(one)).notes) + one.plan.provenance
    described = answer_to_dict(two)
    assert described["answer"]["point"]["p95_is_upper_bound"] and said in described["definitions"]["p95"]
    assert not answer_to_dict(one)["answer"]["point"]["p95_is_upper_bound"]
    assert asked(runs, rate=5, **more).plan.provenance == "measured", "of a limit on the mean the p95 decides nothing"


def test_memory_adds_up() -> None:
    """Llama-3-8B in fp16: 131,072 bytes a token; weights of 16.06 GB; 80 GB less a tenth and 3 GB for all."""
    found = plan(**COMMON, rate=10, precision="fp16", tp=1)
    m, n = found.memory, found.plan.point.concurrency
    assert m is not None and m.weights == pytest.approx(16.06e9, rel=2e-3) and m.kept_back == pytest.approx(11e9)
    assert m.kv_in_use == pytest.approx(min(n * 2100 * 131_072, 80e9 - 11e9 - m.weights))
    assert m.weights + m.kv_in_use + m.free + m.kept_back == pytest.approx(m.total) == pytest.approx(80e9)


def test_an_answer_as_data(runs: str) -> None:
    found = json.loads(json.dumps(answer_to_dict(asked(runs, rate=707.5))))
    assert found["answer"]["systems"] == 11 and found["answer"]["point"]["requests_per_s_of_system"] == 70.744
    assert found["answer"]["limits"] == {"ttft_ms": 500, "itl_ms": None, "e2e_ms": None, "of": "mean"}
    assert found["question"]["rate"] == 707.5 and found["memory"] is None


def test_what_a_table_leaves_out_is_told(tmp_path: Path) -> None:
    """A row whose requests in flight are not rate x time, within 15 %."""
    path = tmp_path / "runs.csv"
    unsteady = ROWS[0].replace(",5.195,", ",9,")
    path.write_text("\n".join((HEAD, *ROWS, unsteady, unsteady)) + "\n")
    last_note = interpretation_notes(asked(str(path), rate=5))[-1]
    assert last_note == f"{path}: 2 rows left out, which were not in a steady state"
    path.write_text("\n".join((HEAD, *ROWS)) + "\n")
    assert "left out" not in " ".join(interpretation_notes(asked(str(path), rate=5)))


@pytest.mark.parametrize("rate, said", [
    (70, "1 to 2 systems, as they may be 2% off"), (60, "1 system, even if they are 2% off"),
    (200, "3 systems, even if they are 2% off"),
])  # fmt: skip
def test_a_band_is_told_where_it_is_one(runs: str, rate: float, said: str) -> None:
    """70.744 requests/s of a system: of 70 2 % more are 71.4."""
    assert uncertainty_text(asked(runs, rate=rate)) == said


def test_why_there_is_no_p95_beside() -> None:
    found = plan(**COMMON, rate=5)
    assert found.other is None and "(--no-simulate)" in found.why_no_other


@pytest.mark.parametrize("more, said", [
    ({"systems": "1", "spare": 1}, "more than those"),
    ({"rate": 5, "hardware": "H1000"}, 'did you mean "h100"'), ({"rate": 5, "model": "llama-3-9b"}, "llama-3-8b"),
    ({"rate": 5, "ttft_ms": 1}, "nothing here keeps the limit on TTFT"),
    ({"rate": 5, "isl": 9000}, "at most the context"),
    ({"rate": 5, "model": "llama-3-70b", "tp": 1, "hardware": "T4"}, "have "), ({"rate": 5, "model": None}, "no model"),
    ({"rate": 5, "of": "p95"}, "which a closed form does not know"),
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


def test_systems_of_several_kinds_add_up() -> None:
    """What is there serves what each kind would alone; a load beside it needs so much less, or nothing."""
    h100, a100 = (plan(**COMMON, systems="1", hardware=name).consequences.rate for name in ("H100", "A100"))
    both = plan(**COMMON, systems="2 x H100, 3 x A100")
    assert both.consequences.rate == pytest.approx(2 * h100 + 3 * a100, rel=1e-6)
    rest = plan(**COMMON, systems="3 x A100", hardware="H100", rate=3 * a100 + 1.5 * h100)
    assert rest.plan.systems == 2 and rest.plan.fractional == pytest.approx(1.5)
    assert rest.consequences.rate == pytest.approx(3 * a100 + 2 * h100) and rest.existing[0].rate == pytest.approx(
        3 * a100
    )
    enough = plan(**COMMON, systems="3 x A100", rate=3 * a100 * 0.99, spare=1)
    assert enough.plan.systems == 0 and enough.money is None and enough.consequences.rate == pytest.approx(3 * a100)


def test_smaller_systems_are_as_many_devices() -> None:
    big, small = (plan(**COMMON, rate=1000, system_size=n, tp=1).plan for n in (8, 2))
    assert small.fractional == pytest.approx(4 * big.fractional) and small.point.rate == big.point.rate
    assert all(p.tp <= 2 for p in plan(**COMMON, rate=1000, system_size=2).offers.points)


def test_a_slice_has_its_share() -> None:
    """3g of an H100: 3 of 7 parts of its processors, half of its memory; two of them a device; each by itself."""
    found = plan(**COMMON, rate=100, hardware="H100 3g.40gb")
    bought = found.offers.hardware_for(found.plan.point.device)
    assert bought is not None and bought.device.memory_bytes == 40e9 and bought.device.bandwidth == 3350e9 / 2
    assert bought.device.peaks["fp16"] == pytest.approx(989e12 * 3 / 7)
    assert (found.plan.point.system, {p.tp for p in found.offers.points}) == (16, {1})
    whole = plan(**COMMON, rate=100, hardware="H100")
    assert found.plan.fractional > whole.plan.fractional, "slices do not add up to more than the device"
    assert found.money is not None and max(found.money.hourly) / 2 <= found.instances
    assert found.money.bought is not None and found.money.bought.purchase == 80_000


def test_this_machine_by_its_roofline() -> None:
    """Reading at 20 GB/s in bfloat16, a token of SmolLM2 takes at least 13 ms; a system is one machine."""

    def rate(value: float) -> Rate:
        return Rate(value, value, value)

    roofline = Roofline(
        2, (MemoryLevel("DRAM", None, rate(15e9), rate(20e9)),),
        (Compute("bf16", rate(1e11), rate(2e11), rate(4e11)), Compute("w8a8", rate(2e11), rate(4e11), None)),
    )  # fmt: skip
    asked = {"model": "smollm2-135m", "isl": 100, "osl": 50, "ttft_ms": 5000, "rate": 0.1, "hardware": "this",
             "simulate": False}  # fmt: skip
    found = answer_question(SizingQuestion.from_answers(asked), local_roofline=lambda: roofline)
    assert {p.precision for p in found.offers.points} == {"bf16", "int8"} and found.plan.point.system == 1
    alone = min((p for p in found.offers.points if p.precision == "bf16"), key=lambda p: p.concurrency)
    assert alone.concurrency == 1 and alone.mean.itl_s > 2 * 134.5e6 / 20e9
    assert found.money is None, "nobody sells it"
    assert "no processor was among what was measured" in found.plan.provenance


@pytest.mark.parametrize("more, said", [
    ({"systems": "0"}, '"4", or "2 x A100'), ({"systems": "2 A100"}, '"4", or'),
    ({"systems": "2 x H1000"}, "did you mean"), ({"systems": "1 x A100, 1 x H100", "spare": 1}, "and some to spare"),
    ({"hardware": "H100 5g", "rate": 1}, "1g, 2g"), ({"hardware": "L40S 1g", "rate": 1}, "L40S is not sliced here"),
    ({"tp": 4, "system_size": 2, "rate": 1}, "TP4"),
])  # fmt: skip
def test_hardware_that_is_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as found:
        plan(**{**COMMON, **more})
    assert said in str(found.value)


def test_models_that_share_systems_are_rounded_once() -> None:
    small = [plan(**COMMON, rate=rate) for rate in (5, 10, 20)]
    together = share_systems(small)
    devices = sum(answer.instances * answer.plan.point.tp for answer in small)
    assert (together.devices, together.systems, together.apart) == (devices, math.ceil(devices / 8), 3)
    with pytest.raises(ConfigError, match=r"8 x A100 SXM 80GB and 8 x H100 SXM"):
        share_systems([small[0], plan(**COMMON, rate=5, hardware="A100")])
    with pytest.raises(ConfigError, match="different numbers of spare"):
        share_systems([small[0], plan(**COMMON, rate=5, spare=1)])


def test_the_scheduler_that_serves_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """By simulation: percentiles, the mean beside the p95, what is there and other limits by the same."""
    monkeypatch.setattr(capacity, "_LEAST", 300)  # requests: fewer than are told to people
    monkeypatch.setattr(capacity, "_REQUESTS_PER_SYSTEM", 1)
    limit_s = 0.045
    asked = {**COMMON, "simulate": True, "precision": "fp8", "tp": 1, "isl": 500, "osl": 20, "ttft_ms": limit_s * 1e3}
    found = plan(**asked, rate=1000)
    point = found.plan.point
    assert point.source == FigureSource.SIMULATED and point.sampled is not None and point.p95 is not None
    assert point.mean.ttft_s <= limit_s and point.mean.ttft_s < point.p95.ttft_s < point.sampled.p99.ttft_s
    assert point.concurrency == pytest.approx(point.rate * point.mean.e2e_s), "Little's law"
    assert found.other is not None and found.other.fractional > found.plan.fractional
    assert found.other.point.p95 is not None and found.other.point.p95.ttft_s <= limit_s
    instances = found.plan.systems * 8
    assert found.operating.rate == pytest.approx(1000 / instances) and found.operating.mean.ttft_s <= limit_s
    changed = {change.what: change.fractional for change in found.changes}
    (every,) = (table for table in tables(found) if table.key == "configurations")
    assert len(every.rows) == 1 and not every.notes, "simulated"
    (every,) = (table for table in tables(plan(**{**asked, "tp": None}, rate=1000)) if table.key == "configurations")
    assert every.rows[-1][-1] == "analytic" and "none of these could serve as much" in every.notes[-1]
    said, within = point_to_dict(point)["sampled"], point.sampled.mean_within
    assert said["mean_within"] == {"ttft_ms": within.ttft_s * 1e3, "itl_ms": within.itl_s * 1e3,
                                   "e2e_ms": within.e2e_s * 1e3}  # fmt: skip
    assert not [name for some in said.values() if isinstance(some, dict) for name in some if name.endswith("_s")]
    half, twice = changed["limits half as long"], changed["limits twice as long"]
    assert half is not None and twice is not None and half > found.plan.fractional >= twice
    slow = plan(**{**asked, "ttft_ms": 2e3 * limit_s}, systems="1", factor=2)
    assert slow.plan.point.rate == pytest.approx(point.rate / 2), "every time twice as long, and limits, too"
    given = plan(**asked, systems="2 x H100")
    assert given.consequences.rate == pytest.approx(16 * point.rate)
    with pytest.raises(ConfigError, match="limit on TTFT"):
        plan(**{**asked, "ttft_ms": 1}, rate=1)


def test_seed_b_in_closed_loops() -> None:
    """Llama-3-8B, 2,000 in and 200 out, a mean TTFT below 500 ms: 70.75 requests/s of 8 H100s were measured."""
    asked = {**COMMON, "simulate": True, "precision": "fp8", "tp": 1, "arrivals": "closed", "systems": "1"}
    found = plan(**asked)
    assert found.consequences.rate == pytest.approx(70.75, rel=0.1) and found.plan.binding == "the limit on TTFT"
    assert found.plan.point.sampled is not None and "always in flight" in found.plan.point.sampled.how
