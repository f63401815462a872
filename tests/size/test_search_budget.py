"""A search that is ended at any moment gives the best until then, and names what it left; the clock counts calls."""

from itertools import count, pairwise
from typing import Any

import pytest

from millrace.errors import ConfigError
from millrace.size import plan
from millrace.size.answer import answer
from millrace.size.answer.answer import SizingAnswer
from millrace.size.load.token_lengths import Lengths
from millrace.size.performance.operating_point import FigureSource, Limits, OperatingPoint
from millrace.size.performance.operating_points import offers
from millrace.size.question.settings import HardwareSettings
from millrace.size.simulation import capacity
from millrace.size.simulation.search_budget import SearchBudget, SearchTimeoutError
from millrace.size.simulation.simulated_capacity import Replicas, add_simulated
from tests.size.offered import work_of

LIMITS = Limits(ttft_s=0.08)
HARDWARE = HardwareSettings(hardware=("H100",), precision=("fp8", "fp16"), tp=1)
COMMON: dict[str, Any] = {"model": "llama-3-8b", "isl": 500, "osl": 20, "rate": 100, "hardware": ["H100"]}


def counted(limit: float) -> SearchBudget:
    clock = count()
    return SearchBudget(limit, clock=lambda: float(next(clock)))


def sought(search: SearchBudget, closed: bool) -> OperatingPoint | None:
    """The best simulated point."""
    work = work_of(Lengths(500, 20))
    points = add_simulated(
        offers("llama-3-8b", HARDWARE, work), HARDWARE, work, LIMITS, Replicas(search), closed
    ).points
    found = [p for p in points if p.source == FigureSource.SIMULATED and not LIMITS.broken(p)]
    return max(found, key=lambda p: p.rate, default=None)


@pytest.mark.parametrize("closed", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_more_time_never_finds_less(monkeypatch: pytest.MonkeyPatch, closed: bool) -> None:
    monkeypatch.setattr(capacity, "_LEAST", 200)
    monkeypatch.setattr(capacity, "_REQUESTS_PER_SYSTEM", 1)
    ticks: list[str] = []
    clock = count()
    whole = SearchBudget(tell=lambda what, *_: ticks.append(what), clock=lambda: float(next(clock)))
    best = sought(whole, closed)
    assert (
        best is not None and not whole.left and not whole.over and "Simulating fp8 TP1 on H100 SXM (seconds)" in ticks
    )
    rates = []
    for share in (0.001, 0.3, 0.5, 0.7, 0.9):
        search = counted(share * len(ticks))
        point = sought(search, closed)
        assert search.over and search.left, "it was cut, and says what"
        rates.append(0.0 if point is None else point.rate)
    assert all(a <= b for a, b in pairwise([*rates, best.rate]))
    assert rates[0] == 0 < rates[-1]
    assert sought(counted(2 * len(ticks) + 20), closed) == best, "each of the two has all the time that it needs"


def test_a_search_shares_its_time() -> None:
    """Parts of what is left, one in the other, never beyond the whole; what one leaves is there for the next."""
    now_s = 0.0
    search = SearchBudget(80.0, clock=lambda: now_s)

    def lasts(until_s: float) -> None:
        nonlocal now_s
        now_s = until_s
        search.tick()
        now_s = until_s + 0.5
        with pytest.raises(SearchTimeoutError):
            search.tick()

    with search.part(1 / 2):
        with search.part(1 / 4):
            lasts(10.0)
        with search.part(1.0):
            lasts(40.0)
    with search.part(1 / 3):
        search.tick()
    with search.part(1 / 2):
        lasts(60.25)
    lasts(80.0)
    assert not search.has_time


def test_devices_and_configurations_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By counted calls: where the first alone would take it all, each device has a simulated answer, and says why."""
    monkeypatch.setattr(capacity, "_LEAST", 200)
    monkeypatch.setattr(capacity, "_REQUESTS_PER_SYSTEM", 1)

    def limited(limit: float) -> SizingAnswer:
        search = counted(limit)
        monkeypatch.setattr(answer, "SearchBudget", lambda *_: search)
        return plan(**{**COMMON, "hardware": ["H100", "H200", "GH200"]}, ttft_ms=80, precision=["fp8"], tp=1)

    whole = limited(1e9)
    assert not whole.not_simulated and "time" not in whole.plan.binding
    cut = limited(10_000)  # of 13,600: enough for two of the three
    assert cut.not_simulated and not cut.changes
    for one in cut.alternatives:
        assert one.plan is not None and one.plan.point.source == FigureSource.SIMULATED, one.device
        assert one.plan.binding == "time (--search-s): more was not tried"
        (best,) = (other.plan for other in whole.alternatives if other.device == one.device)
        assert best is not None and one.plan.point.rate <= best.point.rate


def test_a_simulation_is_given_up_at_once() -> None:
    search = counted(3)
    for _ in range(3):
        search.tick()
    with pytest.raises(SearchTimeoutError):
        search.tick()
    search.restart(2)
    search.tick()
    assert not search.over, "there is time for something else"


def test_an_answer_without_time_is_the_closed_forms() -> None:
    """And says so; a limit on the p95 needs a simulation."""
    cut = plan(**COMMON, ttft_ms=80, search_s=0.01)
    closed = plan(**COMMON, ttft_ms=80, simulate=False)
    assert cut.plan.point == closed.plan.point and cut.plan.systems == closed.plan.systems
    assert any("fp8 TP1 on H100 SXM" in what for what in cut.not_simulated) and not cut.changes
    with pytest.raises(ConfigError, match=r"after 0.01 s of search nothing was found on H100 SXM"):
        plan(**COMMON, ttft_ms=80, of="p95", search_s=0.01)
