"""The answer: which configuration serves the load within the limits, how many systems of it, why, and how surely."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from millrace.errors import ConfigError
from millrace.machine.devices import Device, find_device
from millrace.size.constants import profile
from millrace.size.cost import Instance
from millrace.size.models import ModelShape
from millrace.size.points import Limits, Point, Source, best, latency_optimal, throughput_optimal
from millrace.size.served import served, shares

TPS = (1, 2, 4, 8)
_MOST_SYSTEMS = 10_000_000
_CLOSE = 0.02  # to which capacities are found


@dataclass(frozen=True, slots=True)
class Fleet:
    """How systems are bought. utilisation: how much of what a system can is planned with; spare: systems beyond that"""

    utilisation: float = 1.0
    spare: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.utilisation <= 1 or not 0 <= self.spare <= 1000:
            raise ConfigError(
                f"a utilisation of {self.utilisation:g} with {self.spare} spare systems",
                "a share up to 1, and 0 to 1000", "correct them",
            )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """systems: to buy; fractional: before rounding, spares and utilisation; low, high: with the figures' errors

    binding: what keeps a system from serving more; shares: of an instance's time, where the figures are analytic
    """

    rate: float
    point: Point
    limits: Limits
    fractional: float
    systems: int
    low: int
    high: int
    error: float
    binding: str
    shares: Mapping[str, float]
    latency_optimal: Point
    throughput_optimal: Point
    provenance: str


def instance_of(model: ModelShape, device: Device, precision: str, tp: int) -> Instance:
    """With a cache of 8 bits beside weights of 8, as engines have it."""
    return Instance(model, device, precision, tp, 1.0 if precision in ("fp8", "int8", "fp4") else 2.0)


def plan(rate: float, points: Sequence[Point], limits: Limits, fleet: Fleet, instance: Instance | None = None) -> Plan:
    """rate: requests a second at the peak; points: what instances were measured or computed to serve

    instance: one of the model, where points are analytic; its device, precision and TP are the best point's
    raises ConfigError where no point keeps the limits
    """
    if not 0 < rate <= 1e9:
        raise ConfigError(f"a peak of {rate:g} requests/s", "above 0, and at most 1e9", "correct it")
    point = best([p for p in points if p.source == Source.SIMULATED] or points, limits)
    error, told = 0.02, str(point.source)
    why: Mapping[str, float] = {}
    if point.source in (Source.ANALYTIC, Source.SIMULATED) and instance is not None:
        here = _instance_at(point, instance)
        known = profile(here.device, point.precision)
        error = known.served_error + (0.05 if point.source == Source.ANALYTIC else _CLOSE)
        why = shares(here, known, point)
        told = f"{point.source}, {known.source}; served by {known.stack.name}"
        told += f"; {point.sampled.how}" if point.sampled else ""
    fractional = rate / point.rate_of_system

    def bought(share: float) -> int:
        n = math.ceil(fractional * share / fleet.utilisation - 1e-9) + fleet.spare
        if n > _MOST_SYSTEMS:
            raise ConfigError(f"{n} systems", f"at most {_MOST_SYSTEMS}", "check rate and units")
        return n

    return Plan(
        rate=rate, point=point, limits=limits, fractional=fractional, systems=bought(1), low=bought(1 - error),
        high=bought(1 + error), error=error, binding=_binding(points, point, limits, why, instance), shares=why,
        latency_optimal=latency_optimal(points), throughput_optimal=throughput_optimal(points), provenance=told,
    )  # fmt: skip


def _instance_at(point: Point, instance: Instance) -> Instance:
    device = instance.device if point.device == instance.device.name else find_device(point.device)
    return instance_of(instance.model, device, point.precision, point.tp)


def _binding(
    points: Sequence[Point], point: Point, limits: Limits, why: Mapping[str, float], instance: Instance | None
) -> str:
    """A limit, where the same instance would serve more beyond it; a full cache; else what takes longest."""
    alike = [p for p in points if p.configuration == point.configuration and p.concurrency > point.concurrency]
    more = [p for p in alike if p.rate > point.rate * 1.01 and p.source == point.source]
    broken = point.sampled.beyond if point.sampled else ()
    if broken or (more and (broken := limits.broken(min(more, key=lambda p: p.concurrency)))):
        return f"the limit on {' and '.join(broken)}"
    if instance is not None and why:
        return (
            "memory of the KV cache"
            if _is_full(_instance_at(point, instance), point)
            else max(why, key=why.__getitem__)
        )
    return "none that was measured" if not alike else "what was measured serves no more"


def _is_full(instance: Instance, point: Point) -> bool:
    """Would twice the memory serve more, all else as it is?"""
    known, lengths = profile(instance.device, point.precision), (point.input_tokens, point.output_tokens)
    twice = replace(instance, device=replace(instance.device, memory_bytes=2 * instance.device.memory_bytes))
    full = point.concurrency if point.source == Source.ANALYTIC else known.stack.sequences
    return served(twice, known, lengths, full).rate > 1.03 * served(instance, known, lengths, full).rate
