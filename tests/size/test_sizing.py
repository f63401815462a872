"""From operating points to the systems to buy: the published seed cases, and what must hold of every plan."""

import math
import re
from dataclasses import replace

import pytest

from millrace.errors import ConfigError
from millrace.machine.devices import find_device
from millrace.size.answer.sizing import Computed, Fleet, instance_of, plan
from millrace.size.load.peak_load import peak, per_second
from millrace.size.load.token_lengths import Lengths
from millrace.size.performance.closed_form import estimate_point, kv_capacity, shares
from millrace.size.performance.fitted_devices import profile
from millrace.size.performance.measured_points import read_points
from millrace.size.performance.models import PRESETS
from millrace.size.performance.operating_point import FigureSource, Limits, OperatingPoint, Sampled, Waits, best
from millrace.size.performance.roofline_cost import ModelInstance
from millrace.size.performance.serving_overhead import ENGINE
from millrace.size.simulation import capacity
from millrace.size.simulation.capacity import Replica
from millrace.size.simulation.serving_model import make_serving
from tests.size.offered import analytic_points, simulated_points, static_batch
from tests.size.tables import SIZING, needs_tables

H100 = find_device("H100")
LENGTHS = (2000.0, 200.0)
EIGHT = ModelInstance(PRESETS["llama-3-8b"], H100, "fp8")
BASIS = Computed(EIGHT)


def point(rate: float, concurrency: float, ttft_s: float, tp: int = 1, p95: bool = True) -> OperatingPoint:
    waits = Waits(ttft_s, 0.01, concurrency / rate)
    return OperatingPoint(
        model="m", device="H100 SXM", precision="fp8", tp=tp, input_tokens=100, output_tokens=10,
        concurrency=concurrency, rate=rate, mean=waits, p95=waits if p95 else None, source=FigureSource.MEASURED,
    )  # fmt: skip


def test_a_static_batch_of_the_published_figures() -> None:
    """43 B, 3,500 / 500, 32 in flight: 2.606 s of prefill, 21.4 ms a token. For 31 requests/s 13, of 2.405 each."""
    system = point(32 / (2.606 + 500 * 0.0214), 32, 2.606, tp=8)
    found = plan(31, [system], Limits(), Fleet())
    assert found.point.rate_of_system == pytest.approx(2.405, abs=5e-4)
    assert found.fractional == pytest.approx(31 / 2.405, abs=5e-3) and found.systems == 13


def test_the_same_43_b_from_its_shape() -> None:
    """Two instances of TP4 with 16 each on a machine of H100s; as published within 5 %, and as many systems."""
    instance = instance_of(PRESETS["nemo-43b"], H100, "fp16", 4)
    found = static_batch(instance, profile(H100, "fp16"), (3500, 500), 16)
    assert found.mean.ttft_s == pytest.approx(2.606, rel=0.05)
    assert found.mean.itl_s == pytest.approx(0.0214, rel=0.05)
    assert found.rate_of_system == pytest.approx(2.405, rel=0.05)
    assert math.ceil(31 / found.rate_of_system) == 13


def test_llama_2_70b_by_one_factor() -> None:
    """TP4 fp16, 8 x 3,500 tokens: 2,600 ms and 26.8 ms a step, by one factor on both times within 15 %."""
    instance = instance_of(PRESETS["llama-2-70b"], H100, "fp16", 4)
    found = static_batch(instance, profile(H100, "fp16"), (3500, 500), 8, ENGINE).mean
    factors = 2.6 / found.ttft_s, 0.0268 / found.itl_s
    factor = math.sqrt(factors[0] * factors[1])
    assert found.ttft_s * factor == pytest.approx(2.6, rel=0.15)
    assert found.itl_s * factor == pytest.approx(0.0268, rel=0.15)
    assert 1.2 < factor < 1.45, "the published figures are those of the engine table, 1.31 times"


@needs_tables
def test_the_course_exercise() -> None:
    """30 M calls a year, 10 minutes, 3 requests a minute, 7 times at the peak: 4.8 systems, or 2.8 by 500 ms."""
    points, _ = read_points(SIZING / "nim_dli_concurrency.csv")
    ours = [
        p for p in points if "8b" in p.model and "H100" in p.device and (p.input_tokens, p.output_tokens) == LENGTHS
    ]
    rate = 7 * per_second(30e6 * 10 * 3, "year")
    assert rate == pytest.approx(200, abs=0.5)
    quick, slow = (plan(rate, ours, Limits(ttft_s=s), Fleet()) for s in (0.2215, 0.5))
    assert (round(quick.fractional, 1), round(slow.fractional, 1)) == (4.8, 2.8)
    assert (quick.systems, slow.systems) == (5, 3)
    assert slow.binding == "the limit on TTFT" and slow.provenance == "measured"
    assert slow.latency_optimal.configuration.startswith("fp8 TP2")
    assert slow.throughput_optimal.rate_of_system == pytest.approx(110.62, abs=0.01)


def test_peaks_are_bought_for() -> None:
    """Means of 64 and 7 requests/s are peaks of 77 and 12; a system of 8 instances serves 8 x 1."""
    points = [point(1.0, 1, 0.1)]
    assert plan(peak(64).rate, points, Limits(), Fleet()).systems == math.ceil(77 / 8)
    assert plan(peak(7).rate, points, Limits(), Fleet()).systems == math.ceil(12 / 8)


@pytest.mark.parametrize("fleet, expected", [
    (Fleet(), 3), (Fleet(spare=1), 4), (Fleet(utilisation=0.7), 4), (Fleet(utilisation=0.7, spare=2), 6),
])  # fmt: skip
def test_spares_and_utilisation(fleet: Fleet, expected: int) -> None:
    """20 requests/s by systems of 8: 2.5."""
    found = plan(20, [point(1.0, 1, 0.1)], Limits(), fleet)
    assert (found.fractional, found.systems) == (2.5, expected)
    assert found.low <= found.systems <= found.high


def test_what_fits_exactly_is_not_rounded_up() -> None:
    assert plan(2.4, [point(0.1, 1, 0.1)], Limits(), Fleet()).systems == 3


@needs_tables
@pytest.mark.parametrize("of", ["mean", "p95"])
def test_more_load_never_needs_fewer_and_looser_limits_never_more(of: str) -> None:
    points, _ = read_points(SIZING / "nim_dli_concurrency.csv")
    ours = [p for p in points if "8b" in p.model and "H100" in p.device]
    by_load = [
        plan(rate, ours, Limits(ttft_s=0.5, statistic=of), Fleet(0.8, 1)).systems for rate in (0.1, 1, 50, 51, 300, 1e5)
    ]
    assert by_load == sorted(by_load)
    by_limit = [plan(500, ours, Limits(ttft_s=s, statistic=of), Fleet()).fractional for s in (0.1, 0.2, 0.5, 1, 5, 100)]
    assert by_limit == sorted(by_limit, reverse=True)


def test_analytic_plans_say_how_surely_and_why() -> None:
    model = PRESETS["llama-3-8b"]
    points = analytic_points(model.name, ["H100"], ["fp16", "fp8"], LENGTHS)
    found = plan(2000, points, Limits(ttft_s=0.5), Fleet(), Computed(ModelInstance(model, H100, "fp8")))
    assert found.point.source == FigureSource.ANALYTIC and "TensorRT-LLM" in found.provenance
    assert found.error > 0.05 and found.low < found.high
    assert sum(found.shares.values()) == pytest.approx(1)
    assert found.latency_optimal.mean.e2e_s < found.point.mean.e2e_s
    assert found.throughput_optimal.rate_of_system >= found.point.rate_of_system


def test_latency_optimal_is_a_request_alone() -> None:
    """By the closed form two small ones are as quick as one, to the last digits of a float."""
    points = analytic_points("llama-3-8b", ["H100"], ["fp8"], (300, 10))
    found = plan(500, points, Limits(ttft_s=0.2), Fleet(), BASIS).latency_optimal
    assert found.concurrency == 1
    assert found.mean.e2e_s == pytest.approx(min(p.mean.e2e_s for p in points), rel=1e-8)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer requests a point: what must hold of plans holds with any number."""
    monkeypatch.setattr(capacity, "_LEAST", 100)


SMALL = replace(profile(H100, "fp8").stack, sequences=16)
SHORT = Lengths(300, 20)


@pytest.mark.usefixtures("few")
def test_the_best_is_found_among_all() -> None:
    """What branch and bound leaves out serves no more: beside a search of every device, precision and TP."""
    model, devices = PRESETS["llama-3-8b"], [H100, find_device("L40S")]
    limits = Limits(ttft_s=0.02, itl_s=0.01, statistic="p95")
    found = best(simulated_points(model.name, ["H100", "L40S"], ["fp16"], SHORT, limits, SMALL), limits)
    every = [
        Replica(
            make_serving(instance_of(model, device, "fp16", tp), profile(device, "fp16"), SHORT, SMALL)
        ).best_within(limits)
        for device in devices
        for tp in (1, 2, 4, 8)
    ]
    assert found.rate_of_system == pytest.approx(max(p.rate_of_system for p in every if p), rel=1e-9)


@pytest.mark.usefixtures("few")
def test_simulated_plans_buy_no_more_for_looser_limits_and_say_how_they_were_found() -> None:
    fractions = []
    for ttft_s, itl_s in ((0.012, 0.008), (0.012, 0.02), (0.03, 0.02), (1, 1)):
        limits = Limits(ttft_s=ttft_s, itl_s=itl_s, statistic="p95")
        points = simulated_points("llama-3-8b", ["H100"], ["fp16", "fp8"], SHORT, limits, SMALL)
        found = plan(
            900, points + analytic_points("llama-3-8b", ["H100"], ["fp8"], SHORT), limits, Fleet(), Computed(EIGHT)
        )
        fractions.append(found.fractional)
        assert found.point.source == FigureSource.SIMULATED and "Poisson arrivals" in found.provenance
        assert not limits.broken(found.point) and found.low <= found.systems <= found.high
    assert fractions == sorted(fractions, reverse=True)
    assert found.binding != "the limit on ITL" and plan(900, points, limits, Fleet(), BASIS).point == found.point


@pytest.mark.nightly
@pytest.mark.usefixtures("few")
def test_the_43_b_by_simulation() -> None:
    """Without limits, 3,500 / 500 and 31 requests/s on machines with H100s: 13 again, and it is memory that binds."""
    points = simulated_points("nemo-43b", ["H100"], ["fp16"], Lengths(3500, 500), Limits())
    found = plan(31, points, Limits(), Fleet(), Computed(instance_of(PRESETS["nemo-43b"], H100, "fp16", 4)))
    assert found.systems == 13 and found.binding == "memory of the KV cache"


@pytest.mark.nightly
def test_the_decision_table_by_simulation() -> None:
    """Llama-3-8B 2,000 / 200 on H100 in closed loops: published 70.75 and 106.5 within mean TTFTs of 0.5 and 1 s."""
    for ttft_s, published in ((0.5, 70.75), (1.0, 106.5)):
        limits = Limits(ttft_s=ttft_s)
        points = simulated_points("llama-3-8b", ["H100"], ["fp8"], Lengths(2000, 200), limits, closed=True)
        found = plan(200, points, limits, Fleet(), BASIS)
        assert found.point.rate_of_system == pytest.approx(published, rel=0.1)
        assert found.systems == math.ceil(200 / published) and "always in flight" in found.provenance
        assert found.binding == "the limit on TTFT"


@pytest.mark.usefixtures("few")
def test_a_limit_binds_where_more_would_be_served_beyond() -> None:
    limits = Limits(itl_s=0.0065)
    points = simulated_points("llama-3-8b", ["H100"], ["fp8"], SHORT, limits, SMALL)
    assert plan(900, points, limits, Fleet(), BASIS).binding == "the limit on ITL"


def test_a_search_that_was_cut_may_have_left_far_more() -> None:
    """The band's low end is the closed form's then; with time it is that of the simulated point's own error."""
    points = analytic_points("llama-3-8b", ["H100"], ["fp8"], Lengths(2000, 200))
    limits = Limits(ttft_s=2.0)
    most = best(points, limits)
    sampled = Sampled(most.mean, most.mean, most.mean, 100, 10, 0, "Poisson arrivals", cut=True)
    cut = replace(most, rate=most.rate / 10, source=FigureSource.SIMULATED, p95=most.mean, sampled=sampled)
    found = plan(30 * most.rate_of_system, [*points, cut], limits, Fleet())
    assert found.systems == 300 and found.low <= 30 < 294 <= found.high and "time" in found.binding
    whole = replace(cut, sampled=replace(sampled, cut=False))
    assert plan(30 * most.rate_of_system, [*points, whole], limits, Fleet()).low >= 290


def test_the_closed_form_keeps_littles_law_and_its_shares_are_its_time() -> None:
    instance, known = instance_of(PRESETS["llama-3-8b"], H100, "fp16", 1), profile(H100, "fp16")
    rates = []
    for n in (1, 4, 32, 100, 512):
        found = estimate_point(instance, known, LENGTHS, n)
        rates.append(found.rate)
        assert found.rate * found.mean.e2e_s == pytest.approx(n)
        assert found.mean.ttft_s + 199 * found.mean.itl_s == pytest.approx(found.mean.e2e_s)
        assert sum(shares(instance, known, found).values()) == pytest.approx(1)
    assert rates == sorted(rates), "more in flight never serve fewer"


def test_the_cache_of_an_8b_on_one_h100() -> None:
    """By hand: 0.9 x 80 GB less 3 GB and 16.06 GB of weights, 131,072 bytes a token: 403,900 tokens."""
    assert kv_capacity(instance_of(PRESETS["llama-3-8b"], H100, "fp16", 1)) == pytest.approx(403_900, rel=2e-3)


@pytest.mark.parametrize("wrong, said", [
    (lambda: plan(0, [point(1, 1, 0.1)], Limits(), Fleet()), "a peak of 0 requests/s"),
    (lambda: plan(float("nan"), [point(1, 1, 0.1)], Limits(), Fleet()), "a peak of nan"),
    (lambda: plan(1e9, [point(1e-6, 1, 0.1)], Limits(), Fleet()), "at most 10,000,000[^|]*as a number per day"),
    (lambda: plan(1, [], Limits(), Fleet()), "no operating point"),
    (lambda: plan(1, [point(1, 1, 0.9)], Limits(ttft_s=0.5), Fleet()), "limit on TTFT"),
    (lambda: plan(1, [point(1, 1, 0.1, p95=False)], Limits(ttft_s=0.5, statistic="p95"), Fleet()), "no p95"),
    (lambda: Fleet(utilisation=1.2), "a utilisation of 1.2"), (lambda: Fleet(spare=-1), "-1 spare"),
    (lambda: analytic_points("llama-3-70b", ["T4"], ["fp16"], LENGTHS), "takes 14[0-9] GB"),
    (lambda: analytic_points("llama-3-8b", ["A100"], ["fp8"], LENGTHS), "not multiply fp8"),
    (lambda: simulated_points("llama-3-8b", ["H100"], ["fp8"], SHORT, Limits(ttft_s=1e-4)),
     r"limit on TTFT \(mean\)[^|]*the closest is"),
    (lambda: simulated_points("llama-3-8b", ["H100"], ["fp8"], SHORT, Limits(itl_s=1e-4)), "limit on ITL"),
    (lambda: estimate_point(instance_of(PRESETS["llama-3-8b"], H100, "fp16", 1), profile(H100, "fp16"), (8000, 200), 1),
     "requests of 8,200 tokens"),
])  # fmt: skip
def test_what_cannot_be_planned_is_refused(wrong: object, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        wrong()  # type: ignore[operator]
    assert re.search(said, str(error.value))
