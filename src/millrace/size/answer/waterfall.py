"""Why so many: the way from an ideal machine to what is bought, and every configuration."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from millrace.errors import ConfigError
from millrace.size.answer.sizing import TPS, Plan, rounded
from millrace.size.load.sequential_calls import chain_calls
from millrace.size.load.token_lengths import Work
from millrace.size.performance.closed_form import CONCURRENCIES, served
from millrace.size.performance.fitted_devices import Profile, profile
from millrace.size.performance.operating_point import Limits, Point, Source, best, throughput_optimal
from millrace.size.performance.operating_points import Offers
from millrace.size.performance.roofline_cost import Constants, Instance
from millrace.size.performance.serving_overhead import ENGINE

# A device that reaches its datasheet: no fixed times, no links, no host.
_IDEAL = Constants((1.0, 0.0, 0.0, 0.0, 0.0), (1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0))


@dataclass(frozen=True, slots=True)
class Step:
    """On the way from an ideal machine to what is bought. systems: after this; why: what made it more"""

    systems: float
    why: str


def waterfall(found: Plan, offers: Offers, work: Work, utilisation: float, spare: int) -> tuple[Step, ...]:
    """From the least that physics allows; each step adds systems, or none."""
    point = found.point
    alike = [p for p in offers.points if p.device == point.device]
    unlimited = found.rate / throughput_optimal(alike).rate_of_system
    planned = found.fractional / utilisation
    kept = "limits are kept" if found.limits != Limits(of=found.limits.of) else "no limit"
    kept += ", with arrivals as they come" if point.sampled else ""
    steps = [
        Step(unlimited, "most requests/s that any configuration serves, whatever users wait"),
        Step(found.fractional, kept),
        Step(planned, f"planned with {utilisation:.0%} of that"),
        Step(rounded(planned, point.systems), "whole systems"),
        Step(found.systems, f"{spare} to spare" if spare else "none to spare"),
    ]
    instance = offers.instance(point)
    if point.source != Source.MEASURED and instance is not None:
        steps = [*_physics(found, instance, work), *steps]
    return tuple(_rising(steps))


def _rising(steps: Sequence[Step]) -> Iterator[Step]:
    """A simulation may serve a little more than the closed form."""
    most = 0.0
    for step in steps:
        most = max(most, step.systems)
        yield replace(step, systems=most)


def _physics(found: Plan, instance: Instance, work: Work) -> list[Step]:
    """Of the configuration that was chosen, or another one of its device where that is less."""
    device, precision = instance.device, found.point.precision
    known = profile(device, precision)
    ideal = replace(known, constants=_IDEAL)
    factor = known.constants.factor
    least, reached = _most(instance, ideal, work), _most(instance, known, work)
    each = "every byte and operation" + (f" of {len(work.calls)} calls" if len(work.calls) > 1 else "")
    return [
        Step(found.rate / least, f"{device.name} as its datasheet says, in {precision}: {each}"),
        Step(found.rate / reached, "what is reached of that, links and fixed times of steps" + _times(factor)),
    ]


def _times(factor: float) -> str:
    return "" if factor == 1 else f", {factor:g} times"


def _most(instance: Instance, known: Profile, work: Work) -> float:
    """Requests a second of a system, in the best TP, in one stage or as many as here, at the best concurrency."""
    rates: list[float] = []
    for tp, pp in product(TPS, {1, instance.pp}):
        here = replace(instance, tp=tp, pp=pp)
        try:
            points = [[served(here, known, call.lengths, n, ENGINE) for n in CONCURRENCIES] for call in work.calls]
        except ConfigError:
            continue  # too small for the weights
        rates += [point.rate_of_system for point in chain_calls(points)]
    return max(rates)


@dataclass(frozen=True, slots=True)
class Offer:
    """What a system of a configuration serves. point: its best within the limits; None: nothing keeps them"""

    configuration: str
    device: str
    point: Point | None
    broken: tuple[str, ...] = ()


def capacity_table(points: Sequence[Point], limits: Limits) -> tuple[Offer, ...]:
    """Every configuration, most requests/s first."""
    by_name: dict[str, list[Point]] = {}
    for point in points:
        by_name.setdefault(point.configuration, []).append(point)
    found = []
    for name, alike in by_name.items():
        some = [p for p in alike if p.source == Source.SIMULATED] or alike
        if any(not limits.broken(p) for p in some):
            found.append(Offer(name, some[0].device, best(some, limits)))
        else:
            found.append(Offer(name, some[0].device, None, limits.broken(min(some, key=lambda p: p.mean.e2e_s))))
    return tuple(sorted(found, key=lambda offer: -offer.point.rate_of_system if offer.point else 0.0))
