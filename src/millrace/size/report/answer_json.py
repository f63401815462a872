"""An answer as JSON data, and its headline and notes as text. Times in ms, memory in bytes, rates per second."""

from dataclasses import asdict
from typing import Any

from millrace.report.format_numbers import format_4_digits
from millrace.size.answer.alternatives import Alternative
from millrace.size.answer.answer import SizingAnswer
from millrace.size.answer.sizing import SizingPlan
from millrace.size.load.load_forecast import Demand
from millrace.size.money.tco import Money
from millrace.size.performance.closed_form import InstanceMemory
from millrace.size.performance.operating_point import P95_OF_CALLS, Limits, OperatingPoint, Waits

DEFINITIONS = {
    "ttft": "from the request to its first token; of calls in a row to the last call's first token",
    "itl": "(e2e - ttft) / (output tokens - 1)",
    "e2e": "from the request to its last token",
    "p95": f"of requests; where p95_is_upper_bound, {P95_OF_CALLS}",
    "system": "a machine of system_size devices (8 if unset), full of instances",
    "concurrency": "requests in flight in an instance: always (closed loop), or where simulated on average",
}


def headline(answer: SizingAnswer) -> str:
    """Return the answer in one line."""
    plan = answer.plan
    model = answer.question.request.model or plan.point.model
    if answer.demand is None:
        rate = answer.consequences.rate
        low, high = (format_4_digits(rate * (1 + error)) for error in (-plan.error, plan.error))
        existing_systems = [(system.systems, system.device) for system in answer.existing] or [
            (plan.systems, plan.point.device)
        ]
        system_names = " and ".join(_systems(n, plan.point.system, device) for n, device in existing_systems)
        serve = "serves" if [n for n, _ in existing_systems] == [1] else "serve"
        return f"{system_names} {serve} {format_4_digits(rate)} requests/s ({low} to {high}) of {model}"
    if not plan.systems:
        return "Nothing is to be bought: the systems that are there serve the load"
    between = f" ({plan.low} to {plan.high})" if plan.low != plan.high else ""
    needed = _systems(plan.systems, plan.point.system, plan.point.device, between)
    return f"{needed}, for {format_4_digits(plan.rate)} requests/s of {model}"


def uncertainty_text(answer: SizingAnswer) -> str:
    """Describe the uncertainty of the figures, and the range of systems that follows from it."""
    plan = answer.plan
    if answer.demand is None:
        return f"they may be {plan.error:.0%} off"
    if plan.point.sampled is not None and plan.point.sampled.cut:
        return (f"{plan.low} to {plan.high} systems: the search's time was up (--search-s) before more was tried, "
                f"and in closed form {plan.low} may do")  # fmt: skip
    if plan.low == plan.high:
        return f"{plan.low} system{'' if plan.low == 1 else 's'}, even if they are {plan.error:.0%} off"
    return f"{plan.low} to {plan.high} systems, as they may be {plan.error:.0%} off"


def interpretation_notes(answer: SizingAnswer) -> tuple[str, ...]:
    """Return how the question was interpreted, and how many rows of a table were left out."""
    n, measured_hardware = answer.offers.left_out, answer.question.hardware.measured
    without = (f"{measured_hardware}: {n} rows left out, which were not in a steady state",) if n else ()
    return (*answer.work.how, *(answer.demand.how if answer.demand else ()), *without)


def cut_short(answer: SizingAnswer) -> str:
    """Describe what was not simulated; "" if everything relevant was."""
    if not answer.not_simulated:
        return ""
    after = f"{answer.question.search.search_s:g} s (--search-s)"
    return (f"the search ended after {after}: this is the best until then, nothing was looked at that would change it, "
            f"and not simulated to the end: {'; '.join(answer.not_simulated)}")  # fmt: skip


def _systems(n: int, size: int, device: str, between: str = "") -> str:
    return f"{n} system{'' if n == 1 else 's'}{between} of {size} x {device}"


def _memory(memory: InstanceMemory) -> dict[str, float]:
    return {
        "total": memory.total, "kept_back": memory.kept_back, "weights": memory.weights, "held": memory.kv_in_use,
        "free": memory.free,
    }  # fmt: skip


def answer_to_dict(answer: SizingAnswer) -> dict[str, Any]:
    """Convert an answer to JSON data."""
    plan = answer.plan
    return {
        "question": answer.question.non_defaults,
        "work": _work(answer),
        "load": None if answer.demand is None else _load(answer.demand),
        "answer": {
            **plan_to_dict(plan), "instances": answer.instances, "shares_of_time": dict(plan.shares),
            "operating": point_to_dict(answer.operating), "latency_optimal": point_to_dict(plan.latency_optimal),
            "throughput_optimal": point_to_dict(plan.throughput_optimal),
        },
        "other": plan_to_dict(answer.other) if answer.other else {"why_not": answer.why_no_other},
        "memory": _memory(answer.memory) if answer.memory else None,
        "why": [asdict(step) for step in answer.waterfall],
        "configurations": [
            {"configuration": offer.configuration, "broken": list(offer.broken),
             "point": point_to_dict(offer.point) if offer.point else None} for offer in answer.table
        ],
        "changes": [asdict(change) for change in answer.changes],
        "follows": asdict(answer.consequences),
        "there": [asdict(one) for one in answer.existing],
        "devices": [_alternative(one) for one in answer.alternatives],
        "money": None if answer.money is None else _money(answer.money),
        "not_simulated": list(answer.not_simulated),
        "rows_left_out": answer.offers.left_out,
        "definitions": DEFINITIONS,
    }  # fmt: skip


def _alternative(alternative: Alternative) -> dict[str, Any]:
    return {
        "device": alternative.device, "why_not": alternative.why_not.what if alternative.why_not else None,
        "systems": alternative.plan.systems if alternative.plan else None,
        "fractional": alternative.plan.fractional if alternative.plan else None,
        "configuration": alternative.plan.point.configuration if alternative.plan else None,
        "cheapest_year": alternative.money.cheapest if alternative.money else None,
    }  # fmt: skip


def _money(money: Money) -> dict[str, Any]:
    document = {**asdict(money), "cheapest": money.cheapest, "cheapest_way": money.cheapest_way or None}
    if money.rented is not None:
        document["rented"]["rent"]["date"] = money.rented.rent.date.isoformat()
    return document


def _work(answer: SizingAnswer) -> dict[str, Any]:
    calls = [{"name": c.name, "input_tokens": c.n_input, "output_tokens": c.n_output} for c in answer.work.calls]
    return {"calls": calls, "how": list(answer.work.how)}


def _load(load: Demand) -> dict[str, Any]:
    return {
        "peak": load.peak, "busy": load.busy, "average": load.average, "hours": list(load.hours), "how": list(load.how)
    }  # fmt: skip


def plan_to_dict(plan: SizingPlan) -> dict[str, Any]:
    return {
        "systems": plan.systems, "low": plan.low, "high": plan.high, "fractional": plan.fractional,
        "error": plan.error, "provenance": plan.provenance, "binding": plan.binding, "point": point_to_dict(plan.point),
        "limits": limits_to_dict(plan.limits),
    }  # fmt: skip


def limits_to_dict(limits: Limits) -> dict[str, Any]:
    def ms(seconds: float | None) -> float | None:
        return None if seconds is None else seconds * 1e3

    return {
        "ttft_ms": ms(limits.ttft_s),
        "itl_ms": ms(limits.itl_s),
        "e2e_ms": ms(limits.e2e_s),
        "of": limits.statistic,
    }


def point_to_dict(point: OperatingPoint) -> dict[str, Any]:
    def waits(times: Waits | None) -> dict[str, float] | None:
        if times is None:
            return None
        return {"ttft_ms": times.ttft_s * 1e3, "itl_ms": times.itl_s * 1e3, "e2e_ms": times.e2e_s * 1e3}

    sampled = point.sampled
    return {
        "configuration": point.configuration, "device": point.device, "precision": point.precision, "tp": point.tp,
        "pp": point.pp, "system_size": point.system,
        "concurrency": point.concurrency, "requests_per_s": point.rate,
        "requests_per_s_of_system": point.rate_of_system, "mean": waits(point.mean), "p95": waits(point.p95),
        "p95_is_upper_bound": point.p95_is_a_sum,
        "sampled": None if sampled is None else {
            **asdict(sampled), "p99": waits(sampled.p99), "mean_within": waits(sampled.mean_within),
            "p95_within": waits(sampled.p95_within),
        },
        "source": str(point.source),
    }  # fmt: skip
