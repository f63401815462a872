"""Chooses the configuration that serves a load within limits, and counts its systems with their uncertainty."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from millrace.errors import ConfigError
from millrace.machine.devices import PROCESSOR, Device, find_device
from millrace.report.format_numbers import format_4_digits, format_exact
from millrace.size.fit.overhead_file import FittedStack
from millrace.size.load.peak_load import DAY_S
from millrace.size.performance.closed_form import estimate_point, shares
from millrace.size.performance.fitted_devices import UNSEEN, profile
from millrace.size.performance.models import ModelShape
from millrace.size.performance.operating_point import (
    P95_OF_CALLS,
    SYSTEM,
    FigureSource,
    Limits,
    OperatingPoint,
    best,
    latency_optimal,
    throughput_optimal,
)
from millrace.size.performance.roofline_cost import ModelInstance
from millrace.size.performance.serving_overhead import Stack

TPS, PPS = (1, 2, 4, 8), (1, 2, 4, 8, 16)
_MAX_SYSTEMS = 10_000_000
_CLOSE = 0.02  # relative precision of the capacity search
CLOSED_FORM_ERROR = 0.05  # in addition to the errors of its inputs
# Added to the residual of a fit to a user's runs: lengths that published fits did not see were 1 to 7 points worse.
_OTHER_LENGTHS = 0.05


@dataclass(frozen=True, slots=True)
class Fleet:
    """Purchasing rules. utilisation: target share of a system's capacity, 0 to 1; spare: systems on top of that"""

    utilisation: float = 1.0
    spare: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.utilisation <= 1 or not 0 <= self.spare <= 1000:
            raise ConfigError(
                f"a utilisation of {self.utilisation:g} with {self.spare} spare systems",
                "a share up to 1, and 0 to 1000", "correct them",
            )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingPlan:
    """A configuration and how many systems of it to buy.

    fractional: systems before rounding, spares and utilisation
    low, high: systems at the ends of the error band; if the search was cut, low uses the closed form
    binding: what keeps a system from serving more; shares: of an instance's time by activity, {} if measured
    """

    rate: float
    point: OperatingPoint
    limits: Limits
    fractional: float
    systems: int
    low: int
    high: int
    error: float
    binding: str
    shares: Mapping[str, float]
    latency_optimal: OperatingPoint
    throughput_optimal: OperatingPoint
    provenance: str


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """What a computed operating point is based on. error: relative, of its rate; provenance: its sources, for people

    shares: of an instance's time by activity; is_full: KV-cache memory limits the rate
    """

    error: float
    provenance: str
    shares: Mapping[str, float]
    is_full: bool


class EvidenceBasis(Protocol):
    """The model from which operating points are computed."""

    def grounds(self, point: OperatingPoint) -> PlanInputs: ...


def instance_of(
    model: ModelShape, device: Device, precision: str, tp: int, pp: int = 1, system: int = SYSTEM
) -> ModelInstance:  # fmt: skip
    """Create an instance; 8-bit (or 4-bit float) weights imply an 8-bit KV cache, as engines do."""
    kv_bytes = 1.0 if precision in ("fp8", "int8", "fp4") else 2.0
    return ModelInstance(model, device, precision, tp, kv_bytes, pp, system)


@dataclass(frozen=True, slots=True)
class Computed:
    """Operating points computed from datasheets and fitted constants.

    instance: any instance of the model; device, precision and TP are taken from the point
    own: a serving stack fitted to the user's runs, used for its device and precision
    """

    instance: ModelInstance
    own: FittedStack | None = None

    def grounds(self, point: OperatingPoint) -> PlanInputs:
        device = self.instance.device if point.device == self.instance.device.name else find_device(point.device)
        here = instance_of(self.instance.model, device, point.precision, point.tp, point.pp, point.system)
        device_profile = profile(device, point.precision)
        stack, error, served_by = device_profile.stack, device_profile.served_error, device_profile.stack.name
        if self.own is not None and (own := self.own.stack_for(device.name, point.precision)) is not None:
            stack, error = own, self.own.error + _OTHER_LENGTHS
            served_by = f"{own.name} ({self.own.error:.1%} off on average)"
        error += CLOSED_FORM_ERROR if point.source == FigureSource.ANALYTIC else _CLOSE
        errors = f"prompts {device_profile.prefill_error:.0%} off, steps {device_profile.decode_error:.0%}"
        provenance = f"{device_profile.source} ({errors}); served by {served_by}"
        if point.pp > 1:  # a formula only: no measurements to judge it by
            error, provenance = (
                max(error, UNSEEN),
                f"{provenance}; {point.pp} stages by their bubbles and links, not measured",
            )
        if device.architecture == PROCESSOR:
            provenance += (
                "; no processor was among what was measured: `millrace size verify` and --profile have your own"
            )
        return PlanInputs(error, provenance, shares(here, device_profile, point, stack), _is_full(here, point, stack))


def plan(
    rate: float, points: Sequence[OperatingPoint], limits: Limits, fleet: Fleet, basis: EvidenceBasis | None = None
) -> SizingPlan:
    """Choose the best configuration and count its systems.

    rate: requests/s at the peak; points: measured or computed operating points; basis: of the computed ones
    raises ConfigError if no point meets the limits
    """
    if not 0 < rate <= 1e9:
        raise ConfigError(
            f"a peak of {format_exact(rate)} requests/s", "above 0, and at most 1,000,000,000", "correct it"
        )
    point = best([p for p in points if p.source == FigureSource.SIMULATED] or points, limits)
    error, provenance, grounds = 0.02, str(point.source), None
    if point.source in (FigureSource.ANALYTIC, FigureSource.SIMULATED) and basis is not None:
        grounds = basis.grounds(point)
        error, provenance = grounds.error, f"{point.source}, {grounds.provenance}"
        provenance += f"; {point.sampled.how}" if point.sampled else ""
    if limits.statistic == "p95" and point.p95_is_a_sum:
        provenance += f"; {P95_OF_CALLS}"
    fractional = rate / point.rate_of_system

    def bought(share: float) -> int:
        n = round_up(fractional * share / fleet.utilisation, point.systems) + fleet.spare
        if n > _MAX_SYSTEMS:
            raise ConfigError(f"{format_4_digits(rate)} requests/s are {n:,} systems", f"at most {_MAX_SYSTEMS:,}",
                              f"check the unit: --rate is per second at the peak; as a number per day (--calls) it "
                              f"is {format_4_digits(rate / DAY_S)} per second")  # fmt: skip
        return n

    low = bought(1 - error)
    if point.sampled is not None and point.sampled.cut:
        mean = replace(limits, statistic="mean")  # a closed form knows no p95
        closed_form_rates = [
            p.rate_of_system for p in points if p.source == FigureSource.ANALYTIC and not mean.broken(p)
        ]
        low = (
            min(low, bought((1 - error) * point.rate_of_system / max(closed_form_rates))) if closed_form_rates else low
        )
    return SizingPlan(
        rate=rate, point=point, limits=limits, fractional=fractional, systems=bought(1), low=low,
        high=bought(1 + error), error=error, binding=_binding(points, point, limits, grounds),
        shares=grounds.shares if grounds else {},
        latency_optimal=latency_optimal(points), throughput_optimal=throughput_optimal(points), provenance=provenance,
    )  # fmt: skip


def round_up(systems: float, an_instance: int) -> int:
    """Round up to a multiple of `an_instance`, the systems that one instance takes."""
    return math.ceil(systems / an_instance - 1e-9) * an_instance


def _binding(
    points: Sequence[OperatingPoint], point: OperatingPoint, limits: Limits, grounds: PlanInputs | None
) -> str:
    """Return what limits the rate: the search time, a latency limit, KV-cache memory, or the costliest activity."""
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


def _is_full(instance: ModelInstance, point: OperatingPoint, stack: Stack) -> bool:
    """Whether twice the memory would serve more, all else equal."""
    device_profile, lengths = profile(instance.device, point.precision), (point.input_tokens, point.output_tokens)
    twice = replace(instance, device=replace(instance.device, memory_bytes=2 * instance.device.memory_bytes))
    full = point.concurrency if point.source == FigureSource.ANALYTIC else stack.sequences
    return (
        estimate_point(twice, device_profile, lengths, full, stack).rate
        > 1.03 * estimate_point(instance, device_profile, lengths, full, stack).rate
    )
