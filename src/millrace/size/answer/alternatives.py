"""Plans and costs of the same question on each requested device, best first."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from millrace.errors import ConfigError
from millrace.machine.devices import DEVICES
from millrace.size.answer.scenario import Scenario
from millrace.size.answer.sizing import SizingPlan
from millrace.size.load.load_forecast import hourly_peaks
from millrace.size.money.prices import Prices
from millrace.size.money.tco import FleetNeed, Money, engines, money
from millrace.size.performance.operating_point import FigureSource, Limits
from millrace.size.performance.operating_points import Offers

_MAX_SIMULATED = 4  # devices that are simulated if more are requested
_MAIN = 0.9  # share of the search time for the candidates; the rest is for the operating point and the other statistic


@dataclass(frozen=True, slots=True)
class Alternative:
    """The answer on one device.

    plan: None if nothing meets the limits, for the reason `why_not`; money: None for a device outside the catalogue
    """

    device: str
    offers: Offers
    plan: SizingPlan | None
    money: Money | None
    why_not: ConfigError | None = None

    @property
    def order(self) -> tuple[bool, bool, bool, float]:
        """Return the sort key: plans that meet the limits first; simulated ones before closed-form ones, which are
        optimistic; then the cheapest, or the smallest if a price is unknown."""
        cost = self.money.cheapest if self.money else None
        least = cost if cost is not None else self.plan.fractional if self.plan else 0.0
        is_rough = self.plan is not None and self.plan.point.source == FigureSource.ANALYTIC
        return self.plan is None, is_rough, cost is None, least


@dataclass(frozen=True, slots=True)
class Costs:
    """Everything except the device that the costs of a plan depend on."""

    case: Scenario
    prices: Prices
    today: datetime.date

    def estimate(self, best: SizingPlan, offers: Offers) -> Money | None:
        """Return the costs of a plan; None if nothing is bought or the device is not in the catalogue."""
        bought, load, question = offers.hardware_for(best.point.device), self.case.load, self.case.question
        if bought is None or not best.rate or bought.physical_device not in DEVICES:
            return None
        point, h = best.point, question.hardware
        peaks = (best.rate,) * 24 if load is None else hourly_peaks(question.load, load)
        existing_rate = 0.0 if load is None else load.peak - best.rate  # requests/s that existing systems serve
        rents = self.prices.rents(bought.physical_device, question.money.tier)
        average = best.rate if load is None or load.average is None else load.average * best.rate / load.peak
        lengths = self.case.work.n_input, self.case.work.n_output

        def costs(systems: int, times: float) -> Money:
            """times: load relative to the plan's figures, for the ends of the uncertainty band"""
            rate = point.rate / times
            needed = FleetNeed(
                bought.physical_device,
                point.devices / bought.slices,
                point.system // bought.slices,
                systems,
                best.fractional * times,
                engines([max(0.0, peak - existing_rate) for peak in peaks], rate, h.utilisation),
            )
            return money(needed, self.prices, question.money.tier, average, rate, lengths)

        total = costs(best.systems, 1.0)
        ends = costs(best.low, max(0.01, 1 - best.error)).cheapest, costs(best.high, 1 + best.error).cheapest
        band = None if ends[0] is None or ends[1] is None else (ends[0], ends[1])
        notes = [*total.notes, *self.prices.stale_notes(rents, self.today)]
        if load is not None and load.average is None:
            notes.insert(0, "only the peak is known: costs are those of a load that is always so high")
        if h.spare:
            notes.append("systems to spare are counted where all are bought, and nowhere else")
        return replace(total, notes=tuple(notes), band=band, error=best.error)


def alternatives(case: Scenario, offers: Offers, costs: Costs) -> tuple[Alternative, ...]:
    """Return one alternative per device, best first.

    If there are many devices, only the four that are cheapest in closed form are simulated, and further ones only if
    these do not meet the limits. The rest follow with their closed-form plans.
    """
    names, rest = list(offers.names), dict[str, Alternative]()
    if len(names) > _MAX_SIMULATED and case.question.search.simulate:
        roughly = replace(case.limits, statistic="mean")  # a closed form knows no p95
        guessed = [_alternative(case, offers, costs, name, roughly) for name in names]
        rest = {alternative.device: alternative for alternative in sorted(guessed, key=attrgetter("order"))}
        names = list(rest)
    with case.replicas.search.part(_MAIN):
        by_device = _plan_each_device(case, offers, costs, names, _MAX_SIMULATED if rest else len(names))
    refused = (Alternative(name, offers, None, None, reason) for name, reason in offers.refused.items())
    return (
        *sorted(by_device.values(), key=attrgetter("order")),
        *(alternative for name, alternative in rest.items() if name not in by_device),
        *refused,
    )


def _plan_each_device(
    case: Scenario, offers: Offers, costs: Costs, names: Sequence[str], limit: int
) -> dict[str, Alternative]:
    """Plan device after device until `limit` of them meet the limits.

    Each device gets an equal share of the remaining time; time that is left goes to searches that were cut.
    """
    by_device: dict[str, Alternative] = {}
    search, cut = case.replicas.search, list[str]()
    for i, name in enumerate(names):
        n_plans = sum(alternative.plan is not None for alternative in by_device.values())
        if n_plans >= limit:
            break
        before = search.left
        with search.part(1 / min(len(names) - i, limit - n_plans)):
            by_device[name] = _alternative(case, offers, costs, name)
        if search.left != before:
            cut.append(name)
    for i, name in enumerate(cut):
        if not search.has_time:
            break
        with search.part(1 / (len(cut) - i)):
            by_device[name] = _alternative(case, offers, costs, name)
    return by_device


def _alternative(
    case: Scenario, offers: Offers, costs: Costs, name: str, roughly: Limits | None = None
) -> Alternative:  # fmt: skip
    """Plan one device. roughly: limits for a closed-form plan; None simulates"""
    try:
        some = offers.for_device(name) if roughly else case.simulate(offers.for_device(name))
        best = case.plan(some, roughly)
    except ConfigError as error:
        return Alternative(name, offers, None, None, error)
    return Alternative(name, some, best, costs.estimate(best, offers))
