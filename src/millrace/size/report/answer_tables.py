"""An answer as text tables, for the terminal and for the HTML page."""

from collections.abc import Iterator

from millrace.machine.devices import GB
from millrace.report.format_numbers import format_4_digits, format_count, pluralize
from millrace.size.answer.answer import SizingAnswer
from millrace.size.performance.operating_point import P95_OF_CALLS, OperatingPoint
from millrace.size.report.answer_json import interpretation_notes, uncertainty_text
from millrace.size.report.cost_tables import cost_table, device_table
from millrace.size.report.table import TextTable, system_count

_MAX_ROWS = 12
_OF_A_SYSTEM = "requests/s are of a system; times in ms"
_COLUMNS = ("configuration", "in flight", "requests/s", "TTFT", "p95", "ITL", "E2E", "systems", "figures")


def summary_rows(answer: SizingAnswer) -> list[tuple[str, str]]:
    """Return the summary of an answer as names and values."""
    plan, h = answer.plan, answer.question.hardware
    systems = f"{system_count(plan.fractional)} by the figures, {plan.systems} to buy; " if answer.demand else ""
    bought = f"planned with {h.utilisation:.0%} of what they can, {h.spare or 'none'} to spare"
    return [
        ("systems", systems + bought),
        ("instances", f"{answer.instances} of {plan.point.parallel} ({plan.point.precision}), "
                      f"{format_4_digits(plan.point.concurrency)} requests in flight in each" + _few_devices(answer)),
        (
            "a system serves",
            f"{format_4_digits(plan.point.rate_of_system)} requests/s, of {format_4_digits(plan.rate)}",
        ),
        ("what binds", plan.binding),
        ("figures", uncertainty_text(answer)),
        ("from", plan.provenance),
    ]  # fmt: skip


def _few_devices(answer: SizingAnswer) -> str:
    """Return a note if a part of one system suffices."""
    point, bought = answer.plan.point, answer.offers.hardware_for(answer.plan.point.device)
    needed = answer.instances * point.devices
    is_sliced = bought is not None and bought.slices > 1
    if answer.demand is None or not answer.plan.systems or needed >= point.system or is_sliced:
        return ""
    return f"; {needed} of {pluralize(point.system, 'device')} would do: --system-size plans with smaller systems"


def tables(answer: SizingAnswer) -> Iterator[TextTable]:
    """Yield the tables in their order; empty ones are left out."""
    yield _waits(answer)
    yield _points(answer)
    yield TextTable("read", "How the question was read", notes=interpretation_notes(answer))
    if answer.memory is not None:
        yield _memory(answer)
    if answer.demand is not None:
        yield _waterfall(answer)
    yield _configurations(answer)
    if answer.changes:
        yield _changes(answer)
    yield _follows(answer)
    if len(answer.alternatives) > 1:
        yield device_table(answer.alternatives)
    if answer.money is not None:
        yield cost_table(answer.money)


def _waits(answer: SizingAnswer) -> TextTable:
    """Return the latencies at the chosen point, with a note on those at the actual load, which may be much lower."""
    point, limits, load, notes = answer.plan.point, answer.plan.limits, answer.operating, list[str]()
    p99 = point.sampled.p99 if point.sampled else None
    rows = [
        [name, *(_ms(getattr(waits, field) if waits else None) for waits in (point.mean, point.p95, p99)),
         _ms(getattr(limits, field))]
        for name, field in (("TTFT, ms", "ttft_s"), ("ITL, ms", "itl_s"), ("E2E, ms", "e2e_s"))
    ]  # fmt: skip
    if point.sampled is not None:
        s = point.sampled
        mean, p95 = s.mean_within.ttft_s * 1e3, s.p95_within.ttft_s * 1e3
        notes = [f"simulated: {s.counted} requests, after {s.dropped} that were dropped",
                 f"intervals of 95 %: mean TTFT +-{mean:.1f} ms, p95 +-{p95:.1f} ms"]  # fmt: skip
    if len(answer.work.calls) > 1:
        notes.append("TTFT is from the request's beginning to the last call's first token, and ITL is that call's")
    if point.p95_is_a_sum:
        notes.append(P95_OF_CALLS)
    if load != point:
        waits = load.mean
        notes.append(f"at this load, on what is bought: mean TTFT {_ms(waits.ttft_s)} ms, ITL {_ms(waits.itl_s)} ms, "
                     f"E2E {_ms(waits.e2e_s)} ms")  # fmt: skip
    return TextTable(
        "waits", "What users wait for", rows, ("", "mean", "p95", "p99", "limit"),
        f"where systems are as busy as they may be; limits are on the {limits.statistic}", tuple(notes),
    )  # fmt: skip


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.1f}"


def _points(answer: SizingAnswer) -> TextTable:
    plan, other = answer.plan, answer.other
    points = [("chosen", plan.point)]
    if answer.operating != plan.point:
        points.append(("at this load", answer.operating))
    if other is not None:
        points.append((f"with limits on the {other.limits.statistic}", other.point))
    points += [("latency-optimal", plan.latency_optimal), ("throughput-optimal", plan.throughput_optimal)]
    if other is not None:
        needed = (
            f"{other.systems} system{'' if other.systems == 1 else 's'}, {plan.systems}"
            if answer.demand
            else f"{format_4_digits(other.rate)} requests/s, {format_4_digits(plan.rate)}"
        )
        note = f"limits on the {other.limits.statistic}: {needed} with limits on the {plan.limits.statistic}"
    else:
        opposite = "p95" if plan.limits.statistic == "mean" else "mean"
        note = f"no answer with limits on the {opposite}: {answer.why_no_other}"
    rows = [[name, *_point(point, plan.rate)] for name, point in points]
    return TextTable("points", "Beside each other", rows, ("", *_COLUMNS), _OF_A_SYSTEM, (note,))


def _point(point: OperatingPoint, rate: float) -> list[str]:
    """Return the cells of `_COLUMNS`. rate: the load that systems are counted for"""
    p95 = point.p95.ttft_s if point.p95 else None
    return [
        point.configuration, format_4_digits(point.concurrency), f"{point.rate_of_system:,.2f}", _ms(point.mean.ttft_s),
        _ms(p95), _ms(point.mean.itl_s), _ms(point.mean.e2e_s),
        system_count(rate / point.rate_of_system), str(point.source),
    ]  # fmt: skip


def _memory(answer: SizingAnswer) -> TextTable:
    m, point = answer.memory, answer.plan.point
    assert m is not None, "there is one"
    rows = [
        ("weights", f"{m.weights / GB:.1f} GB"),
        ("keys and values", f"{m.kv_in_use / GB:.1f} GB of {format_4_digits(point.concurrency)} requests half-way, "
                            f"on average; {m.free / GB:.1f} GB more would fit"),
        ("kept back", f"{m.kept_back / GB:.1f} GB, for activations, software and margin"),
        ("there are", f"{m.total / GB:.0f} GB"),
        ("figures", "bytes of weights, and of a token's keys and values, are counted from the model's configuration; "
                    "how many requests are in flight is as sure as the answer; what is kept back is set aside, not "
                    "measured"),
    ]  # fmt: skip
    caption_text = f"{point.devices} x {point.device}; GB are 10^9 bytes"
    return TextTable("memory", "Memory of an instance", rows, more=caption_text)


def _waterfall(answer: SizingAnswer) -> TextTable:
    before, rows, notes = 0.0, [], list[str]()
    for step in answer.waterfall:
        rows.append([system_count(step.systems), "+" + system_count(step.systems - before), step.why])
        before = step.systems
    if answer.plan.shares:
        shares = sorted(answer.plan.shares.items(), key=lambda share: -share[1])
        spent = ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.005)
        notes = [f"an instance's time: {spent}"]
    return TextTable("why", f"Why {answer.plan.systems}", rows, ("systems", "", ""), notes=tuple(notes))


def _configurations(answer: SizingAnswer) -> TextTable:
    rows: list[list[str]] = []
    for offer in answer.table[:_MAX_ROWS]:
        if offer.point is None:
            rows.append([offer.configuration, "", "-", "-", "-", "-", "-", "-", f"breaks {' and '.join(offer.broken)}"])
        else:
            rows.append(_point(offer.point, answer.plan.rate))
    more = len(answer.table) - _MAX_ROWS
    notes = [f"and {more} more: --json has them"] if more > 0 else []
    if len({offer.point.source for offer in answer.table if offer.point}) > 1:
        surely = "" if answer.not_simulated else "; none of these could serve as much as what was simulated"
        notes.append(f"analytic: in closed form, where prompts come together and wait for each other{surely}")
    name, which = "Every configuration", f"the most within the limits; {_OF_A_SYSTEM}"
    return TextTable("configurations", name, rows, _COLUMNS, which, notes)


def _changes(answer: SizingAnswer) -> TextTable:
    rows = []
    for change in answer.changes:
        figure = "-" if change.fractional is None else system_count(change.fractional)
        rows.append([change.what, "-" if change.systems is None else str(change.systems), figure])
    breaks = any(change.systems is None for change in answer.changes)
    notes = ("-: nothing keeps the limits then",) if breaks else ()
    return TextTable("changes", "What would change it", rows, ("", "systems", "by the figures"), notes=notes)


def _follows(answer: SizingAnswer) -> TextTable:
    f = answer.consequences
    a_day = f", {format_count(f.requests_a_day)} a day"
    if f.hours is None:
        a_day = f" at the peak, {format_count(f.requests_a_day)} on a day as busy as the one that was asked for"
    rows = [
        ("requests", f"{format_4_digits(f.rate)} a second{a_day}"),
        ("tokens", f"{format_count(f.tokens_a_day)} a day, in and out"),
        ("users", f"{format_count(f.users)}, with {pluralize(f.requests_each, 'request')} a day each"
                  + (f", in {f.hours:g} hours" if f.hours else "")),
    ]  # fmt: skip
    return TextTable("follows", "What follows", rows, more="from what is bought, but for what is to spare")
