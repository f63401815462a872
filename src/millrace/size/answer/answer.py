"""The answer to a sizing question: systems with their uncertainty, the reasons, what-if results and costs."""

import datetime
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from millrace.errors import ConfigError
from millrace.machine.roofline import Roofline
from millrace.size.answer.alternatives import Alternative, Costs, alternatives
from millrace.size.answer.scenario import ExistingSystems, Scenario, check_systems, parse_existing_systems
from millrace.size.answer.sensitivity import Change, sensitivities
from millrace.size.answer.sizing import SizingPlan, round_up
from millrace.size.answer.waterfall import Offer, WaterfallStep, capacity_table, waterfall
from millrace.size.load.arrivals import make_traffic
from millrace.size.load.load_forecast import USER_REQUESTS, Demand, forecast_demand, supported_users
from millrace.size.load.peak_load import DAY_S
from millrace.size.load.token_lengths import RequestWork, request_work
from millrace.size.money.prices import read_prices
from millrace.size.money.tco import Money
from millrace.size.performance.closed_form import InstanceMemory, memory
from millrace.size.performance.hardware import measured_here
from millrace.size.performance.operating_point import OperatingPoint
from millrace.size.performance.operating_points import Offers
from millrace.size.question.question import SizingQuestion, parse_limits
from millrace.size.question.question_validation import check_question
from millrace.size.simulation.search_budget import Progress, SearchBudget
from millrace.size.simulation.simulated_capacity import Replicas, simulate_at

_LOADS = ("rate", "average", "users", "calls", "trace")
_PEOPLE_HOURS = 8.0  # default for --hours


@dataclass(frozen=True, slots=True)
class Consequences:
    """What the systems serve, spares excluded.

    rate: requests/s at the peak; users: number of users with `requests_each` requests a day
    hours: length of the day over which users spread evenly; None if the load has its own daily curve
    """

    rate: float
    requests_a_day: float
    tokens_a_day: float
    users: float
    hours: float | None
    requests_each: float


@dataclass(frozen=True, slots=True)
class CompliantLoad:
    """Existing systems and the requests/s that they serve within the limits."""

    device: str
    systems: int
    rate: float


@dataclass(frozen=True, slots=True)
class SizingAnswer:
    """A plan with everything that explains it.

    plan: for the requested limits; other: for the same limits on the other statistic (mean or p95)
    why_no_other: reason if there is no such plan; changes: what-if results
    demand: None if the question is what given systems can serve
    operating: latencies at the peak on the systems that are bought, which are rounded up
    not_simulated: configurations whose simulation was cut because the search time was up
    """

    question: SizingQuestion
    work: RequestWork
    demand: Demand | None
    offers: Offers
    plan: SizingPlan
    other: SizingPlan | None
    why_no_other: str
    memory: InstanceMemory | None
    waterfall: tuple[WaterfallStep, ...]
    table: tuple[Offer, ...]
    changes: tuple[Change, ...]
    consequences: Consequences
    alternatives: tuple[Alternative, ...]
    money: Money | None
    operating: OperatingPoint
    existing: tuple[CompliantLoad, ...] = ()
    not_simulated: tuple[str, ...] = ()

    @property
    def instances(self) -> int:
        """Return the number of instances that the load needs; systems are rounded up from it."""
        per_system = self.plan.point.system / self.plan.point.devices
        return round_up(self.plan.fractional / self.question.hardware.utilisation * per_system, 1)


def plan(**answers: Any) -> SizingAnswer:
    """Size systems for a load: plan(model="llama-3-8b", isl=2000, osl=200, rate=70, ttft_ms=500, hardware=["H100"]).

    Keywords are named like the flags of `millrace size`.
    raises ConfigError if answers are missing, unknown or contradictory, or if no hardware meets the limits (the error
    names the limit and the closest configuration)
    """
    return answer_question(SizingQuestion.from_answers(answers))


def answer_question(
    question: SizingQuestion,
    today: datetime.date | None = None,
    local_roofline: Callable[[], Roofline] = measured_here,
    tell: Progress = lambda *_: None,
) -> SizingAnswer:
    """Answer a question. today: to recognise old prices; tell: progress of the simulations. raises ConfigError"""
    check_question(question)
    limits, local_roofline = parse_limits(question.limits), cache(local_roofline)  # measuring takes seconds
    prices = read_prices(None if question.money.prices is None else Path(question.money.prices))
    has_load = question.hardware.systems is None or any(getattr(question.load, name) is not None for name in _LOADS)
    load = forecast_demand(question.load) if has_load else None
    recorded = None
    if load is not None and load.trace is not None:
        recorded = float(load.trace.n_input.mean()), float(load.trace.n_output.mean())
    request_calls = request_work(question.request, recorded)
    existing_systems = parse_existing_systems(question, request_calls, local_roofline)
    check_systems(question, existing_systems, has_load)
    search = SearchBudget(question.search.search_s, tell)
    traffic = make_traffic(question, None if load is None else load.trace)
    case = Scenario(
        question, limits, load, request_calls, existing_systems, local_roofline, Replicas(search, traffic.gaps), traffic
    ).simulate_existing()
    offers = case.offers() if load is not None else existing_systems[0].offers
    _check_p95(case, offers)
    found_on = alternatives(case, offers, Costs(case, prices, today or datetime.date.today()))
    first = found_on[0]
    if first.plan is None:
        assert first.why_not is not None
        raise first.why_not
    best, offers, h = first.plan, first.offers, question.hardware
    other, why_no_other = _plan_other_statistic(case, offers)
    instance, operating, left = offers.instance(best.point), _operating(case, offers, best), search.left
    loaded = existing_systems if load is not None or len(existing_systems) > 1 else ()
    return SizingAnswer(
        question, request_calls, load, offers, best, other, why_no_other,
        None if instance is None else memory(instance, best.point),
        waterfall(best, offers, request_calls, h.utilisation, h.spare), capacity_table(offers.points, limits),
        () if left else sensitivities(case, offers, best),  # with nothing to compare with
        _consequences(case, best), found_on,
        first.money, operating,
        tuple(_compliant_load(system, case) for system in loaded), left,
    )  # fmt: skip


def _check_p95(case: Scenario, offers: Offers) -> None:
    """Refuse limits on a p95 that is unknown. raises ConfigError"""
    if case.limits.statistic == "mean" or not case.limited or any(point.p95 is not None for point in offers.points):
        return
    h, simulate = case.question.hardware, case.question.search.simulate
    if h.measured is not None:
        columns = "columns ttft_p95_ms, itl_p95_ms, e2e_p95_ms"
        raise ConfigError(f"{h.measured} has no p95, and limits are on it", columns, "ask with --of mean")
    if not simulate:
        raise ConfigError("limits are on the p95, which a closed form does not know, and it was asked for without "
                          "simulation", "limits on the mean, or simulation", "ask with --of mean")  # fmt: skip


def _operating(case: Scenario, offers: Offers, best: SizingPlan) -> OperatingPoint:
    """Return the operating point at the peak on the systems that are bought, which are rounded up."""
    h, point = case.question.hardware, best.point
    instances = max(1, best.systems - h.spare) * point.system // point.devices
    each = best.rate / instances
    if not each:
        return point
    if case.closed and point.sampled is not None:
        return point
    if point.sampled is not None:
        if case.traffic.recorded is not None and case.load is not None and case.load.busy is not None:
            each *= case.load.busy / case.load.peak  # the recorded arrivals include the peaks
        return (
            simulate_at(offers, point, min(each, point.rate), h, case.replicas, instances, case.traffic, case.work)
            or point
        )
    alike = [p for p in offers.points if p.configuration == point.configuration]
    bear = [p for p in alike if p.rate >= each * (1 - 1e-9) and not best.limits.broken(p)]
    return min(bear, key=lambda p: p.concurrency, default=point)


def _compliant_load(existing: ExistingSystems, case: Scenario) -> CompliantLoad:
    rate = existing.rate(case.limits, case.question.hardware.utilisation)
    return CompliantLoad(existing.name, existing.systems, rate)


def _plan_other_statistic(case: Scenario, offers: Offers) -> tuple[SizingPlan | None, str]:
    """Return the plan for limits on the other statistic (p95 or mean), or the reason why there is none."""
    statistic = "p95" if case.limits.statistic == "mean" else "mean"
    if not case.limited:
        return None, "nothing is limited"
    limits = replace(case.limits, statistic=statistic)
    try:
        offers = case.simulate(offers, limits)
        if statistic == "p95" and all(point.p95 is None for point in offers.points):
            return None, _why_no_p95(case)
        return case.plan(offers, limits), ""
    except ConfigError as error:
        return None, error.what


def _why_no_p95(case: Scenario) -> str:
    if case.question.hardware.measured is not None:
        return "it was not measured (columns ttft_p95_ms, itl_p95_ms, e2e_p95_ms)"
    reason = "time was up" if case.question.search.simulate else "nothing was simulated (--no-simulate)"
    return f"{reason}, and a closed form does not know it"


def _consequences(case: Scenario, best: SizingPlan) -> Consequences:
    """Return what bought and existing systems serve together, spares excluded."""
    h, load = case.question.hardware, case.question.load
    existing = case.existing if case.load is not None else case.existing[1:]
    rate = (best.systems - h.spare if best.systems else 0) * h.utilisation * best.point.rate_of_system
    rate += sum(system.rate(case.limits, h.utilisation) for system in existing)
    per_user, tokens = USER_REQUESTS, case.work.n_input + case.work.n_output
    if load.requests_each is not None and load.calls is None:
        per_user = load.requests_each
    if case.load is not None and (average := case.load.average) is not None:
        a_day = rate * average / case.load.peak * DAY_S  # days with the same curve, peaks and nights included
        return Consequences(rate, a_day, a_day * tokens, a_day / per_user, None, per_user)
    hours, a_day = load.hours or _PEOPLE_HOURS, rate * DAY_S
    return Consequences(rate, a_day, a_day * tokens, supported_users(rate, hours, per_user), hours, per_user)
