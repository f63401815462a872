"""What comes to a router: recorded requests at the load's speed, beginnings that are shared, and what is refused."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.errors import ConfigError
from millrace.machine.devices import find_device
from millrace.runtime.scheduling.step_cost_model import StepCost
from millrace.size import plan
from millrace.size.answer.sizing import instance_of
from millrace.size.load.arrivals import Gaps, Traffic, make_traffic
from millrace.size.load.token_lengths import Lengths
from millrace.size.performance.fitted_devices import profile
from millrace.size.performance.models import PRESETS
from millrace.size.performance.operating_point import OperatingPoint
from millrace.size.question.question import SizingQuestion
from millrace.size.simulation import capacity
from millrace.size.simulation.capacity import Replica
from millrace.size.simulation.measured_steps import ProfiledServer
from millrace.size.simulation.serving_model import make_serving
from millrace.tune.recorded_requests import read_recording
from tests.size.test_measured_steps import PROFILE

H100 = find_device("H100")
COMMON: dict[str, Any] = {"model": "llama-3-8b", "hardware": ["H100"], "precision": ["fp8"], "tp": 1, "ttft_ms": 900}


def recorded(path: Path, n: int = 600, families: int = 40, rate: float = 5.0, tick_s: float = 0.0) -> Path:
    """Poisson arrivals of 1,100 tokens in, 20 out, which share their first 1,024 with a fortieth of the others."""
    rng = np.random.default_rng(5)
    times = np.cumsum(rng.exponential(1 / rate, n))
    times = times - times % tick_s if tick_s else times
    lines: Sequence[dict[str, Any]] = [
        {"timestamp": 1e3 * t, "input_length": 1100, "output_length": 20, "hash_ids": [f, f, 10**6 + i]}
        for i, (t, f) in enumerate(zip(times.tolist(), rng.integers(0, families, n).tolist(), strict=True))
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "_LEAST", 200)
    monkeypatch.setattr(capacity, "_REQUESTS_PER_SYSTEM", 1)


def test_recorded_requests_come_at_the_speed_of_the_load(tmp_path: Path) -> None:
    """Twice the trace's average: the same gaps, half as long; what is too long is left out and counted."""
    recording = read_recording(recorded(tmp_path / "t.jsonl"))
    own = len(recording) / recording.span_s
    found = Traffic(recorded=recording).stream(Lengths(9, 9), 4096, 2 * own, 10_000, 0)
    at_s = np.array([one.at_s for one in found.arrivals])
    np.testing.assert_allclose(np.diff(at_s), np.diff(recording.at_s) / 2, rtol=1e-9)
    assert found.left_out == 0 and found.arrivals[3].blocks[0] == found.arrivals[3].blocks[1]
    assert len(Traffic(recorded=recording).stream(Lengths(9, 9), 4096, own, 50, 0).arrivals) == 50
    with pytest.raises(ConfigError, match="no request of the trace fits"):
        Traffic(recorded=recording).stream(Lengths(9, 9), 1000, own, 50, 0)


def test_times_that_a_clock_has_rounded_are_spread(tmp_path: Path) -> None:
    """Ticks of 3 s: within each the requests come one after the other; times of their own stay as they are."""
    recording = read_recording(recorded(tmp_path / "t.jsonl", tick_s=3.0))
    own = len(recording) / recording.span_s
    at_s = [one.at_s for one in Traffic(recorded=recording).stream(Lengths(9, 9), 4096, own, 10_000, 0).arrivals]
    assert len(set(at_s)) == len(recording) > 3 * len(np.unique(recording.at_s)) and at_s == sorted(at_s)
    counts = np.histogram(at_s, bins=np.arange(0, 110, 3.0))[0]
    told = np.histogram(recording.at_s - recording.at_s[0] + 1.5, bins=np.arange(0, 110, 3.0))[0]
    np.testing.assert_array_equal(counts, told)


@pytest.mark.usefixtures("few")
def test_a_router_that_knows_beginnings_finds_more_of_them(tmp_path: Path) -> None:
    """Four servers by their measured steps: cached tokens by chance, and where a beginning was before; waits follow."""
    recording = read_recording(recorded(tmp_path / "t.jsonl"))
    one = Replica(ProfiledServer(PROFILE).serving(Lengths(1100, 20)))

    def behind(routing: str) -> tuple[OperatingPoint, int]:
        point = one.behind(Traffic(routing, recorded=recording), 4, 0.9 * one.full.rate)
        assert point is not None and point.sampled is not None and point.p95 is not None
        assert point.concurrency == pytest.approx(point.rate * point.mean.e2e_s), "Little's law"
        return point, int(point.sampled.how.split("%")[0].split(" ")[-1])

    (blindly, few_hits), (aware, many_hits) = behind("blind"), behind("prefix-aware")
    assert many_hits > few_hits + 5 and aware.mean.ttft_s < 0.9 * blindly.mean.ttft_s
    assert aware.sampled is not None and aware.sampled.how.startswith("600 recorded requests at 4 instances behind")


@pytest.mark.usefixtures("few")
def test_a_plan_says_how_its_trace_was_routed(tmp_path: Path) -> None:
    trace = str(recorded(tmp_path / "t.jsonl", rate=80.0))
    found = plan(**COMMON, trace=trace, routing="prefix-aware", average=800, spare=1)
    how = found.operating.sampled.how if found.operating.sampled else ""
    assert "recorded requests at" in how and "(prefix-aware)" in how and "were in a cache" in how
    assert found.operating.rate < found.plan.rate, "the trace's average, with its own peaks"
    said = plan(**COMMON, trace=trace, isl=1100, osl=20)
    assert said.operating.sampled is not None and "Poisson" in said.operating.sampled.how, "of other requests"


@pytest.mark.usefixtures("few")
def test_a_system_prompt_is_computed_once() -> None:
    """1,024 of 2,000 tokens are the system's: 51.2 % of all are found, but those of each server's first requests."""
    asked = {**COMMON, "system": "1100 tokens", "question": "900 tokens", "osl": 5, "rate": 300}
    traffic = make_traffic(SizingQuestion.from_answers({**asked, "routing": "prefix-aware"}), None)
    assert (
        traffic == Traffic("prefix-aware", shared=2)
        and make_traffic(SizingQuestion.from_answers(asked), None) == Traffic()
    )
    one = Replica(
        make_serving(instance_of(PRESETS["llama-3-8b"], H100, "fp8", 1), profile(H100, "fp8"), Lengths(2000, 5))
    )
    point = one.behind(traffic, 2, 0.5 * one.full.rate)
    assert point is not None and point.sampled is not None
    assert 48 <= int(point.sampled.how.split("%")[0].split(" ")[-1]) <= 51
    alone = one.at(0.5 * one.full.rate)
    assert alone is not None and point.mean.ttft_s < 0.8 * alone.mean.ttft_s


def test_gaps_of_a_gamma_distribution_are_its_bursts() -> None:
    """Shape 1/9: gaps vary by three times their mean (to what 400,000 tell); shape 1 is Poisson, bit for bit."""
    gaps = np.diff(Gaps(1 / 9).times(5.0, 400_000, 1), prepend=0.0)
    assert gaps.mean() == pytest.approx(0.2, rel=0.03) and gaps.std() / gaps.mean() == pytest.approx(3, rel=0.03)
    np.testing.assert_array_equal(Gaps().times(5.0, 9, 1), np.cumsum(np.random.default_rng(1).exponential(0.2, 9)))
    np.testing.assert_allclose(Gaps(0.5).times(10.0, 9, 1), Gaps(0.5).times(5.0, 9, 1) / 2)


def test_bursts_wait_as_long_as_in_a_queue_of_one_server() -> None:
    """One at a time, 20 ms and 5 ms of host each: waits by Lindley's recursion, and longer than without bursts."""
    alone = replace(
        PROFILE, spread=(1.0,), front=0.0, schedule=replace(PROFILE.schedule, max_sequences=1),
        cost=StepCost(((1, 1e-3), (100, 20e-3)), 0.0, 0.0, 0.0, host=5e-3),
    )  # fmt: skip
    waits = []
    for gaps in (Gaps(), Gaps(1 / 9)):
        point = Replica(ProfiledServer(alone).serving(Lengths(100, 1)), gaps=gaps).at(0.6 / 25e-3)
        at_s, free_s, waited = gaps.times(0.6 / 25e-3, 1000, 0), 0.0, []
        for at in at_s.tolist():
            begins = max(at, free_s)
            waited.append(begins - at + 20e-3)
            free_s = begins + 25e-3
        assert point is not None and point.mean.ttft_s == pytest.approx(np.mean(waited[250:]), rel=1e-6)
        assert point.sampled is not None and point.sampled.how.startswith(str(gaps))
        waits.append(point.mean.ttft_s)
    assert waits[1] > 2 * waits[0]


@pytest.mark.nightly
@pytest.mark.usefixtures("few")
def test_bursts_buy_no_less() -> None:
    asked = {**COMMON, "isl": 500, "osl": 10, "rate": 2000, "ttft_ms": 60}
    calm, bursts = plan(**asked), plan(**asked, arrivals="gamma", burstiness=0.1)
    assert bursts.plan.fractional > 1.1 * calm.plan.fractional
    assert "gamma arrivals (burstiness 0.1)" in bursts.plan.provenance
    with pytest.raises(ConfigError, match="--burstiness without --arrivals gamma"):
        plan(**asked, burstiness=0.1)


@pytest.mark.parametrize("answers, said", [
    ({}, "nothing says which requests begin alike"), ({"system": "511 tokens", "question": "9 tokens", "isl": None},
     "nothing says which"), ({"simulate": False}, "with --no-simulate"), ({"arrivals": "closed"}, "--arrivals closed"),
    ({"pipeline": "guard>rag"}, "with --pipeline"), ({"pipeline": "guard>rag", "isl": None, "system": "600 tokens",
     "question": "90 tokens"}, "nothing says which calls"), ({"measured": "r.csv"}, "--measured|cannot be read"),
])  # fmt: skip
def test_what_cannot_be_routed_so_is_refused(answers: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan(**{**COMMON, "isl": 900, "osl": 20, "rate": 5, "routing": "prefix-aware", **answers})
