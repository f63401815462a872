"""One question, planned: on what is offered, beside systems that are there, under these or other limits."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from millrace.errors import ConfigError
from millrace.machine.roofline import Roofline
from millrace.size.answer.sizing import Fleet, Plan
from millrace.size.answer.sizing import plan as planned
from millrace.size.load.arrivals import Traffic
from millrace.size.load.load_forecast import Demand
from millrace.size.load.token_lengths import Work
from millrace.size.performance.operating_point import Limits, Point
from millrace.size.performance.operating_points import DEVICE, Offers, offers
from millrace.size.question.question import Question
from millrace.size.simulation.simulated_capacity import Replicas, simulated

_THERE = re.compile(r"\s*(\d+)\s*(?:x\s*(.+?)\s*)?")
_MOST_SYSTEMS = 1_000_000


@dataclass(frozen=True, slots=True)
class ExistingSystems:
    """Systems that somebody has, and what one of them could do."""

    name: str
    systems: int
    offers: Offers

    def point(self, limits: Limits) -> Point:
        """raises ConfigError where they do not keep the limits"""
        return planned(1.0, self.offers.points, limits, Fleet()).point

    def rate(self, limits: Limits, utilisation: float) -> float:
        """Requests/s of all of them; 0 where they do not keep the limits."""
        try:
            point = self.point(limits)
        except ConfigError:
            return 0.0
        return whole_systems(self.systems, point) * utilisation * point.rate_of_system


@dataclass(frozen=True, slots=True)
class Scenario:
    """load: None where only systems are given, and what they serve is asked"""

    question: Question
    limits: Limits
    load: Demand | None
    work: Work
    there: tuple[ExistingSystems, ...]
    here: Callable[[], Roofline]
    replicas: Replicas = field(default_factory=Replicas)
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def limited(self) -> bool:
        return self.limits != Limits(of=self.limits.of)

    @property
    def closed(self) -> bool:
        return self.question.limits.arrivals == "closed"

    def offers(self, **hardware: object) -> Offers:
        """hardware: settings that are otherwise. raises ConfigError"""
        changed = replace(self.question.hardware, **hardware)  # type: ignore[arg-type]
        return offers(self.question.request.model, changed, self.work, self.here)

    def simulated(self, found: Offers, limits: Limits | None = None) -> Offers:
        """With capacities by simulation, where that is asked for. raises ConfigError where nothing keeps the limits"""
        h = self.question.hardware
        if not self.question.search.simulate:
            return found
        return simulated(found.computed, h, self.work, limits or self.limits, self.replicas, self.closed)

    def simulated_there(self) -> "Scenario":
        """The same, with systems that are there by simulation; without points where that keeps no limits."""
        there = []
        for i, one in enumerate(self.there):
            try:
                with self.replicas.search.part(1 / (len(self.there) - i + 1)):
                    there.append(replace(one, offers=self.simulated(one.offers)))
            except ConfigError:
                if self.replicas.search.over:
                    raise
                there.append(replace(one, offers=replace(one.offers, points=())))
        return replace(self, there=tuple(there))

    def plan(self, found: Offers, limits: Limits | None = None, times: float = 1.0) -> Plan:
        """times: as many requests. raises ConfigError where nothing keeps the limits"""
        h, limits = self.question.hardware, limits or self.limits
        basis = found.basis
        fleet = Fleet(h.utilisation, h.spare)
        if self.load is None:
            one = planned(1.0, found.points, limits, fleet, basis).point  # the best one, whatever the rate
            n = whole_systems(self.there[0].systems - h.spare, one)
            if not n:
                raise ConfigError(f"an instance ({one.configuration}) takes {one.systems} systems", "as many, or more",
                                  "say more --systems, or fewer stages (--pp)")  # fmt: skip
            rate = n * h.utilisation * one.rate_of_system
            return planned(rate * (1 - 1e-12), found.points, limits, fleet, basis)
        rest = self.load.peak * times - sum(there.rate(limits, h.utilisation) for there in self.there)
        if rest > 0:
            return _one_at_least(planned(rest, found.points, limits, fleet, basis), 1 + h.spare)
        enough = planned(1.0, found.points, limits, fleet, basis)
        return replace(enough, rate=0.0, fractional=0.0, systems=0, low=0, high=0)


def whole_systems(n: int, point: Point) -> int:
    """Of n, those that are full of instances, or of parts of one."""
    return n - n % point.systems


def _one_at_least(found: Plan, least: int) -> Plan:
    """However few requests come."""
    return replace(found, systems=max(least, found.systems), low=max(least, found.low), high=max(least, found.high))


def systems_there(question: Question, work: Work, here: Callable[[], Roofline]) -> tuple[ExistingSystems, ...]:
    """ "4", of the hardware that is named, or "2 x A100, 1 x L40S". raises ConfigError"""
    text, h = question.hardware.systems, question.hardware
    if text is None:
        return ()
    found = []
    for part in text.split(","):
        match = _THERE.fullmatch(part)
        if not match or not 1 <= int(match[1]) <= _MOST_SYSTEMS:
            raise ConfigError(f'systems are "{text:.80}"', '"4", or "2 x A100, 1 x L40S"', "write them so")
        name = match[2] or (h.hardware[0] if h.hardware else DEVICE)
        wanted = h.hardware[:1] if h.measured is not None and not match[2] else (name,)
        offered = offers(question.request.model, replace(h, hardware=wanted), work, here)
        found.append(ExistingSystems(offered.names[0], int(match[1]), offered))
    return tuple(found)


def check_systems(question: Question, there: tuple[ExistingSystems, ...], load_is_said: bool) -> None:
    """raises ConfigError for spares that nobody can tell"""
    spare = question.hardware.spare
    if not there or load_is_said:
        return
    if len(there) > 1 and spare:
        raise ConfigError("systems of several kinds, and some to spare", "one of both",
                          "leave --spare out, and name those that serve")  # fmt: skip
    if there[0].systems <= spare:
        raise ConfigError(f"{there[0].systems} systems, of which {spare} are to spare", "more than those",
                          "correct one of them")  # fmt: skip
