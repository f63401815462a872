"""The simulator against queueing theory, against sums by hand, and against what must hold in every run."""

import json
import sys
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings

from millrace.engine.executor import ExecutorLimits
from millrace.errors import ConfigError
from millrace.machine.devices import find_device
from millrace.runtime.scheduling.token_budget import TokenBudget
from millrace.size.performance.closed_form import closed_form
from millrace.size.performance.fitted_devices import profile
from millrace.size.performance.models import PRESETS
from millrace.size.performance.roofline_cost import ModelInstance
from millrace.size.performance.serving_overhead import Stack
from millrace.size.performance.step_time import step_time
from millrace.size.simulation.simulator import Simulation, SimulationResult
from millrace.size.simulation.virtual_clock import Arrival, at_once
from tests.support.drawn import SEEDS, examples

SERVED = Stack(name="30 us of host for a sequence and step", host_s=30e-6)


def limits(n_pages: int = 4096, max_sequences: int = 64, max_step_tokens: int = 512) -> ExecutorLimits:
    return ExecutorLimits(
        max_step_tokens=max_step_tokens, max_sequences=max_sequences, max_rows=max_sequences, max_context=4096,
        page_tokens=16, n_pages=n_pages, vocab_size=1 << 15,
    )  # fmt: skip


def seconds(prompts: Sequence[float], starts: Sequence[float], n: int, context: float) -> float:
    """A machine by hand: 1 ms a step, 20 us a prompt token, 0.1 ms a running answer, 0.1 us a token of its context."""
    return 1e-3 + 20e-6 * sum(prompts) + n * (1e-4 + 1e-7 * context)


def check(found: SimulationResult) -> None:
    """Of every run: all is answered in order of time, and Little's law holds."""
    for one in found.requests:
        assert one.arrival.at_s < one.first_s <= one.last_s <= found.seconds
        assert (one.first_s == one.last_s) == (one.arrival.n_output == 1)
    assert found.in_system_s == pytest.approx(found.values("e2e_s").sum(), rel=1e-9)


def test_no_more_is_served_than_the_host_makes_ready() -> None:
    """25 ms of the host for each request, beside steps that would bear twice as many: 40 a second, by both ways."""
    rate, waits = closed_form(seconds, 25e-3, 512, (64, 16), 16, 16)
    found = Simulation(limits(max_sequences=16), seconds, front_s=25e-3).run([Arrival(0, 64, 16)] * 200, closed=16)
    assert closed_form(seconds, 0.0, 512, (64, 16), 16, 16)[0] > 80
    assert rate == pytest.approx(40) and waits.e2e_s == pytest.approx(16 / 40)
    assert 200 / found.seconds == pytest.approx(rate, rel=0.02)


def test_a_request_alone_takes_the_sum_of_its_steps() -> None:
    """1,000 prompt tokens in chunks of at most 512, 10 answer tokens, the first drawn by the last chunk."""
    found = Simulation(limits(), seconds, TokenBudget.unhurried(512)).run([Arrival(2.0, 1000, 10)])
    check(found)
    (one,) = found.requests
    assert one.ttft_s == pytest.approx(2 * 1e-3 + 1000 * 20e-6)
    assert one.e2e_s - one.ttft_s == pytest.approx(sum(seconds([], [], 1, 1001 + i) for i in range(9)))
    assert found.steps == 2 + 9


def test_waits_are_those_of_pollaczek_and_khinchine() -> None:
    """One request at a time, 21 ms each, Poisson arrivals at 70 %: the mean wait is rho S / 2 (1 - rho)."""
    rng = np.random.default_rng(4)
    service_s, rho, n = 1e-3 + 1000 * 20e-6, 0.7, 20_000
    at_s = np.cumsum(rng.exponential(service_s / rho, n))
    simulation = Simulation(limits(max_sequences=1, max_step_tokens=1024), seconds, TokenBudget.unhurried(1024), False)
    found = simulation.run([Arrival(t, 1000, 1) for t in at_s[:4000]])
    check(found)
    waits = found.values("ttft_s") - service_s
    exact = np.zeros(4000)  # Lindley's recursion on these very arrivals: no sampling error
    for i in range(1, 4000):
        exact[i] = max(0.0, exact[i - 1] + service_s - (at_s[i] - at_s[i - 1]))
    np.testing.assert_allclose(waits, exact, atol=1e-9)
    assert waits.mean() == pytest.approx(rho * service_s / 2 / (1 - rho), rel=0.15)


def test_what_the_host_takes_lies_between_steps() -> None:
    """2 ms after each step: who waits for the first token waits for those before it alone; budgets do not see it."""
    found = Simulation(limits(), seconds, TokenBudget.unhurried(512), between=lambda n: 2e-3 * n).run(
        [Arrival(2.0, 1000, 10)]
    )
    check(found)
    (one,) = found.requests
    assert one.ttft_s == pytest.approx(2 * 1e-3 + 1000 * 20e-6 + 2e-3)
    assert one.e2e_s - one.ttft_s == pytest.approx(sum(seconds([], [], 1, 1001 + i) + 2e-3 for i in range(9)))
    assert found.seconds == pytest.approx(one.last_s + 2e-3)


def test_a_closed_loop_keeps_its_number_in_flight() -> None:
    found = Simulation(limits(), seconds, TokenBudget.unhurried(512)).run([Arrival(0, 64, 32)] * 200, closed=8)
    check(found)
    assert found.in_system_s / found.seconds == pytest.approx(8, rel=0.05)


def test_calls_in_a_row_wait_for_one_another() -> None:
    """Alone: as long as the three are one by one, and the first token that a user sees is the last call's."""
    calls = ((700, 10), (1, 1), (300, 40))

    def run(arrival: Arrival, quick: bool = True) -> SimulationResult:
        budget = TokenBudget.unhurried(512)
        host = Simulation(limits(), seconds, budget, quick=quick, front_s=5e-3, between=lambda n: 1e-3 * n)
        return host.run([arrival])

    alone = [run(Arrival(2.0, *call)).requests[0] for call in calls]
    for quick in (True, False):
        found = run(Arrival(2.0, *calls[0], then=calls[1:]), quick)
        check(found)
        (one,) = found.requests
        before = sum(each.e2e_s for each in alone[:2])
        # A call that comes while the host is busy with the end of the one before waits for that, too.
        assert before + alone[2].ttft_s <= one.ttft_s + 1e-12 <= before + alone[2].ttft_s + 3e-3
        assert one.e2e_s - one.ttft_s == pytest.approx(alone[2].e2e_s - alone[2].ttft_s)
        assert (one.arrival.n_input, one.arrival.came_s) == (300, 2.0) and one.arrival.at_s > 2.0
    with pytest.raises(ConfigError, match="request 0 has 9999 tokens in"):
        Simulation(limits(), seconds).run([Arrival(0, 5, 5, then=((9999, 1),))])


def test_a_closed_loop_of_calls_in_a_row_keeps_its_number_in_flight() -> None:
    arrivals = [Arrival(0, 64, 4, then=((64, 32),))] * 200
    found = Simulation(limits(), seconds, TokenBudget.unhurried(512)).run(arrivals, closed=8)
    check(found)
    assert len(found.requests) == 200 and found.in_system_s / found.seconds == pytest.approx(8, rel=0.05)


def test_equal_beginnings_are_computed_once() -> None:
    """Blocks of 512 tokens that came before cost nothing, but for what the rules of the cache leave."""
    first, second = Arrival(0, 1200, 2, (1, 2, 3)), Arrival(60, 1200, 2, (1, 2, 9))
    found = Simulation(limits(), seconds, TokenBudget.unhurried(512)).run([first, second])
    assert found.prefix_hits == 1024
    assert found.requests[1].ttft_s == pytest.approx(1e-3 + 176 * 20e-6)
    without = Simulation(limits(), seconds, TokenBudget.unhurried(512), prefix_cache=False).run([first, second])
    assert without.prefix_hits == 0 and without.requests[1].ttft_s == pytest.approx(without.requests[0].ttft_s)


def test_a_short_pool_preempts_and_all_is_answered() -> None:
    found = Simulation(limits(n_pages=40), seconds, TokenBudget.unhurried(512)).run([Arrival(0, 100, 200)] * 12)
    check(found)
    assert found.preemptions > 0 and len(found.values("e2e_s")) == 12


@settings(max_examples=examples(40, by_night=2))
@given(seed=SEEDS)
def test_steps_taken_at_once_are_those_of_the_loop_that_serves(seed: int) -> None:
    """Every time of every request, bit for bit; steps, preemptions and hits: by EngineLoop and without it."""
    rng = np.random.default_rng(seed)
    n, cached = int(rng.integers(1, 25)), bool(rng.random() < 0.5)
    at_s = np.cumsum(rng.exponential(rng.choice([0.001, 0.03, 1.0]), n))
    families = [tuple(rng.integers(0, 2, 3).tolist()) for _ in range(n)]
    arrivals = [
        Arrival(
            float(t),
            int(rng.integers(1, 1200 if cached else 300)),
            int(rng.integers(1, 60)),
            blocks if cached else (),
            tuple((int(i), int(o)) for i, o in rng.integers(1, 50, (rng.choice([0, 0, 1, 2]), 2))),
        )
        for t, blocks in zip(at_s, families, strict=True)
    ]
    rooms = limits(n_pages=int(rng.integers(100, 300) if cached else rng.integers(30, 200)), max_sequences=8)
    closed = int(rng.integers(1, 9)) if rng.random() < 0.5 else None
    budgets = [TokenBudget.unhurried(512) if seed % 2 else None for _ in range(2)]
    host = (lambda n: 3e-4 + 1e-4 * n) if seed % 3 else at_once
    quick, stepped = (
        Simulation(rooms, seconds, budget, cached, quick=of, between=host).run(arrivals, closed)
        for of, budget in zip((True, False), budgets, strict=True)
    )
    check(quick)
    check(stepped)
    assert [(a.first_s, a.last_s) for a in quick.requests] == [(b.first_s, b.last_s) for b in stepped.requests]
    assert (quick.seconds, quick.steps) == (stepped.seconds, stepped.steps)
    assert (quick.preemptions, quick.prefix_hits) == (stepped.preemptions, stepped.prefix_hits)
    assert len(quick.requests) == n


def test_a_real_cost_model_gives_a_gpu_its_published_speed() -> None:
    """Llama-3-8B in fp8 on one H100, 2,000 tokens in, 200 out, 25 always in flight: 8.84 requests/s served by NIM."""
    device = find_device("H100")
    instance = ModelInstance(PRESETS["llama-3-8b"], device, "fp8", 1, 1.0)
    time_of = step_time(instance, profile(device, "fp8").constants, profile(device, "fp8").stack)
    roomy = limits(n_pages=25_000, max_step_tokens=8192)
    found = Simulation(roomy, time_of, TokenBudget.unhurried(8192)).run([Arrival(0, 2000, 200)] * 75, closed=25)
    check(found)
    middle = [one for one in found.requests if one.arrival.at_s > 0 and one.last_s < found.seconds * 0.9]
    rate = 25 / np.mean([one.e2e_s for one in middle])
    assert rate == pytest.approx(8.84, rel=0.1)


@pytest.mark.parametrize("arrivals, said", [
    ([Arrival(0, 0, 5)], "request 0 has 0 tokens in"),
    ([Arrival(0, 5, 0)], "5 tokens in and 0 out"),
    ([Arrival(0, 4000, 97)], "4000 tokens in and 97 out"),
    ([Arrival(5, 5, 5), Arrival(4, 5, 5)], "request 1 comes at 4 s, after one at 5"),
    ([Arrival(float("nan"), 5, 5)], "comes at nan"),
])  # fmt: skip
def test_what_cannot_be_simulated_is_refused(arrivals: list[Arrival], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Simulation(limits(), seconds).run(arrivals)


@pytest.mark.timing
def test_a_gpu_is_simulated_200_times_as_fast_as_it_would_serve() -> None:
    """200 tokens in and out, 40 requests a second on one H100, on one core; EngineLoop itself beside it.

    On a slow host at least ten times as fast as that.
    """
    device = find_device("H100")
    instance = ModelInstance(PRESETS["llama-3-8b"], device, "fp8", 1, 1.0)
    time_of = step_time(instance, profile(device, "fp8").constants, SERVED)
    rng, times = np.random.default_rng(7), {}
    arrivals = [Arrival(float(t), 200, 200) for t in np.cumsum(rng.exponential(1 / 40, 4000))]
    rooms = ExecutorLimits(
        max_step_tokens=8192, max_sequences=256, max_rows=256, max_context=8192, page_tokens=64, n_pages=6000,
        vocab_size=1 << 15,
    )  # fmt: skip
    for quick, some in ((True, arrivals), (False, arrivals[:400])):
        simulation = Simulation(rooms, time_of, TokenBudget.unhurried(8192), prefix_cache=False, quick=quick)
        started_s = time.perf_counter()
        found = simulation.run(some)
        times[quick] = found.seconds / (time.perf_counter() - started_s)
    sys.stdout.write(json.dumps({"times_real_time": round(times[True]), "step_by_step": round(times[False], 1)}) + "\n")
    assert times[True] >= min(200, 10 * times[False])
