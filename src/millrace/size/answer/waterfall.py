"""Explains the number of systems: the steps from an ideal machine to the purchase, and all configurations."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from millrace.errors import ConfigError
from millrace.size.answer.sizing import TPS, SizingPlan, round_up
from millrace.size.load.sequential_calls import chain_calls
from millrace.size.load.token_lengths import RequestWork
from millrace.size.performance.closed_form import CONCURRENCIES, estimate_point
from millrace.size.performance.fitted_devices import Profile, profile
from millrace.size.performance.operating_point import FigureSource, Limits, OperatingPoint, best, throughput_optimal
from millrace.size.performance.operating_points import Offers
from millrace.size.performance.roofline_cost import Constants, ModelInstance
from millrace.size.performance.serving_overhead import ENGINE

# A device that reaches its datasheet: no fixed times, no links, no host.
_IDEAL = Constants((1.0, 0.0, 0.0, 0.0, 0.0), (1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0))


@dataclass(frozen=True, slots=True)
class WaterfallStep:
    """One step from an ideal machine to the purchase. systems: after this step; why: what the step accounts for"""

    systems: float
    why: str


def waterfall(
    plan: SizingPlan, offers: Offers, work: RequestWork, utilisation: float, spare: int
) -> tuple[WaterfallStep, ...]:
    """Return the steps from the physical minimum to the purchase; the number of systems never falls."""
    point = plan.point
    alike = [p for p in offers.points if p.device == point.device]
    unlimited = plan.rate / throughput_optimal(alike).rate_of_system
    planned = plan.fractional / utilisation
    limits_text = "limits are kept" if plan.limits != Limits(statistic=plan.limits.statistic) else "no limit"
    limits_text += ", with arrivals as they come" if point.sampled else ""
    steps = [
        WaterfallStep(unlimited, "most requests/s that any configuration serves, whatever users wait"),
        WaterfallStep(plan.fractional, limits_text),
        WaterfallStep(planned, f"planned with {utilisation:.0%} of that"),
        WaterfallStep(round_up(planned, point.systems), "whole systems"),
        WaterfallStep(plan.systems, f"{spare} to spare" if spare else "none to spare"),
    ]
    instance = offers.instance(point)
    if point.source != FigureSource.MEASURED and instance is not None:
        steps = [*_physics(plan, instance, work), *steps]
    return tuple(_rising(steps))


def _rising(steps: Sequence[WaterfallStep]) -> Iterator[WaterfallStep]:
    """Make systems non-decreasing: a simulation may serve slightly more than the closed form."""
    most = 0.0
    for step in steps:
        most = max(most, step.systems)
        yield replace(step, systems=most)


def _physics(plan: SizingPlan, instance: ModelInstance, work: RequestWork) -> list[WaterfallStep]:
    """Return the steps from the datasheet to achieved rates, for the best configuration on the plan's device."""
    device, precision = instance.device, plan.point.precision
    device_profile = profile(device, precision)
    ideal = replace(device_profile, constants=_IDEAL)
    factor = device_profile.constants.factor
    least, reached = _max_rate(instance, ideal, work), _max_rate(instance, device_profile, work)
    each = "every byte and operation" + (f" of {len(work.calls)} calls" if len(work.calls) > 1 else "")
    return [
        WaterfallStep(plan.rate / least, f"{device.name} as its datasheet says, in {precision}: {each}"),
        WaterfallStep(plan.rate / reached, "what is reached of that, links and fixed times of steps" + _times(factor)),
    ]


def _times(factor: float) -> str:
    return "" if factor == 1 else f", {factor:g} times"


def _max_rate(instance: ModelInstance, device_profile: Profile, work: RequestWork) -> float:
    """Return the highest requests/s of a system over TP, one or `instance.pp` stages, and concurrency."""
    rates: list[float] = []
    for tp, pp in product(TPS, {1, instance.pp}):
        here = replace(instance, tp=tp, pp=pp)
        try:
            points = [
                [estimate_point(here, device_profile, call.lengths, n, ENGINE) for n in CONCURRENCIES]
                for call in work.calls
            ]
        except ConfigError:
            continue  # too small for the weights
        rates += [point.rate_of_system for point in chain_calls(points)]
    return max(rates)


@dataclass(frozen=True, slots=True)
class Offer:
    """A configuration with its best operating point within the limits; None if none meets them."""

    configuration: str
    device: str
    point: OperatingPoint | None
    broken: tuple[str, ...] = ()


def capacity_table(points: Sequence[OperatingPoint], limits: Limits) -> tuple[Offer, ...]:
    """Return every configuration, most requests/s first."""
    by_name: dict[str, list[OperatingPoint]] = {}
    for point in points:
        by_name.setdefault(point.configuration, []).append(point)
    offers = []
    for name, alike in by_name.items():
        some = [p for p in alike if p.source == FigureSource.SIMULATED] or alike
        if any(not limits.broken(p) for p in some):
            offers.append(Offer(name, some[0].device, best(some, limits)))
        else:
            offers.append(Offer(name, some[0].device, None, limits.broken(min(some, key=lambda p: p.mean.e2e_s))))
    return tuple(sorted(offers, key=lambda offer: -offer.point.rate_of_system if offer.point else 0.0))
