"""What would change the answer: one thing at a time otherwise, and the systems then."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from millrace.errors import ConfigError
from millrace.machine.devices import Link
from millrace.size.answer.scenario import Scenario
from millrace.size.answer.sizing import Plan, rounded
from millrace.size.performance.operating_points import Offers

_MOST_S = 30.0  # for all of it


@dataclass(frozen=True, slots=True)
class Change:
    """What the answer would be, were one thing otherwise. both None where nothing keeps the limits then"""

    what: str
    systems: int | None
    fractional: float | None


def sensitivities(case: Scenario, found: Offers, best: Plan) -> tuple[Change, ...]:
    """For as long as that is not too long: long answers on slow devices take a minute each to simulate."""
    told, until, search = list[Change](), time.monotonic() + _MOST_S, case.replicas.search
    search.again(_MOST_S)
    whole, utilisation = best.point.systems, case.question.hardware.utilisation
    spare = best.systems - rounded(best.fractional / utilisation, whole)
    for what, planned in _otherwise(case, found, best).items():
        if time.monotonic() > until:
            break
        try:
            fractional = planned()
            if search.over:
                break
            told.append(Change(what, rounded(fractional / utilisation, whole) + spare, fractional))
        except ConfigError:
            if search.over:
                break
            told.append(Change(what, None, None))
    return tuple(told)


def _otherwise(case: Scenario, found: Offers, best: Plan) -> dict[str, Callable[[], float]]:
    """By what is otherwise, the systems then: by the figures, before utilisation, rounding and spares."""
    if case.load is None or not best.fractional:
        return {}
    limits = case.limits

    def limited(times: float) -> Callable[[], float]:
        other = limits.scaled(times)
        return lambda: case.plan(case.simulated(found, other), other).fractional

    again = {
        "a quarter more requests": lambda: case.plan(found, times=1.25).fractional,
        "half of the requests": lambda: case.plan(found, times=0.5).fractional,
    }
    if case.limited:
        again |= {"limits half as long": limited(0.5), "limits twice as long": limited(2.0)}
    if case.question.hardware.measured is None and not case.there:
        again |= _computed_otherwise(case, found, best)
    return again


def _computed_otherwise(case: Scenario, found: Offers, best: Plan) -> dict[str, Callable[[], float]]:
    """Where points are computed: other lengths and faster software on the same configuration, 16 bits on any."""
    h = case.question.hardware

    def again(other: Scenario) -> Callable[[], float]:
        def fractional() -> float:
            offered = other.offers()
            alike = tuple(p for p in offered.points if p.configuration == best.point.configuration)
            return other.plan(other.simulated(replace(offered, points=alike))).fractional

        return fractional

    def lengths(n_input: float, n_output: float) -> Callable[[], float]:
        calls = tuple(replace(c, n_input=max(1, c.n_input * n_input), n_output=max(1, c.n_output * n_output))
                      for c in case.work.calls)  # fmt: skip
        return again(replace(case, work=replace(case.work, calls=calls)))

    faster = replace(case.question, hardware=replace(h, factor=max(0.01, h.factor * 0.75)))
    told = {
        "prompts half as long": lengths(0.5, 1), "answers half as long": lengths(1, 0.5),
        "software that takes 0.75 of the time": again(replace(case, question=faster)),
    }  # fmt: skip
    if best.point.tp > 1 and h.pp is None and _is_by_pcie(found, best):
        for pp in (2, 4):
            told[f"layers in {pp} stages (--pp {pp})"] = _staged(case, best, pp)
    if not h.precision and h.profile is None and h.stack is None:
        told["16 bits alone"] = lambda: case.plan(case.simulated(_wide(found.computed))).fractional
    return told


def _is_by_pcie(found: Offers, best: Plan) -> bool:
    """Where devices that share layers wait for each other."""
    bought = found.bought(best.point.device)
    return bought is not None and bought.device.link == Link.PCIE and bought.most_tp > 1


def _staged(case: Scenario, best: Plan, pp: int) -> Callable[[], float]:
    def fractional() -> float:
        offered = case.offers(pp=pp).of(best.point.device)
        return case.plan(case.simulated(offered)).fractional

    return fractional


def _wide(found: Offers) -> Offers:
    return replace(found, points=tuple(point for point in found.points if point.precision in ("fp16", "bf16")))
