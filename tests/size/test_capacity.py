"""Capacities by simulation against queueing theory, bounds, and what must hold whatever the figures are."""

import math
from dataclasses import replace

import numpy as np
import pytest

from millrace.errors import ConfigError
from millrace.machine.devices import find_device
from millrace.size.answer.sizing import instance_of
from millrace.size.load.arrivals import Traffic, arrival
from millrace.size.load.token_lengths import Lengths
from millrace.size.performance.closed_form import memory, shares
from millrace.size.performance.fitted_devices import profile
from millrace.size.performance.models import PRESETS
from millrace.size.performance.operating_point import FigureSource, Limits
from millrace.size.performance.serving_overhead import ENGINE
from millrace.size.simulation import capacity
from millrace.size.simulation.capacity import Replica, _interval
from millrace.size.simulation.serving_model import make_serving
from millrace.size.simulation.simulator import SimulatedServer
from millrace.size.simulation.virtual_clock import Arrival

H100 = find_device("H100")
EIGHT = instance_of(PRESETS["llama-3-8b"], H100, "fp8", 1)
SMALL = replace(profile(H100, "fp8").stack, sequences=16, step_tokens=512)


def replica(n_input: int = 300, n_output: int = 20) -> Replica:
    return Replica(make_serving(EIGHT, profile(H100, "fp8"), Lengths(n_input, n_output), SMALL))


def test_one_at_a_time_is_the_queue_of_pollaczek_and_khinchine() -> None:
    """Prompts alone, one a step: with a mean TTFT of S (1 + rho / 2 (1 - rho)) as the limit, the rate is rho / S."""
    one = replace(ENGINE, sequences=1, step_tokens=4096)
    lone = Replica(make_serving(EIGHT, profile(H100, "fp8"), Lengths(1000, 1), one))
    service_s = 1 / lone.full.rate
    assert service_s == pytest.approx(profile(H100, "fp8").constants.prefill_s(EIGHT, [1000]))
    for rho in (0.4, 0.7):
        found = lone.best_within(Limits(ttft_s=service_s * (1 + rho / 2 / (1 - rho))))
        assert found is not None and found.rate * service_s == pytest.approx(rho, rel=0.12)


def test_looser_limits_never_give_less_and_every_rate_stays_below_what_no_schedule_exceeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capacity, "_LEAST", 200)  # what must hold holds with any number
    one = replica()
    for of in ("mean", "p95"):
        rates = []
        for ttft_s in (0.011, 0.013, 5):
            found = one.best_within(Limits(ttft_s=ttft_s, statistic=of))
            rates.append(found.rate if found else 0.0)
            assert rates[-1] <= one.bound(Limits())
        assert rates == sorted(rates) and rates[-1] > rates[0]
    for itl_s in (0.008, 0.02):
        found = one.best_within(Limits(itl_s=itl_s))
        assert found is None or found.rate <= one.bound(Limits(itl_s=itl_s)) <= one.bound(Limits())
    assert one.full.rate <= one.bound(Limits())


def test_more_load_never_waits_less_for_its_end() -> None:
    """By the same gaps, only shorter: up to what steps of other sizes may move."""
    one = replica()
    points = [one.at(share * one.full.rate) for share in (0.1, 0.5, 0.9)]
    waits = [point.mean.e2e_s for point in points if point is not None]
    assert len(waits) == 3 and waits == sorted(waits)
    assert one.at(0.96 * one.full.rate) is None, "more than 95 % of what a full instance serves"


def test_calls_in_a_row_are_under_load_what_a_request_is() -> None:
    """Bounds, Little's law, and waits that hold all calls: of a lone request those of the calls one by one."""
    calls = (Lengths(600, 10), Lengths(300, 20))
    row = Replica(make_serving(EIGHT, profile(H100, "fp8"), replace(calls[1], before=calls[:1]), SMALL))
    first, second = (replica(call.n_input, call.n_output).single_request.mean for call in calls)
    alone = row.single_request.mean
    assert alone.e2e_s == pytest.approx(first.e2e_s + second.e2e_s)
    assert alone.ttft_s == pytest.approx(first.e2e_s + second.ttft_s) and alone.itl_s == pytest.approx(second.itl_s)
    assert row.full.rate <= row.bound(Limits()) and row.full.calls == ((600, 10), (300, 20))
    assert 1 / row.full.rate == pytest.approx(sum(1 / replica(c.n_input, c.n_output).full.rate for c in calls), rel=0.1)
    point = row.at(0.5 * row.full.rate)
    assert point is not None and point.p95 is not None and point.p95.e2e_s > point.mean.e2e_s > alone.e2e_s
    assert point.concurrency == pytest.approx(point.rate * point.mean.e2e_s)
    behind = row.behind(Traffic("least-loaded"), 3, 0.5 * row.full.rate)
    assert behind is not None and behind.mean.e2e_s > alone.e2e_s
    assert behind.sampled is not None and "3 instances" in behind.sampled.how
    assert row.alone_breaks(Limits(ttft_s=0.9 * alone.ttft_s)) == ("TTFT",) and second.ttft_s < 0.5 * alone.ttft_s
    assert not row.alone_breaks(Limits(ttft_s=1.01 * alone.ttft_s, e2e_s=1.01 * alone.e2e_s))


@pytest.mark.parametrize(
    "calls", [((6000, 1), (200, 500)), pytest.param(((300, 400), (3000, 10)), marks=pytest.mark.nightly)]
)
def test_of_calls_in_a_row_memory_and_time_are_those_of_each(calls: tuple[tuple[int, int], ...]) -> None:
    """Keys and values are there for as long as a call is in flight, which a long prompt hardly is, although it takes
    most of an instance's time."""
    *before, last = (Lengths(*call) for call in calls)
    one = Replica(make_serving(EIGHT, profile(H100, "fp8"), replace(last, before=tuple(before)), SMALL))
    server, rate = SimulatedServer(one.serving.simulation(0)), 0.5 * one.full.rate
    for i in range(200):
        server.advance(i / rate)
        server.admit(arrival(one.lengths, i / rate))
    server.advance(math.inf)
    seen = [(call.last_s - call.arrival.at_s, call.arrival) for call in server.outcomes]
    in_flight_s = sum(took_s for took_s, _ in seen)
    point = one.at(rate)
    assert point is not None and len(seen) == 400
    assert point.input_tokens == pytest.approx(sum(t * a.n_input for t, a in seen) / in_flight_s, rel=0.35)
    assert point.output_tokens == pytest.approx(sum(t * a.n_output for t, a in seen) / in_flight_s, rel=0.1)
    held = memory(EIGHT, point).kv_in_use / point.concurrency / EIGHT.kv_token_bytes
    assert held == pytest.approx(sum(t * (a.n_input + a.n_output / 2) for t, a in seen) / in_flight_s, rel=0.3)
    apart = [replace(point, input_tokens=n_in, output_tokens=n_out, calls=()) for n_in, n_out in calls]
    known = profile(H100, "fp8")
    told, of_each = shares(EIGHT, known, point, SMALL), [shares(EIGHT, known, p, SMALL) for p in apart]
    assert sum(told.values()) == pytest.approx(1)
    among = sorted(of["prefill arithmetic"] for of in of_each)
    assert among[0] < told["prefill arithmetic"] < among[1]
    at_peak_s = sum(known.constants.prefill_s(EIGHT, [n_in]) for n_in, _ in calls) * SMALL.prefill
    assert told["prefill arithmetic"] == pytest.approx(at_peak_s * point.rate, abs=0.15)


def test_a_last_call_of_one_token_has_no_itl_that_would_bound_the_others() -> None:
    row = Replica(make_serving(EIGHT, profile(H100, "fp8"), replace(Lengths(50, 1), before=(Lengths(50, 40),)), SMALL))
    tight = Limits(itl_s=1e-4)
    assert row.full.mean.itl_s == 0 and not tight.broken(row.full)
    assert row.full.rate <= row.bound(tight) == row.bound(Limits())


def test_littles_law_holds_in_runs_and_points() -> None:
    one = replica()
    for n in (1, 7, 16, 30):
        loop = one.run_closed(n)
        assert loop.rate * loop.mean.e2e_s == pytest.approx(n) and loop.source == FigureSource.SIMULATED
    found = one.run([Arrival(0.01 * i, 300, 20) for i in range(200)])
    assert found.in_system_s == pytest.approx(found.values("e2e_s").sum(), rel=1e-9)
    point = one.at(20.0)
    assert point is not None and point.concurrency == pytest.approx(20.0 * point.mean.e2e_s)


def test_a_point_says_what_was_counted_and_under_which_scheduler() -> None:
    point = replica().at(20.0)
    assert point is not None and point.sampled is not None and point.p95 is not None
    seen = point.sampled
    assert (seen.counted, seen.dropped) == (750, 250)
    assert "Poisson" in seen.how and "512 tokens and 16 sequences" in seen.how
    assert point.mean.ttft_s < point.p95.ttft_s < seen.p99.ttft_s
    assert 0 < seen.mean_within.ttft_s < point.mean.ttft_s


def test_limits_that_not_even_a_request_alone_keeps() -> None:
    one = replica()
    assert one.best_within(Limits(ttft_s=1e-4)) is None
    assert one.alone_breaks(Limits(ttft_s=1e-4, itl_s=1e-5, e2e_s=1)) == ("TTFT", "ITL")
    assert one.alone_breaks(Limits(e2e_s=0.01)) == ("E2E",)
    assert one.alone_breaks(Limits(ttft_s=1, itl_s=1, e2e_s=1)) == ()


def test_intervals_cover_a_mean_as_often_as_they_say() -> None:
    rng = np.random.default_rng(3)
    hits = sum(abs(v.mean()) <= _interval(v, np.mean) for v in rng.standard_normal((400, 200)))
    assert 0.92 <= hits / 400 <= 0.98
    assert math.isinf(_interval(np.ones(19), np.mean))


@pytest.mark.parametrize("lengths, device, said", [
    ((0, 5), "H100", "0 tokens in"), ((5, 0), "H100", "and 0 out"), ((8000, 200), "H100", "the context of llama-3-8b"),
    ((100, 10), "T4", "takes 1[67] GB"),
])  # fmt: skip
def test_what_fits_nowhere_is_refused(lengths: tuple[int, int], device: str, said: str) -> None:
    found = find_device(device)
    with pytest.raises(ConfigError, match=said):
        make_serving(
            instance_of(PRESETS["llama-3-8b"], found, "fp16", 1), profile(found, "fp16"), Lengths(*lengths), SMALL
        )


def test_a_router_that_sees_the_load_serves_sooner_than_chance() -> None:
    """One instance behind a router is that instance, bit for bit; of four, those with the fewest serve much sooner."""
    one = replica()
    rate = 0.8 * one.full.rate
    alone, single = one.at(rate), one.behind(Traffic("blind"), 1, rate)
    assert alone is not None and single is not None and (single.mean, single.p95) == (alone.mean, alone.p95)
    blindly, fewest = (one.behind(Traffic(how), 4, rate) for how in ("blind", "least-loaded"))
    assert blindly is not None and fewest is not None and blindly.p95 is not None and fewest.p95 is not None
    assert fewest.mean.ttft_s < 0.8 * blindly.mean.ttft_s and fewest.p95.ttft_s < 0.6 * blindly.p95.ttft_s
    assert fewest.sampled is not None and "4 instances behind a router (least-loaded)" in fewest.sampled.how
    assert fewest.concurrency == pytest.approx(rate * fewest.mean.e2e_s), "Little's law"
    assert one.behind(Traffic("least-loaded"), 4, one.full.rate) is None, "it falls behind"
