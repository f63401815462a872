"""Predictions beside measurements: of a server that keeps a known law, and figures by hand."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from millrace.bench.client.request_record import BenchRecord
from millrace.bench.load.inputs import Turn
from millrace.bench.run.run import TurnRecord
from millrace.errors import ConfigError
from millrace.runtime.scheduling.step_cost_model import SchedulerSettings
from millrace.size.fit.verify import LoadPart, Probe, Times, arrivals_of, figures
from millrace.size.question.settings import VerifySettings
from millrace.size.simulation.measured_steps import MeasuredStepTimes
from millrace.size.simulation.virtual_clock import Arrival
from tests.size.test_steps import LAW, rows

SCHEDULE = SchedulerSettings(512, 16, 48, 2048, 64, 512, 0.1, 1.9, 4)
FRONT_S = 2e-3
OWN = MeasuredStepTimes(LAW, (1.0,), 0.0, SCHEDULE)


def record(sent_s: float, first_s: float, last_s: float, n_input: int, n_output: int) -> TurnRecord:
    answer = BenchRecord(intended_s=sent_s, sent_s=sent_s, n_prompt=n_input, n_reported=n_output)
    between = np.linspace(first_s, last_s, n_output).tolist()
    answer.chunk_s, answer.chunk_tokens, answer.end_s = between, list(range(1, n_output + 1)), last_s
    return TurnRecord(Turn("", n_output), answer, 0, 0)


def records(
    arrivals: Sequence[Arrival], times: Times, closed: int | None = None, at_s: float = 50.0
) -> list[TurnRecord]:
    """What clients of a server see that keeps these times exactly. at_s: when the first asks"""
    seen = times.own.simulation(100).run(arrivals, closed).requests
    return [
        record(at_s + s.arrival.at_s, at_s + s.first_s, at_s + s.last_s, s.arrival.n_input, s.arrival.n_output)
        for s in seen
    ]


def test_a_server_that_keeps_a_law_is_predicted() -> None:
    """Times from steps of that law: the front is found to 0.2 ms, and a load of 60 % to 8 % in every figure."""
    law = Times(replace(OWN, front_s=FRONT_S), 1.0)
    alone = records([Arrival(0, 100 + i, 20) for i in range(6)], law, closed=1)
    steps = rows(1500, 7)
    found = Times.fit(steps, steps, Probe(alone, steps), SCHEDULE)
    assert found.own.front_s == pytest.approx(FRONT_S, abs=2e-4) and found.pace == pytest.approx(1, abs=0.01)
    at_s = np.cumsum(np.random.default_rng(0).exponential(0.5, 60))
    arrivals = [Arrival(float(t), 90 + i % 40, 40) for i, t in enumerate(at_s - at_s[0])]
    asked = records(arrivals, law)
    told = figures(0.6, [LoadPart(asked, 1.0, found.runs(arrivals))])
    assert {(f.name, f.of) for f in told if f.judged} == {
        ("ttft", "mean"), ("ttft", "p95"), ("itl", "mean"), ("itl", "p95"), ("throughput", "mean")
    }  # fmt: skip
    for figure in told:
        assert abs(figure.error) < 0.08, figure


def test_a_slower_machine_is_predicted_by_the_pace_of_its_probes() -> None:
    steps, slow = rows(1200, 8), rows(300, 9, law=LAW.scaled(1.4))
    alone = Probe(records([Arrival(0, 100, 20)] * 3, Times(OWN, 1.0), closed=1), steps)
    found = Times.fit(steps, slow, alone, SCHEDULE)
    assert found.pace == pytest.approx(1.4, rel=0.03)
    (one,) = found.runs([Arrival(0, 100, 1)], 1)[0].requests
    assert one.ttft_s == pytest.approx(1.4 * LAW.seconds([100], [0], 0, 0), rel=0.15)


def test_figures_are_of_all_rounds_together() -> None:
    times = Times(OWN, 1.0)
    one, two = [Arrival(0, 100, 11)], [Arrival(0, 50, 11), Arrival(4.0, 60, 11)]
    parts = [LoadPart([record(3.0, 3.5, 4.5, 100, 11)], 1.0, times.runs(one, 2)),
             LoadPart([record(9.0, 9.1, 9.2, 50, 11), record(13.0, 13.3, 14.0, 60, 11)], 1.0,
                  times.runs(two, 2))]  # fmt: skip
    by = {(f.name, f.of): f for f in figures(0.9, parts)}
    assert by["ttft", "mean"].measured == pytest.approx((0.5 + 0.1 + 0.3) / 3)
    assert by["itl", "mean"].measured == pytest.approx((1.0 + 0.1 + 0.7) / 30)
    assert by["e2e", "p95"].measured == pytest.approx(np.quantile([1.5, 0.2, 1.0], 0.95))
    assert by["throughput", "mean"].measured == pytest.approx(3 / (1.5 + 5.0))
    assert not by["ttft", "mean"].judged and by["itl", "p95"].judged and not by["e2e", "mean"].judged
    alone_s = [LAW.seconds([n], [0], 0, 0) for n in (100, 50, 60)]
    assert by["ttft", "mean"].predicted == pytest.approx(np.mean(alone_s))


def test_a_slow_server_is_asked_something() -> None:
    """0.2 requests/s for 12 s are 2.4 on average, and in one round of eleven none: that ended all of it."""
    for rate in (1e-3, 0.2, 0.66):
        assert arrivals_of(rate, 12.0) == {"request_rate": rate, "request_count": 8}
    assert arrivals_of(0.67, 12.0) == {"request_rate": 0.67, "duration_s": 12.0}


@pytest.mark.parametrize("loads", ["", "0", "0.5,x", "nan", "2", ",".join(["0.5"] * 21)])
def test_loads_that_cannot_be_asked_are_refused(loads: str) -> None:
    with pytest.raises(ConfigError, match="--loads"):
        VerifySettings(loads=loads).shares  # noqa: B018
    assert VerifySettings(loads="0.5, 0.9").shares == (0.5, 0.9)
