"""A sizing question with everything needed to plan it, also with changed limits, load or hardware."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from millrace.errors import ConfigError
from millrace.machine.roofline import Roofline
from millrace.size.answer.sizing import Fleet, SizingPlan
from millrace.size.answer.sizing import plan as planned
from millrace.size.load.arrivals import Traffic
from millrace.size.load.load_forecast import Demand
from millrace.size.load.token_lengths import RequestWork
from millrace.size.performance.operating_point import Limits, OperatingPoint
from millrace.size.performance.operating_points import DEVICE, Offers, offers
from millrace.size.question.question import SizingQuestion
from millrace.size.simulation.simulated_capacity import Replicas, add_simulated

_EXISTING_SYSTEM = re.compile(r"\s*(\d+)\s*(?:x\s*(.+?)\s*)?")
_MAX_SYSTEMS = 1_000_000


@dataclass(frozen=True, slots=True)
class ExistingSystems:
    """Systems that exist already, with their operating points."""

    name: str
    systems: int
    offers: Offers

    def point(self, limits: Limits) -> OperatingPoint:
        """Return the best operating point. raises ConfigError if none meets the limits"""
        return planned(1.0, self.offers.points, limits, Fleet()).point

    def rate(self, limits: Limits, utilisation: float) -> float:
        """Return the requests/s of all of them; 0 if they do not meet the limits."""
        try:
            point = self.point(limits)
        except ConfigError:
            return 0.0
        return whole_systems(self.systems, point) * utilisation * point.rate_of_system


@dataclass(frozen=True, slots=True)
class Scenario:
    """A question and the state shared by all plans of it. load: None if the question is what systems can serve"""

    question: SizingQuestion
    limits: Limits
    load: Demand | None
    work: RequestWork
    existing: tuple[ExistingSystems, ...]
    local_roofline: Callable[[], Roofline]
    replicas: Replicas = field(default_factory=Replicas)
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def limited(self) -> bool:
        return self.limits != Limits(statistic=self.limits.statistic)

    @property
    def closed(self) -> bool:
        return self.question.limits.arrivals == "closed"

    def offers(self, **hardware: object) -> Offers:
        """Return the operating points to choose from. hardware: settings to change. raises ConfigError"""
        changed = replace(self.question.hardware, **hardware)  # type: ignore[arg-type]
        return offers(self.question.request.model, changed, self.work, self.local_roofline)

    def simulate(self, candidates: Offers, limits: Limits | None = None) -> Offers:
        """Add simulated capacities if simulation is on. raises ConfigError if nothing meets the limits"""
        h = self.question.hardware
        if not self.question.search.simulate:
            return candidates
        return add_simulated(candidates.computed, h, self.work, limits or self.limits, self.replicas, self.closed)

    def simulate_existing(self) -> "Scenario":
        """Return the scenario with simulated existing systems; those that do not meet the limits lose their points."""
        existing = []
        for i, system in enumerate(self.existing):
            try:
                with self.replicas.search.part(1 / (len(self.existing) - i + 1)):
                    existing.append(replace(system, offers=self.simulate(system.offers)))
            except ConfigError:
                if self.replicas.search.over:
                    raise
                existing.append(replace(system, offers=replace(system.offers, points=())))
        return replace(self, existing=tuple(existing))

    def plan(self, candidates: Offers, limits: Limits | None = None, times: float = 1.0) -> SizingPlan:
        """Plan the load, `times` as large. raises ConfigError if nothing meets the limits"""
        h, limits = self.question.hardware, limits or self.limits
        basis = candidates.basis
        fleet = Fleet(h.utilisation, h.spare)
        if self.load is None:
            best = planned(1.0, candidates.points, limits, fleet, basis).point  # the best one, whatever the rate
            n = whole_systems(self.existing[0].systems - h.spare, best)
            if not n:
                raise ConfigError(f"an instance ({best.configuration}) takes {best.systems} systems",
                                  "as many, or more",
                                  "say more --systems, or fewer stages (--pp)")  # fmt: skip
            rate = n * h.utilisation * best.rate_of_system
            return planned(rate * (1 - 1e-12), candidates.points, limits, fleet, basis)
        rest = self.load.peak * times - sum(
            existing_system.rate(limits, h.utilisation) for existing_system in self.existing
        )
        if rest > 0:
            return _at_least(planned(rest, candidates.points, limits, fleet, basis), 1 + h.spare)
        enough = planned(1.0, candidates.points, limits, fleet, basis)
        return replace(enough, rate=0.0, fractional=0.0, systems=0, low=0, high=0)


def whole_systems(n: int, point: OperatingPoint) -> int:
    """Return how many of n systems whole instances can use."""
    return n - n % point.systems


def _at_least(plan: SizingPlan, least: int) -> SizingPlan:
    """Raise the plan to a minimum number of systems."""
    return replace(plan, systems=max(least, plan.systems), low=max(least, plan.low), high=max(least, plan.high))


def parse_existing_systems(
    question: SizingQuestion, work: RequestWork, local_roofline: Callable[[], Roofline]
) -> tuple[ExistingSystems, ...]:
    """Parse --systems: "4" (of the requested hardware) or "2 x A100, 1 x L40S". raises ConfigError"""
    text, h = question.hardware.systems, question.hardware
    if text is None:
        return ()
    existing = []
    for part in text.split(","):
        match = _EXISTING_SYSTEM.fullmatch(part)
        if not match or not 1 <= int(match[1]) <= _MAX_SYSTEMS:
            raise ConfigError(f'systems are "{text:.80}"', '"4", or "2 x A100, 1 x L40S"', "write them so")
        name = match[2] or (h.hardware[0] if h.hardware else DEVICE)
        hardware = h.hardware[:1] if h.measured is not None and not match[2] else (name,)
        offered = offers(question.request.model, replace(h, hardware=hardware), work, local_roofline)
        existing.append(ExistingSystems(offered.names[0], int(match[1]), offered))
    return tuple(existing)


def check_systems(question: SizingQuestion, existing: tuple[ExistingSystems, ...], has_load: bool) -> None:
    """Refuse spares that cannot be told apart from the systems that serve. raises ConfigError"""
    spare = question.hardware.spare
    if not existing or has_load:
        return
    if len(existing) > 1 and spare:
        raise ConfigError("systems of several kinds, and some to spare", "one of both",
                          "leave --spare out, and name those that serve")  # fmt: skip
    if existing[0].systems <= spare:
        raise ConfigError(f"{existing[0].systems} systems, of which {spare} are to spare", "more than those",
                          "correct one of them")  # fmt: skip
