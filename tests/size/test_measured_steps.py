"""Planning with a server's measured steps: by the simulation that `verify` runs, on that machine, for that model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.errors import ConfigError
from millrace.machine.cpu import machine_name
from millrace.runtime.scheduling.step_cost_model import SchedulerSettings, StepCost, StepProfile, write_profile
from millrace.size import plan
from millrace.size.answer.answer import SizingAnswer
from millrace.size.answer.sizing import Fleet
from millrace.size.answer.sizing import plan as bought
from millrace.size.load.token_lengths import Lengths
from millrace.size.performance.operating_point import FigureSource, Limits
from millrace.size.report.answer_json import answer_to_dict
from millrace.size.report.page import size_page
from millrace.size.simulation import capacity
from millrace.size.simulation.capacity import Replica
from millrace.size.simulation.measured_steps import MeasuredStepTimes, ProfiledServer
from millrace.size.simulation.virtual_clock import Arrival
from tests.size.test_steps import LAW

SCHEDULE = SchedulerSettings(512, 16, 48, 2048, 64, 512, 0.1, 1.9, 4)
PROFILE = StepProfile(
    "m", "e1f2", machine_name(), "2026-11-23", 1000, 0.05, 2e-3, (0.8, 1.0, 1.1, 1.5), LAW, SCHEDULE
)  # fmt: skip


def planned(tmp_path: Path, profile: StepProfile = PROFILE, **answers: Any) -> SizingAnswer:
    file = tmp_path / "p.json"
    write_profile(file, profile)
    asked = {"hardware": ["this"], "isl": 128, "osl": 32, "rate": 6, "ttft_ms": 500}
    return plan(**{**asked, "profile": str(file), **answers})


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer requests a point: what must hold of plans holds with any number."""
    monkeypatch.setattr(capacity, "_LEAST", 100)
    monkeypatch.setattr(capacity, "_REQUESTS_PER_SYSTEM", 4)


@pytest.mark.usefixtures("few")
def test_a_plan_is_what_verify_predicts(tmp_path: Path) -> None:
    """The chosen rate's waits are those of verify's simulation under the same arrivals, bit for bit."""
    found = planned(tmp_path).plan
    point, n = found.point, 100
    at_s = np.cumsum(np.random.default_rng(0).exponential(1 / point.rate, n))
    arrivals = [Arrival(float(t), 128, 32) for t in at_s]
    seen = MeasuredStepTimes.from_profile(PROFILE).simulation(128).run(arrivals).requests[n // 4 :]
    assert point.source == FigureSource.SIMULATED and point.p95 is not None
    assert point.mean.ttft_s == np.mean([one.ttft_s for one in seen])
    assert point.p95.itl_s == np.quantile([one.itl_s for one in seen], 0.95)
    assert found.error == PROFILE.error and found.systems == np.ceil(found.fractional)
    assert f"measured steps of m (engine e1f2) on {machine_name()}" in found.provenance
    assert "512 tokens and 16 sequences a step" in found.provenance and sum(found.shares.values()) == pytest.approx(1)


@pytest.mark.usefixtures("few")
def test_what_is_told_names_the_steps(tmp_path: Path) -> None:
    answer = planned(tmp_path)
    said = answer_to_dict(answer)["answer"]
    assert said["provenance"] == answer.plan.provenance and said["error"] == 0.05
    assert "measured steps of m" in size_page(answer)
    assert answer.memory is None and answer.money is None, "nobody has said what it has, and costs"
    assert {change.what for change in answer.changes} >= {"prompts half as long", "limits half as long"}
    assert all(change.systems is not None for change in answer.changes)


def test_one_at_a_time_is_the_queue_of_pollaczek_and_khinchine() -> None:
    """Answers of one token, one after the other, 20 ms and 5 ms of host each: the wait is rho S / 2 (1 - rho)."""
    alone = StepProfile(
        "m", "e", machine_name(), "2026-11-23", 100, 0.1, 0.0, (1.0,),
        StepCost(((1, 1e-3), (100, 20e-3)), 0.0, 0.0, 0.0, host=5e-3), replace(SCHEDULE, max_sequences=1),
    )  # fmt: skip
    one = Replica(ProfiledServer(alone).serving(Lengths(100, 1)))
    assert 1 / one.full.rate == pytest.approx(25e-3)
    for rho in (0.4, 0.7):
        found = one.best_within(Limits(ttft_s=20e-3 + 25e-3 * rho / 2 / (1 - rho)))
        assert found is not None and found.rate * 25e-3 == pytest.approx(rho, rel=0.12)


@pytest.mark.usefixtures("few")
def test_more_load_never_needs_less_and_looser_limits_never_more() -> None:
    one, basis = Replica(ProfiledServer(PROFILE).serving(Lengths(128, 32))), ProfiledServer(PROFILE)
    found = [point for s in (0.2, 0.4, 5.0) if (point := one.best_within(Limits(ttft_s=s))) is not None]
    rates = [point.rate for point in found]
    assert len(rates) == 3 and rates == sorted(rates) and rates[0] < rates[-1]
    by_load = [bought(rate, found, Limits(), Fleet(), basis).systems for rate in (1, 5, 6, 60)]
    assert by_load == sorted(by_load) and by_load[0] < by_load[-1]


@pytest.mark.usefixtures("few")
def test_pages_bind_where_they_are_few(tmp_path: Path) -> None:
    """Nine pages hold three requests of 160 tokens; 512 hold all 16."""
    tight = replace(PROFILE, schedule=replace(SCHEDULE, pages=9))
    assert ProfiledServer(tight).serving(Lengths(128, 32)).room == 3
    offline: dict[str, Any] = {"ttft_ms": None, "mode": "offline", "arrivals": "closed"}
    assert planned(tmp_path, tight, **offline).plan.binding == "memory of the KV cache"
    assert planned(tmp_path, **offline).plan.binding != "memory of the KV cache"


@pytest.mark.usefixtures("few")
def test_calls_in_a_row_and_systems_that_are_there(tmp_path: Path) -> None:
    found = planned(tmp_path, pipeline="guard:60/4>rag:128/32", ttft_ms=5000)
    row = found.plan.point
    assert row.source == FigureSource.SIMULATED and row.p95 is not None and row.sampled is not None
    assert row.sampled.p99.ttft_s >= row.p95.ttft_s > row.mean.ttft_s and found.other is not None
    assert row.rate < planned(tmp_path, ttft_ms=5000).plan.point.rate
    assert row.mean.ttft_s > planned(tmp_path).plan.latency_optimal.mean.ttft_s
    there = planned(tmp_path, rate=None, systems="3")
    assert there.consequences.rate == pytest.approx(3 * there.plan.point.rate)


@pytest.mark.parametrize("profile, answers, said", [
    (replace(PROFILE, machine="another"), {}, "of the machine another"),
    (PROFILE, {"hardware": ["H100"]}, "--profile with H100"),
    (PROFILE, {"hardware": []}, "--profile with no hardware"),
    (PROFILE, {"hardware": ["this", "L40S"]}, "--profile with this and L40S"),
    (PROFILE, {"model": "llama-3-8b"}, "the profile is of m"),
    (PROFILE, {"isl": 2000, "osl": 49}, "at most the context of the server of"),
    (replace(PROFILE, schedule=replace(SCHEDULE, pages=2)), {}, "which is 128"),
    (PROFILE, {"precision": ["fp8"]}, "--precision beside --profile"),
    (PROFILE, {"tp": 2}, "--tp beside --profile"),
    (PROFILE, {"stack": "s.json"}, "--stack beside --profile"),
    (PROFILE, {"measured": "runs.csv"}, "--profile with measurements"),
    (PROFILE, {"systems": "2 x H100"}, "--profile with H100"),
    (PROFILE, {"ttft_ms": 1}, "limit on TTFT"),
])  # fmt: skip
def test_what_a_profile_says_nothing_of_is_refused(
    tmp_path: Path, profile: StepProfile, answers: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said.replace("which is 128", "at most the context of .*, 128")):
        planned(tmp_path, profile, **answers)
