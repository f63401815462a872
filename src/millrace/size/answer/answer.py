"""The whole answer to the six questions: systems with their band, why, what would change it, what follows from it."""

import datetime
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from millrace.errors import ConfigError
from millrace.machine.roofline import Roofline
from millrace.size.answer.alternatives import Alternative, Costs, alternatives
from millrace.size.answer.scenario import ExistingSystems, Scenario, check_systems, systems_there
from millrace.size.answer.sensitivity import Change, sensitivities
from millrace.size.answer.sizing import Plan, rounded
from millrace.size.answer.waterfall import Offer, Step, capacity_table, waterfall
from millrace.size.load.arrivals import traffic_of
from millrace.size.load.load_forecast import USER_REQUESTS, Demand, demand, users
from millrace.size.load.peak_load import DAY_S
from millrace.size.load.token_lengths import Work, work
from millrace.size.money.prices import read_prices
from millrace.size.money.tco import Money
from millrace.size.performance.hardware import measured_here
from millrace.size.performance.instance_memory import Memory, memory
from millrace.size.performance.operating_point import Point
from millrace.size.performance.operating_points import Offers
from millrace.size.question.question import Question, limits_of
from millrace.size.question.question_validation import check_question
from millrace.size.simulation.search_budget import Progress, Search
from millrace.size.simulation.simulated_capacity import Replicas, simulated_at

_LOADS = ("rate", "average", "users", "calls", "trace")
_PEOPLE_HOURS = 8.0  # of a day in which people ask, where nobody says


@dataclass(frozen=True, slots=True)
class Consequences:
    """What the systems serve without those to spare. rate: at the peak; users: with so many requests a day each

    hours: in which these ask, all alike; None: through days as busy as those that were asked for
    """

    rate: float
    requests_a_day: float
    tokens_a_day: float
    users: float
    hours: float | None
    requests_each: float


@dataclass(frozen=True, slots=True)
class CompliantLoad:
    """Systems that are there, and what they serve within the limits"""

    device: str
    systems: int
    rate: float


@dataclass(frozen=True, slots=True)
class Answer:
    """plan: the one that was asked for; other: with limits on the p95 instead of the mean, or the other way round

    why_no_other: where there is none; changes: what would be otherwise; demand: None where systems were given
    operating: what users feel at the peak of what is bought; not_simulated: to the end, as time was up
    """

    question: Question
    work: Work
    demand: Demand | None
    offers: Offers
    plan: Plan
    other: Plan | None
    why_no_other: str
    memory: Memory | None
    why: tuple[Step, ...]
    table: tuple[Offer, ...]
    changes: tuple[Change, ...]
    follows: Consequences
    alternatives: tuple[Alternative, ...]
    money: Money | None
    operating: Point
    there: tuple[CompliantLoad, ...] = ()
    not_simulated: tuple[str, ...] = ()

    @property
    def instances(self) -> int:
        """That the load needs; systems are rounded up from these."""
        per_system = self.plan.point.system / self.plan.point.devices
        return rounded(self.plan.fractional / self.question.hardware.utilisation * per_system, 1)


def plan(**answers: Any) -> Answer:
    """plan(model="llama-3-8b", isl=2000, osl=200, rate=70, ttft_ms=500, hardware=["H100"]): names as the flags'.

    raises ConfigError for answers that are missing, unknown or contradict each other, and where no hardware keeps the
    limits: which limit, and what comes closest
    """
    return answered(Question.of(answers))


def answered(
    question: Question, today: datetime.date | None = None, here: Callable[[], Roofline] = measured_here,
    tell: Progress = lambda *_: None,
) -> Answer:  # fmt: skip
    """today: to tell which prices are old; here: this machine's roofline; tell: what is simulated meanwhile

    raises ConfigError, as `plan`
    """
    check_question(question)
    limits, here = limits_of(question.limits), cache(here)  # which may take seconds
    prices = read_prices(None if question.money.prices is None else Path(question.money.prices))
    is_said = question.hardware.systems is None or any(getattr(question.load, name) is not None for name in _LOADS)
    load = demand(question.load) if is_said else None
    recorded = None
    if load is not None and load.trace is not None:
        recorded = float(load.trace.n_input.mean()), float(load.trace.n_output.mean())
    asked = work(question.request, recorded)
    there = systems_there(question, asked, here)
    check_systems(question, there, is_said)
    search = Search(question.search.search_s, tell)
    traffic = traffic_of(question, None if load is None else load.trace)
    case = Scenario(
        question, limits, load, asked, there, here, Replicas(search, traffic.gaps), traffic
    ).simulated_there()
    found = case.offers() if load is not None else there[0].offers
    _check_p95(case, found)
    found_on = alternatives(case, found, Costs(case, prices, today or datetime.date.today()))
    first = found_on[0]
    if first.plan is None:
        assert first.why_not is not None
        raise first.why_not
    best, found, h = first.plan, first.offers, question.hardware
    other, why_no_other = _other(case, found)
    instance, operating, left = found.instance(best.point), _operating(case, found, best), search.left
    return Answer(
        question, asked, load, found, best, other, why_no_other,
        None if instance is None else memory(instance, best.point),
        waterfall(best, found, asked, h.utilisation, h.spare), capacity_table(found.points, limits),
        () if left else sensitivities(case, found, best),  # with nothing to compare with
        _follows(case, best), found_on,
        first.money, operating,
        tuple(_kept(one, case) for one in there) if load is not None or len(there) > 1 else (), left,
    )  # fmt: skip


def _check_p95(case: Scenario, found: Offers) -> None:
    """raises ConfigError for limits on a p95 that nothing here tells"""
    if case.limits.of == "mean" or not case.limited or any(point.p95 is not None for point in found.points):
        return
    h, simulate = case.question.hardware, case.question.search.simulate
    if h.measured is not None:
        columns = "columns ttft_p95_ms, itl_p95_ms, e2e_p95_ms"
        raise ConfigError(f"{h.measured} has no p95, and limits are on it", columns, "ask with --of mean")
    if not simulate:
        raise ConfigError("limits are on the p95, which a closed form does not know, and it was asked for without "
                          "simulation", "limits on the mean, or simulation", "ask with --of mean")  # fmt: skip


def _operating(case: Scenario, found: Offers, best: Plan) -> Point:
    """What users feel at the peak of what is bought, which is rounded up: the least point that bears their share."""
    h, point = case.question.hardware, best.point
    instances = max(1, best.systems - h.spare) * point.system // point.devices
    each = best.rate / instances
    if not each:
        return point
    if case.closed and point.sampled is not None:
        return point
    if point.sampled is not None:
        if case.traffic.recorded is not None and case.load is not None and case.load.busy is not None:
            each *= case.load.busy / case.load.peak  # its peaks are in it
        return (
            simulated_at(found, point, min(each, point.rate), h, case.replicas, instances, case.traffic, case.work)
            or point
        )
    alike = [p for p in found.points if p.configuration == point.configuration]
    bear = [p for p in alike if p.rate >= each * (1 - 1e-9) and not best.limits.broken(p)]
    return min(bear, key=lambda p: p.concurrency, default=point)


def _kept(one: ExistingSystems, case: Scenario) -> CompliantLoad:
    rate = one.rate(case.limits, case.question.hardware.utilisation)
    return CompliantLoad(one.name, one.systems, rate)


def _other(case: Scenario, found: Offers) -> tuple[Plan | None, str]:
    """The mean beside the p95."""
    of = "p95" if case.limits.of == "mean" else "mean"
    if not case.limited:
        return None, "nothing is limited"
    limits = replace(case.limits, of=of)
    try:
        found = case.simulated(found, limits)
        if of == "p95" and all(point.p95 is None for point in found.points):
            return None, _why_no_p95(case)
        return case.plan(found, limits), ""
    except ConfigError as error:
        return None, error.what


def _why_no_p95(case: Scenario) -> str:
    if case.question.hardware.measured is not None:
        return "it was not measured (columns ttft_p95_ms, itl_p95_ms, e2e_p95_ms)"
    why = "time was up" if case.question.search.simulate else "nothing was simulated (--no-simulate)"
    return f"{why}, and a closed form does not know it"


def _follows(case: Scenario, found: Plan) -> Consequences:
    """Of what is bought and there, but for what is to spare: a fraction that was rounded up serves, too."""
    h, load = case.question.hardware, case.question.load
    beside = case.there if case.load is not None else case.there[1:]
    rate = (found.systems - h.spare if found.systems else 0) * h.utilisation * found.point.rate_of_system
    rate += sum(there.rate(case.limits, h.utilisation) for there in beside)
    each, tokens = USER_REQUESTS, case.work.n_input + case.work.n_output
    if load.requests_each is not None and load.calls is None:
        each = load.requests_each
    if case.load is not None and (average := case.load.average) is not None:
        a_day = rate * average / case.load.peak * DAY_S  # more of such days, peaks and nights in them
        return Consequences(rate, a_day, a_day * tokens, a_day / each, None, each)
    hours, a_day = load.hours or _PEOPLE_HOURS, rate * DAY_S
    return Consequences(rate, a_day, a_day * tokens, users(rate, hours, each), hours, each)
