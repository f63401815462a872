"""The whole answer to the six questions: systems with their band, why, what would change it, what follows from it."""

import datetime
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from millrace.errors import ConfigError
from millrace.machine.devices import find_device
from millrace.size.demand import USER_REQUESTS, Demand, demand, hourly_peaks, users
from millrace.size.lengths import Work, work
from millrace.size.load import DAY_S
from millrace.size.money import Fleet as Needed
from millrace.size.money import Money, engines, money
from millrace.size.offers import Offers, offers
from millrace.size.plan import Fleet, Plan
from millrace.size.plan import plan as planned
from millrace.size.points import SYSTEM, Limits
from millrace.size.prices import Prices, read_prices
from millrace.size.question import Question, limits_of
from millrace.size.reasons import Change, Memory, Offer, Step, capacity_table, changes, memory, waterfall

_PEOPLE_HOURS = 8.0  # of a day in which people ask, where nobody says


@dataclass(frozen=True, slots=True)
class Follows:
    """What the systems serve without those to spare. users: with so many requests a day each, in so many hours"""

    rate: float
    requests_a_day: float
    tokens_a_day: float
    users: float
    hours: float
    requests_each: float


@dataclass(frozen=True, slots=True)
class Alternative:
    """The answer on one device. plan: None where nothing keeps the limits, and why; money: None of an unknown device"""

    device: str
    plan: Plan | None
    money: Money | None
    why_not: str = ""

    @property
    def order(self) -> tuple[bool, float]:
        """What is cheapest goes first; where a price is not known, what needs least."""
        cost = self.money.cheapest if self.money else None
        return cost is None, cost if cost is not None else self.plan.fractional if self.plan else 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """plan: the one that was asked for; other: with limits on the p95 instead of the mean, or the other way round

    why_no_other: where there is none; changes: what would be otherwise; demand: None where systems were given
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

    @property
    def instances(self) -> int:
        """That the load needs; systems are rounded up from these."""
        return -int(-(self.plan.fractional / self.question.hardware.utilisation * SYSTEM / self.plan.point.tp) // 1)


def plan(**answers: Any) -> Answer:
    """plan(model="llama-3-8b", isl=2000, osl=200, rate=70, ttft_ms=500, hardware=["H100"]): names as the flags'.

    raises ConfigError for answers that are missing, unknown or contradict each other, and where no hardware keeps the
    limits: which limit, and what comes closest
    """
    return answered(Question.of(answers))


def answered(question: Question, today: datetime.date | None = None) -> Answer:
    """today: to tell which prices are old. raises ConfigError, as `plan`"""
    limits = limits_of(question.limits)
    load = None if question.hardware.systems is not None else demand(question.load)
    _check_systems(question)
    prices = read_prices(None if question.money.prices is None else Path(question.money.prices))
    recorded = None
    if load is not None and load.trace is not None:
        recorded = float(load.trace.n_input.mean()), float(load.trace.n_output.mean())
    asked = work(question.request, recorded)
    found = offers(question.request.model, question.hardware, asked)
    costs = _Costs(question, load, asked, prices, today or datetime.date.today())
    alternatives = _alternatives(question, found, limits, load, costs)
    first = alternatives[0]
    if first.plan is None:
        _plan(question, found, limits, load)  # which says what comes closest
        raise AssertionError("a plan was found on no device")
    best, found = first.plan, found.of(first.device)
    other, why_no_other = _other(question, found, limits, load)
    instance, h = found.instance(best.point), question.hardware
    return Answer(
        question, asked, load, found, best, other, why_no_other,
        None if instance is None else memory(instance, best.point),
        waterfall(best, found, asked, h.utilisation, h.spare), capacity_table(found.points, limits),
        changes(_otherwise(question, found, asked, limits, load)), _follows(question, asked, best), alternatives,
        first.money,
    )  # fmt: skip


def _alternatives(
    question: Question, found: Offers, limits: Limits, load: Demand | None, costs: "_Costs"
) -> tuple[Alternative, ...]:
    """On each device; the one that is taken first."""
    told = []
    for name in found.names:
        try:
            best = _plan(question, found.of(name), limits, load)
        except ConfigError as error:
            told.append(Alternative(name, None, None, error.what))
        else:
            told.append(Alternative(name, best, costs.of(best)))
    return tuple(sorted(told, key=lambda one: (one.plan is None, *one.order)))


@dataclass(frozen=True, slots=True)
class _Costs:
    """All that a price depends on, but for the device."""

    question: Question
    load: Demand | None
    work: Work
    prices: Prices
    today: datetime.date

    def of(self, found: Plan) -> Money | None:
        try:
            device = find_device(found.point.device)
        except ConfigError:  # measured on what the catalogue has not
            return None
        h, point = self.question.hardware, found.point
        peaks = (found.rate,) * 24 if self.load is None else hourly_peaks(self.question.load, self.load)
        needed = Needed(device, point.tp, found.systems, found.fractional, engines(peaks, point.rate, h.utilisation))
        rents = self.prices.rents(device, self.question.money.tier)
        average = found.rate if self.load is None or self.load.average is None else self.load.average
        made = money(needed, self.prices, rents, average, point.rate, (self.work.n_input, self.work.n_output))
        notes = [*made.notes, *self.prices.old(rents, self.today)]
        if self.load is not None and self.load.average is None:
            notes.insert(0, "only the peak is known: costs are those of a load that is always so high")
        return replace(made, notes=tuple(notes))


def _check_systems(question: Question) -> None:
    load, n = question.load, question.hardware.systems
    if n is None:
        return
    said = [name for name in ("rate", "average", "users", "calls", "trace") if getattr(load, name) is not None]
    if said:
        raise ConfigError(f"systems are given, and a load by {' and '.join(said)}", "one of them: what is to be found?",
                          "leave --systems out to find how many, or the load to find what they serve")  # fmt: skip
    if n <= question.hardware.spare:
        raise ConfigError(f"{n} systems, of which {question.hardware.spare} are to spare", "more than those",
                          "correct one of them")  # fmt: skip


def _plan(question: Question, found: Offers, limits: Limits, load: Demand | None) -> Plan:
    h = question.hardware
    instance = found.instance(found.points[0])
    fleet = Fleet(h.utilisation, h.spare)
    if load is not None:
        return planned(load.peak, found.points, limits, fleet, instance)
    assert h.systems is not None
    one = planned(1.0, found.points, limits, fleet, instance).point  # which is best does not depend on the rate
    rate = (h.systems - h.spare) * h.utilisation * one.rate_of_system
    return planned(rate * (1 - 1e-12), found.points, limits, fleet, instance)


def _other(question: Question, found: Offers, limits: Limits, load: Demand | None) -> tuple[Plan | None, str]:
    """The mean beside the p95."""
    of = "p95" if limits.of == "mean" else "mean"
    if limits == Limits(of=limits.of):
        return None, "nothing is limited"
    if of == "p95" and all(point.p95 is None for point in found.points):
        return None, "the p95 is not known from a closed form: measure it, or simulate it"
    try:
        return _plan(question, found, replace(limits, of=of), load), ""
    except ConfigError as error:
        return None, error.what


def _follows(question: Question, asked: Work, found: Plan) -> Follows:
    """Of what is bought, but for what is to spare: a fraction of a system that was rounded up serves, too."""
    h, load = question.hardware, question.load
    rate = (found.systems - h.spare) * h.utilisation * found.point.rate_of_system
    hours, each = load.hours or _PEOPLE_HOURS, USER_REQUESTS
    if load.requests_each is not None and load.calls is None:
        each = load.requests_each
    a_day = rate * DAY_S
    return Follows(rate, a_day, a_day * (asked.n_input + asked.n_output), users(rate, hours, each), hours, each)


def _otherwise(
    question: Question, found: Offers, asked: Work, limits: Limits, load: Demand | None
) -> dict[str, Callable[[], Plan]]:
    """One thing at a time."""
    if load is None:
        return {}
    h = question.hardware

    def limited(times: float) -> Callable[[], Plan]:
        def scaled(limit: float | None) -> float | None:
            return None if limit is None else limit * times

        other = Limits(scaled(limits.ttft_s), scaled(limits.itl_s), scaled(limits.e2e_s), limits.of)
        return lambda: _plan(question, found, other, load)

    def loaded(times: float) -> Callable[[], Plan]:
        return lambda: _plan(question, found, limits, replace(load, peak=load.peak * times))

    again: dict[str, Callable[[], Plan]] = {}
    if limits != Limits(of=limits.of):
        again |= {"limits half as long": limited(0.5), "limits twice as long": limited(2.0)}
    again |= {"a quarter more requests": loaded(1.25), "half of the requests": loaded(0.5)}
    if h.measured is None:
        again |= _computed_otherwise(question, asked, limits, load)
    return again


def _computed_otherwise(question: Question, asked: Work, limits: Limits, load: Demand) -> dict[str, Callable[[], Plan]]:
    """Where points are computed: other lengths, other precisions, software that is as fast again."""
    h, again = question.hardware, {}

    def lengths(n_input: float, n_output: float) -> Callable[[], Plan]:
        calls = tuple(replace(c, n_input=max(1, c.n_input * n_input), n_output=max(1, c.n_output * n_output))
                      for c in asked.calls)  # fmt: skip
        return lambda: _plan(question, offers(question.request.model, h, replace(asked, calls=calls)), limits, load)

    def hardware(**other: Any) -> Callable[[], Plan]:
        changed = replace(h, **other)
        whole = replace(question, hardware=changed)
        return lambda: _plan(whole, offers(question.request.model, changed, asked), limits, load)

    again["prompts half as long"] = lengths(0.5, 1)
    again["answers half as long"] = lengths(1, 0.5)
    again["software that takes 0.75 of the time"] = hardware(factor=h.factor * 0.75)
    if not h.precision:
        again["fp16 alone"] = hardware(precision=("fp16",))
    return again
