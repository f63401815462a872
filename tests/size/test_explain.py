"""Why so many, which memory, other TPs, and how far given machines reach: beside sums by hand."""

from dataclasses import replace

import pytest

from millrace.errors import ConfigError
from millrace.machine.devices import find_device
from millrace.size import capacity
from millrace.size.capacity import Lengths
from millrace.size.explain import capacity_table, memory, reach, waterfall
from millrace.size.models import PRESETS
from millrace.size.plan import Fleet, instance_of, plan, simulated_points
from millrace.size.points import Limits, Point, Source, Waits

H100 = find_device("H100")
EIGHT = instance_of(PRESETS["llama-3-8b"], H100, "fp8", 1)
POINT = Point(
    model="m", device="H100 SXM", precision="fp8", tp=1, input_tokens=2000, output_tokens=200, concurrency=25,
    rate=8.8375, mean=Waits(0.489, 0.0117, 2.825), p95=None, source=Source.MEASURED,
)  # fmt: skip


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer requests a point: what must hold holds with any number."""
    monkeypatch.setattr(capacity, "_LEAST", 100)


def test_a_waterfall_only_rises_to_what_is_bought() -> None:
    fleet, limits = Fleet(utilisation=0.8, spare=1), Limits(ttft_s=0.05, itl_s=0.008)
    points = simulated_points(EIGHT.model, [H100], ["fp8"], Lengths(300, 20), limits)[-1:]
    found = plan(3000, points, limits, fleet, EIGHT)
    steps = waterfall(found, replace(EIGHT, tp=found.point.tp), fleet)
    systems = [step.systems for step in steps]
    assert systems == sorted(systems) and len(steps) == 8
    assert systems[4] == pytest.approx(found.fractional)
    assert systems[5] == pytest.approx(found.fractional / 0.8)
    assert systems[6:] == [found.systems - 1, found.systems]


def test_the_ideal_is_the_datasheets() -> None:
    """One token in and none read again: 31 requests/s of 1,000 tokens at 1,979 TFLOPS, and the head once each."""
    one = replace(POINT, input_tokens=1000, output_tokens=1, rate=1.0)
    found = plan(31, [one], Limits(), Fleet())
    model = EIGHT.model
    flops = 2 * (model.parameters * 1000 + model.head_parameters)
    attention_s = 2 * 32 * 4096 * 1000**2 / (989e12 * 0.35)
    assert waterfall(found, EIGHT, Fleet())[0].systems == pytest.approx(31 * (flops / 1979e12 + attention_s) / 8)


def test_the_memory_of_an_instance() -> None:
    """80 GB: 8 of them not used, 3 for software, 8.03 and the head's and table's second bytes of weights; the rest."""
    found = memory(EIGHT, POINT)
    assert found.total == 80e9 and found.kept_back == pytest.approx(11e9)
    assert found.weights == EIGHT.model.parameters + 2 * EIGHT.model.head_parameters * 2
    assert found.held == pytest.approx(25 * 2100 * 65536)
    assert found.kept_back + found.weights + found.held + found.free == pytest.approx(found.total)
    full = memory(EIGHT, replace(POINT, concurrency=1e6))
    assert full.free == 0 and full.held == pytest.approx(found.held + found.free)


def test_a_table_of_tps_has_a_row_or_a_reason_for_each() -> None:
    limits = Limits(ttft_s=0.033)
    rows = capacity_table(PRESETS["llama-3-70b"], H100, "fp8", Lengths(300, 2), limits, (1, 2, 8))
    assert [row.tp for row in rows] == [1, 2, 8]
    assert rows[0].point is None and "takes 7" in rows[0].why and "GB" in rows[0].why
    assert rows[1].point is None and "TTFT" in rows[1].why
    best = rows[2].point
    assert best is not None and best.mean.ttft_s <= 0.033 and best.rate_of_system == best.rate


def test_how_far_given_machines_reach() -> None:
    """70.7 requests/s for 8 hours at 3 a person: 679 thousand users a day."""
    found = reach(1, POINT, Fleet())
    assert found.rate == pytest.approx(70.7) and round(found.users, -3) == 679_000
    assert found.requests_a_day == pytest.approx(70.7 * 28800)
    assert found.tokens_a_day == pytest.approx(70.7 * 28800 * 2200)
    assert reach(3, POINT, Fleet(0.5, 1)).rate == pytest.approx(70.7)
    bought = plan(found.rate * 2, [POINT], Limits(), Fleet())
    assert bought.systems == 2, "the question reversed"


@pytest.mark.parametrize("wrong", [
    lambda: reach(1, POINT, Fleet(spare=1)), lambda: reach(1, POINT, Fleet(), hours=25),
    lambda: reach(1, POINT, Fleet(), requests_a_user=0), lambda: reach(10**8, POINT, Fleet()),
])  # fmt: skip
def test_nonsense_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError):
        wrong()  # type: ignore[operator]
