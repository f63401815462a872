"""Sensitivity analysis: plans again with one input changed at a time."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from millrace.errors import ConfigError
from millrace.machine.devices import Link
from millrace.size.answer.scenario import Scenario
from millrace.size.answer.sizing import SizingPlan, round_up
from millrace.size.performance.operating_points import Offers

_MAX_S = 30.0  # for all changes together


@dataclass(frozen=True, slots=True)
class Change:
    """One what-if result; systems and fractional are None if no configuration meets the limits."""

    what: str
    systems: int | None
    fractional: float | None


def sensitivities(case: Scenario, offers: Offers, best: SizingPlan) -> tuple[Change, ...]:
    """Return what-if results, as many as fit in 30 s: long answers on slow devices take a minute each to simulate."""
    changes, until, search = list[Change](), time.monotonic() + _MAX_S, case.replicas.search
    search.restart(_MAX_S)
    instance_systems, utilisation = best.point.systems, case.question.hardware.utilisation
    spare = best.systems - round_up(best.fractional / utilisation, instance_systems)
    for what, planned in _variations(case, offers, best).items():
        if time.monotonic() > until:
            break
        try:
            fractional = planned()
            if search.over:
                break
            changes.append(Change(what, round_up(fractional / utilisation, instance_systems) + spare, fractional))
        except ConfigError:
            if search.over:
                break
            changes.append(Change(what, None, None))
    return tuple(changes)


def _variations(case: Scenario, offers: Offers, best: SizingPlan) -> dict[str, Callable[[], float]]:
    """Return plans by description of the change; each gives systems before utilisation, rounding and spares."""
    if case.load is None or not best.fractional:
        return {}
    limits = case.limits

    def with_limits(times: float) -> Callable[[], float]:
        other = limits.scale(times)
        return lambda: case.plan(case.simulate(offers, other), other).fractional

    variations = {
        "a quarter more requests": lambda: case.plan(offers, times=1.25).fractional,
        "half of the requests": lambda: case.plan(offers, times=0.5).fractional,
    }
    if case.limited:
        variations |= {"limits half as long": with_limits(0.5), "limits twice as long": with_limits(2.0)}
    if case.question.hardware.measured is None and not case.existing:
        variations |= _computed_variations(case, offers, best)
    return variations


def _computed_variations(case: Scenario, offers: Offers, best: SizingPlan) -> dict[str, Callable[[], float]]:
    """Return variations that need computed points: lengths, faster software, pipeline stages, 16 bits only."""
    h = case.question.hardware

    def replan(other: Scenario) -> Callable[[], float]:
        def fractional() -> float:
            offered = other.offers()
            alike = tuple(p for p in offered.points if p.configuration == best.point.configuration)
            return other.plan(other.simulate(replace(offered, points=alike))).fractional

        return fractional

    def lengths(n_input: float, n_output: float) -> Callable[[], float]:
        calls = tuple(replace(c, n_input=max(1, c.n_input * n_input), n_output=max(1, c.n_output * n_output))
                      for c in case.work.calls)  # fmt: skip
        return replan(replace(case, work=replace(case.work, calls=calls)))

    faster = replace(case.question, hardware=replace(h, factor=max(0.01, h.factor * 0.75)))
    variations = {
        "prompts half as long": lengths(0.5, 1), "answers half as long": lengths(1, 0.5),
        "software that takes 0.75 of the time": replan(replace(case, question=faster)),
    }  # fmt: skip
    if best.point.tp > 1 and h.pp is None and _is_by_pcie(offers, best):
        for pp in (2, 4):
            variations[f"layers in {pp} stages (--pp {pp})"] = _with_stages(case, best, pp)
    if not h.precision and h.profile is None and h.stack is None:
        variations["16 bits alone"] = lambda: case.plan(case.simulate(_wide(offers.computed))).fractional
    return variations


def _is_by_pcie(offers: Offers, best: SizingPlan) -> bool:
    """Whether the devices of an instance communicate over PCIe."""
    bought = offers.hardware_for(best.point.device)
    return bought is not None and bought.device.link == Link.PCIE and bought.max_tp > 1


def _with_stages(case: Scenario, best: SizingPlan, pp: int) -> Callable[[], float]:
    def fractional() -> float:
        offered = case.offers(pp=pp).for_device(best.point.device)
        return case.plan(case.simulate(offered)).fractional

    return fractional


def _wide(offers: Offers) -> Offers:
    return replace(offers, points=tuple(point for point in offers.points if point.precision in ("fp16", "bf16")))
