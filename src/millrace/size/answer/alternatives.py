"""The answer on each device that was asked for, with what it costs there; which one is taken."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from millrace.errors import ConfigError
from millrace.machine.devices import DEVICES
from millrace.size.answer.scenario import Scenario
from millrace.size.answer.sizing import Plan
from millrace.size.load.load_forecast import hourly_peaks
from millrace.size.money.prices import Prices
from millrace.size.money.tco import FleetNeed, Money, engines, money
from millrace.size.performance.operating_point import Limits, Source
from millrace.size.performance.operating_points import Offers

_MOST_SIMULATED = 4  # devices, of more that are asked for
_MAIN = 0.9  # of the search's time, for what is chosen from; then for what users feel, and other limits


@dataclass(frozen=True, slots=True)
class Alternative:
    """The answer on one device. plan: None where nothing keeps the limits, and why; money: None of an unknown device"""

    device: str
    offers: Offers
    plan: Plan | None
    money: Money | None
    why_not: ConfigError | None = None

    @property
    def order(self) -> tuple[bool, bool, bool, float]:
        """What keeps the limits goes first; of that what was simulated, where time was up for others: a closed form
        promises more. Then what is cheapest, and where a price is not known, what needs least."""
        cost = self.money.cheapest if self.money else None
        least = cost if cost is not None else self.plan.fractional if self.plan else 0.0
        is_rough = self.plan is not None and self.plan.point.source == Source.ANALYTIC
        return self.plan is None, is_rough, cost is None, least


@dataclass(frozen=True, slots=True)
class Costs:
    """All that a price depends on, but for the device."""

    case: Scenario
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
            needed = FleetNeed(
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
        return replace(made, notes=tuple(notes), band=band, error=best.error)


def alternatives(case: Scenario, found: Offers, costs: Costs) -> tuple[Alternative, ...]:
    """On each device; the one that is taken first. Of many the cheapest in closed form are simulated: four of them, and
    more only where these do not keep the limits; the others stand behind."""
    names, rest = list(found.names), dict[str, Alternative]()
    if len(names) > _MOST_SIMULATED and case.question.search.simulate:
        roughly = replace(case.limits, of="mean")  # a closed form knows no p95
        guessed = [_alternative(case, found, costs, name, roughly) for name in names]
        rest = {one.device: one for one in sorted(guessed, key=attrgetter("order"))}
        names = list(rest)
    with case.replicas.search.part(_MAIN):
        told = _each(case, found, costs, names, _MOST_SIMULATED if rest else len(names))
    refused = (Alternative(name, found, None, None, why) for name, why in found.refused.items())
    return (
        *sorted(told.values(), key=attrgetter("order")),
        *(one for name, one in rest.items() if name not in told),
        *refused,
    )


def _each(case: Scenario, found: Offers, costs: Costs, names: Sequence[str], wanted: int) -> dict[str, Alternative]:
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
    case: Scenario, found: Offers, costs: Costs, name: str, roughly: Limits | None = None
) -> Alternative:  # fmt: skip
    """roughly: by a closed form, within these limits"""
    try:
        some = found.of(name) if roughly else case.simulated(found.of(name))
        best = case.plan(some, roughly)
    except ConfigError as error:
        return Alternative(name, found, None, None, error)
    return Alternative(name, some, best, costs.of(best, found))
