"""The whole answer to the six questions: systems with their band, why, what would change it, what follows from it."""

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from millrace.errors import ConfigError
from millrace.machine.devices import DEVICES, Link
from millrace.machine.roofline import Roofline
from millrace.size.case import Case, There, check_systems, systems_there
from millrace.size.contradictions import check_question
from millrace.size.demand import USER_REQUESTS, Demand, demand, hourly_peaks, users
from millrace.size.hardware import measured_here
from millrace.size.lengths import Work, work
from millrace.size.load import DAY_S
from millrace.size.memory import Memory, memory
from millrace.size.money import Money, Needed, engines, money
from millrace.size.offers import Offers
from millrace.size.planning import Plan
from millrace.size.points import Limits, Point, Source
from millrace.size.prices import Prices, read_prices
from millrace.size.question import Question, limits_of
from millrace.size.reasons import Change, Offer, Step, capacity_table, changes, waterfall
from millrace.size.search import Progress, Search
from millrace.size.searched import Replicas, simulated_at
from millrace.size.traffic import traffic_of

_LOADS = ("rate", "average", "users", "calls", "trace")
_MOST_SIMULATED = 4  # devices, of more that are asked for
_MAIN = 0.9  # of the search's time, for what is chosen from; then for what users feel, and other limits
_PEOPLE_HOURS = 8.0  # of a day in which people ask, where nobody says


@dataclass(frozen=True, slots=True)
class Follows:
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
class Kept:
    """Systems that are there, and what they serve within the limits"""

    device: str
    systems: int
    rate: float


@dataclass(frozen=True, slots=True)
class Alternative:
    """The answer on one device. plan: None where nothing keeps the limits, and why; money: None of an unknown device"""

    device: str
    offers: Offers
    plan: Plan | None
    money: Money | None
    why_not: ConfigError | None = None

    @property
    def order(self) -> tuple[bool, float]:
        """What is cheapest goes first; where a price is not known, what needs least."""
        cost = self.money.cheapest if self.money else None
        return cost is None, cost if cost is not None else self.plan.fractional if self.plan else 0.0


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
    follows: Follows
    alternatives: tuple[Alternative, ...]
    money: Money | None
    operating: Point
    there: tuple[Kept, ...] = ()
    not_simulated: tuple[str, ...] = ()

    @property
    def instances(self) -> int:
        """That the load needs; systems are rounded up from these."""
        per_system = self.plan.point.system / self.plan.point.devices
        return -int(-(self.plan.fractional / self.question.hardware.utilisation * per_system) // 1)


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
    case = Case(question, limits, load, asked, there, here, Replicas(search, traffic.gaps), traffic).simulated_there()
    found = case.offers() if load is not None else there[0].offers
    _check_p95(case, found)
    costs = _Costs(case, prices, today or datetime.date.today())
    alternatives = _alternatives(case, found, costs)
    first = alternatives[0]
    if first.plan is None:
        assert first.why_not is not None
        raise first.why_not
    best, found, h = first.plan, first.offers, question.hardware
    other, why_no_other = _other(case, found)
    instance, operating, left = found.instance(best.point), _operating(case, found, best), search.left
    otherwise = {} if left else _otherwise(case, found, best)  # nothing to compare with
    return Answer(
        question, asked, load, found, best, other, why_no_other,
        None if instance is None else memory(instance, best.point),
        waterfall(best, found, asked, h.utilisation, h.spare), capacity_table(found.points, limits),
        changes(otherwise, best, h.utilisation, search), _follows(case, best), alternatives,
        first.money, operating,
        tuple(_kept(one, case) for one in there) if load is not None or len(there) > 1 else (), left,
    )  # fmt: skip


def _check_p95(case: Case, found: Offers) -> None:
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


def _operating(case: Case, found: Offers, best: Plan) -> Point:
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


def _kept(one: There, case: Case) -> Kept:
    rate = one.rate(case.limits, case.question.hardware.utilisation)
    return Kept(one.name, one.systems, rate)


def _alternatives(case: Case, found: Offers, costs: "_Costs") -> tuple[Alternative, ...]:
    """On each device; the one that is taken first. Of many the cheapest in closed form are simulated: four of them, and
    more only where these do not keep the limits; the others stand behind."""
    names, rest = list(found.names), dict[str, Alternative]()
    if len(names) > _MOST_SIMULATED and case.question.search.simulate:
        roughly = replace(case.limits, of="mean")  # a closed form knows no p95
        guessed = [_alternative(case, found, costs, name, roughly) for name in names]
        rest = {one.device: one for one in sorted(guessed, key=_order)}
        names = list(rest)
    with case.replicas.search.part(_MAIN):
        told = _each(case, found, costs, names, _MOST_SIMULATED if rest else len(names))
    refused = (Alternative(name, found, None, None, why) for name, why in found.refused.items())
    return (*sorted(told.values(), key=_order), *(one for name, one in rest.items() if name not in told), *refused)


def _each(case: Case, found: Offers, costs: "_Costs", names: Sequence[str], wanted: int) -> dict[str, Alternative]:
    """In that order until so many keep the limits. Each has its share of the time; what they leave goes to the cut."""
    told: dict[str, Alternative] = {}
    search, cut = case.replicas.search, list[str]()
    for i, name in enumerate(names):
        kept = sum(one.plan is not None for one in told.values())
        if kept >= wanted:
            break
        before = search.left
        with search.part(1 / min(len(names) - i, wanted - kept)):
            told[name] = _alternative(case, found, costs, name)
        if search.left != before:
            cut.append(name)
    for i, name in enumerate(cut):
        if not search.has_time:
            break
        with search.part(1 / (len(cut) - i)):
            told[name] = _alternative(case, found, costs, name)
    return told


def _alternative(
    case: Case, found: Offers, costs: "_Costs", name: str, roughly: Limits | None = None
) -> Alternative:  # fmt: skip
    """roughly: by a closed form, within these limits"""
    try:
        some = found.of(name) if roughly else case.simulated(found.of(name))
        best = case.plan(some, roughly)
    except ConfigError as error:
        return Alternative(name, found, None, None, error)
    return Alternative(name, some, best, costs.of(best, found))


def _order(one: Alternative) -> tuple[bool, bool, bool, float]:
    """What was simulated goes before what was not, where time was up: a closed form promises more."""
    return one.plan is None, one.plan is not None and one.plan.point.source == Source.ANALYTIC, *one.order


@dataclass(frozen=True, slots=True)
class _Costs:
    """All that a price depends on, but for the device."""

    case: Case
    prices: Prices
    today: datetime.date

    def of(self, best: Plan, found: Offers) -> Money | None:
        """None where nothing is bought, or on what the catalogue has not."""
        bought, load, question = found.bought(best.point.device), self.case.load, self.case.question
        if bought is None or not best.rate or bought.whole not in DEVICES:
            return None
        point, h = best.point, question.hardware
        peaks = (best.rate,) * 24 if load is None else hourly_peaks(question.load, load)
        beside = 0.0 if load is None else load.peak - best.rate  # which systems that are there bear
        rents = self.prices.rents(bought.whole, question.money.tier)
        average = best.rate if load is None or load.average is None else load.average * best.rate / load.peak
        lengths = self.case.work.n_input, self.case.work.n_output

        def costs(systems: int, times: float) -> Money:
            """times: as many requests as the figures say come, or as little is served of them"""
            rate = point.rate / times
            needed = Needed(
                bought.whole, point.devices / bought.slices, point.system // bought.slices, systems,
                best.fractional * times, engines([max(0.0, peak - beside) for peak in peaks], rate, h.utilisation),
            )  # fmt: skip
            return money(needed, self.prices, question.money.tier, average, rate, lengths)

        made = costs(best.systems, 1.0)
        ends = costs(best.low, max(0.01, 1 - best.error)).cheapest, costs(best.high, 1 + best.error).cheapest
        band = None if ends[0] is None or ends[1] is None else (ends[0], ends[1])
        notes = [*made.notes, *self.prices.old(rents, self.today)]
        if load is not None and load.average is None:
            notes.insert(0, "only the peak is known: costs are those of a load that is always so high")
        if h.spare:
            notes.append("systems to spare are counted where all are bought, and nowhere else")
        return replace(made, notes=tuple(notes), band=band)


def _other(case: Case, found: Offers) -> tuple[Plan | None, str]:
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


def _why_no_p95(case: Case) -> str:
    if case.question.hardware.measured is not None:
        return "it was not measured (columns ttft_p95_ms, itl_p95_ms, e2e_p95_ms)"
    why = "time was up" if case.question.search.simulate else "nothing was simulated (--no-simulate)"
    return f"{why}, and a closed form does not know it"


def _follows(case: Case, found: Plan) -> Follows:
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
        return Follows(rate, a_day, a_day * tokens, a_day / each, None, each)
    hours, a_day = load.hours or _PEOPLE_HOURS, rate * DAY_S
    return Follows(rate, a_day, a_day * tokens, users(rate, hours, each), hours, each)


def _otherwise(case: Case, found: Offers, best: Plan) -> dict[str, Callable[[], float]]:
    """One thing at a time: the systems then, by the figures."""
    if case.load is None or not best.fractional:
        return {}
    limits = case.limits

    def limited(times: float) -> Callable[[], float]:
        other = limits.scaled(times)
        return lambda: case.plan(case.simulated(found, other), other).fractional

    again = {
        "a quarter more requests": lambda: case.plan(found, times=1.25).fractional,
        "half of the requests": lambda: case.plan(found, times=0.5).fractional,
    }
    if case.limited:
        again |= {"limits half as long": limited(0.5), "limits twice as long": limited(2.0)}
    if case.question.hardware.measured is None and not case.there:
        again |= _computed_otherwise(case, found, best)
    return again


def _computed_otherwise(case: Case, found: Offers, best: Plan) -> dict[str, Callable[[], float]]:
    """Where points are computed: other lengths and faster software on the same configuration, 16 bits on any."""
    h = case.question.hardware

    def again(other: Case) -> Callable[[], float]:
        def fractional() -> float:
            offered = other.offers()
            alike = tuple(p for p in offered.points if p.configuration == best.point.configuration)
            return other.plan(other.simulated(replace(offered, points=alike))).fractional

        return fractional

    def lengths(n_input: float, n_output: float) -> Callable[[], float]:
        calls = tuple(replace(c, n_input=max(1, c.n_input * n_input), n_output=max(1, c.n_output * n_output))
                      for c in case.work.calls)  # fmt: skip
        return again(replace(case, work=replace(case.work, calls=calls)))

    faster = replace(case.question, hardware=replace(h, factor=max(0.01, h.factor * 0.75)))
    told = {
        "prompts half as long": lengths(0.5, 1), "answers half as long": lengths(1, 0.5),
        "software that takes 0.75 of the time": again(replace(case, question=faster)),
    }  # fmt: skip
    if best.point.tp > 1 and h.pp is None and _is_by_pcie(found, best):
        for pp in (2, 4):
            told[f"layers in {pp} stages (--pp {pp})"] = _staged(case, best, pp)
    if not h.precision and h.profile is None and h.stack is None:
        told["16 bits alone"] = lambda: case.plan(case.simulated(_wide(found.computed))).fractional
    return told


def _is_by_pcie(found: Offers, best: Plan) -> bool:
    """Where devices that share layers wait for each other."""
    bought = found.bought(best.point.device)
    return bought is not None and bought.device.link == Link.PCIE and bought.most_tp > 1


def _staged(case: Case, best: Plan, pp: int) -> Callable[[], float]:
    def fractional() -> float:
        offered = case.offers(pp=pp).of(best.point.device)
        return case.plan(case.simulated(offered)).fractional

    return fractional


def _wide(found: Offers) -> Offers:
    return replace(found, points=tuple(point for point in found.points if point.precision in ("fp16", "bf16")))
