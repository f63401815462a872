"""The answer: which configuration serves the load within the limits, how many systems of it, why, and how surely."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from millrace.errors import ConfigError
from millrace.machine.devices import PROCESSOR, Device, find_device
from millrace.report.format_numbers import exact, format_4_digits
from millrace.size.fit.overhead_file import OwnStack
from millrace.size.load.peak_load import DAY_S
from millrace.size.performance.closed_form import served, shares
from millrace.size.performance.fitted_devices import UNSEEN, profile
from millrace.size.performance.models import ModelShape
from millrace.size.performance.operating_point import (
    P95_OF_CALLS,
    SYSTEM,
    Limits,
    Point,
    Source,
    best,
    latency_optimal,
    throughput_optimal,
)
from millrace.size.performance.roofline_cost import Instance
from millrace.size.performance.serving_overhead import Stack

TPS, PPS = (1, 2, 4, 8), (1, 2, 4, 8, 16)
_MOST_SYSTEMS = 10_000_000
_CLOSE = 0.02  # to which capacities are found
CLOSED_FORM_ERROR = 0.05  # beside those of what it is computed from
# Beside what a fit to somebody's own runs leaves: lengths that published fits did not see were 1 to 7 points worse.
_OTHER_LENGTHS = 0.05


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
    """systems: to buy; fractional: before rounding, spares and utilisation; low, high: with the figures' errors, and
    where the search was cut, low with what the closed form says

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


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """What a computed point rests on. error: relative, of its rate; told: its source, in words

    shares: of an instance's time; is_full: with more memory for the cache it would serve more
    """

    error: float
    told: str
    shares: Mapping[str, float]
    is_full: bool


class EvidenceBasis(Protocol):
    """What points are computed from."""

    def grounds(self, point: Point) -> PlanInputs: ...


def instance_of(
    model: ModelShape, device: Device, precision: str, tp: int, pp: int = 1, system: int = SYSTEM
) -> Instance:  # fmt: skip
    """With a cache of 8 bits beside weights of 8, as engines have it."""
    kv_bytes = 1.0 if precision in ("fp8", "int8", "fp4") else 2.0
    return Instance(model, device, precision, tp, kv_bytes, pp, system)


@dataclass(frozen=True, slots=True)
class Computed:
    """By datasheets. instance: one of the model; its device, precision and TP are the point's

    own: a stack that was fitted to somebody's own runs, for what it is of
    """

    instance: Instance
    own: OwnStack | None = None

    def grounds(self, point: Point) -> PlanInputs:
        device = self.instance.device if point.device == self.instance.device.name else find_device(point.device)
        here = instance_of(self.instance.model, device, point.precision, point.tp, point.pp, point.system)
        known = profile(device, point.precision)
        stack, error, served_by = known.stack, known.served_error, known.stack.name
        if self.own is not None and (own := self.own.of(device.name, point.precision)) is not None:
            stack, error = own, self.own.error + _OTHER_LENGTHS
            served_by = f"{own.name} ({self.own.error:.1%} off on average)"
        error += CLOSED_FORM_ERROR if point.source == Source.ANALYTIC else _CLOSE
        told = f"{known.source} (prompts {known.prefill_error:.0%} off, steps {known.decode_error:.0%})"
        told = f"{told}; served by {served_by}"
        if point.pp > 1:  # by a formula alone: nothing that was measured tells its error
            error, told = max(error, UNSEEN), f"{told}; {point.pp} stages by their bubbles and links, not measured"
        if device.architecture == PROCESSOR:
            told += "; no processor was among what was measured: `millrace size verify` and --profile have your own"
        return PlanInputs(error, told, shares(here, known, point, stack), _is_full(here, point, stack))


def plan(
    rate: float, points: Sequence[Point], limits: Limits, fleet: Fleet, basis: EvidenceBasis | None = None
) -> Plan:
    """rate: requests a second at the peak; points: what instances were measured or computed to serve

    basis: of those that are computed
    raises ConfigError where no point keeps the limits
    """
    if not 0 < rate <= 1e9:
        raise ConfigError(f"a peak of {exact(rate)} requests/s", "above 0, and at most 1,000,000,000", "correct it")
    point = best([p for p in points if p.source == Source.SIMULATED] or points, limits)
    error, told, grounds = 0.02, str(point.source), None
    if point.source in (Source.ANALYTIC, Source.SIMULATED) and basis is not None:
        grounds = basis.grounds(point)
        error, told = grounds.error, f"{point.source}, {grounds.told}"
        told += f"; {point.sampled.how}" if point.sampled else ""
    if limits.of == "p95" and point.p95_is_a_sum:
        told += f"; {P95_OF_CALLS}"
    fractional = rate / point.rate_of_system

    def bought(share: float) -> int:
        n = rounded(fractional * share / fleet.utilisation, point.systems) + fleet.spare
        if n > _MOST_SYSTEMS:
            raise ConfigError(f"{format_4_digits(rate)} requests/s are {n:,} systems", f"at most {_MOST_SYSTEMS:,}",
                              f"check the unit: --rate is a second at the peak; so many a day, as --calls has them, "
                              f"are {format_4_digits(rate / DAY_S)} a second")  # fmt: skip
        return n

    low = bought(1 - error)
    if point.sampled is not None and point.sampled.cut:
        mean = replace(limits, of="mean")  # a closed form knows no p95
        known = [p.rate_of_system for p in points if p.source == Source.ANALYTIC and not mean.broken(p)]
        low = min(low, bought((1 - error) * point.rate_of_system / max(known))) if known else low
    return Plan(
        rate=rate, point=point, limits=limits, fractional=fractional, systems=bought(1), low=low,
        high=bought(1 + error), error=error, binding=_binding(points, point, limits, grounds),
        shares=grounds.shares if grounds else {},
        latency_optimal=latency_optimal(points), throughput_optimal=throughput_optimal(points), provenance=told,
    )  # fmt: skip


def rounded(systems: float, an_instance: int) -> int:
    """Up to whole instances, each of so many systems or of a part of one."""
    return math.ceil(systems / an_instance - 1e-9) * an_instance


def _binding(points: Sequence[Point], point: Point, limits: Limits, grounds: PlanInputs | None) -> str:
    """Time, where it was up; a limit, where the same instance would serve more beyond it; a full cache; else what takes
    longest."""
    if point.sampled is not None and point.sampled.cut:
        return "time (--search-s): more was not tried"
    alike = [p for p in points if p.configuration == point.configuration and p.concurrency > point.concurrency]
    more = [p for p in alike if p.rate > point.rate * 1.01 and p.source == point.source]
    broken = point.sampled.beyond if point.sampled else ()
    if broken or (more and (broken := limits.broken(min(more, key=lambda p: p.concurrency)))):
        return f"the limit on {' and '.join(broken)}"
    if grounds is not None:
        return "memory of the KV cache" if grounds.is_full else max(grounds.shares, key=grounds.shares.__getitem__)
    return "the table, which has no more in flight" if not alike else "what was measured serves no more"


def _is_full(instance: Instance, point: Point, stack: Stack) -> bool:
    """Would twice the memory serve more, all else as it is?"""
    known, lengths = profile(instance.device, point.precision), (point.input_tokens, point.output_tokens)
    twice = replace(instance, device=replace(instance.device, memory_bytes=2 * instance.device.memory_bytes))
    full = point.concurrency if point.source == Source.ANALYTIC else stack.sequences
    return served(twice, known, lengths, full, stack).rate > 1.03 * served(instance, known, lengths, full, stack).rate
