"""The answer of `millrace size` on a screen."""

from collections.abc import Sequence

import click

from millrace.cli.screen import count, heading, pairs, table
from millrace.cli.size_money import show_devices, show_money
from millrace.machine.devices import GB
from millrace.size.answer import Answer
from millrace.size.fleet import Shared
from millrace.size.planning import Plan
from millrace.size.points import Point
from millrace.size.told import band, cut_short, headline, read_as

_MOST_ROWS = 12


def show(answer: Answer) -> None:
    plan, h = answer.plan, answer.question.hardware
    heading(headline(answer))
    systems = f"{_few(plan.fractional)} by the figures, {plan.systems} to buy; " if answer.demand else ""
    pairs([
        ("systems", systems + _bought(h.utilisation, h.spare)),
        ("instances", f"{answer.instances} of {plan.point.parallel} ({plan.point.precision}), "
                      f"{plan.point.concurrency:.4g} requests in flight in each"),
        ("a system serves", f"{plan.point.rate_of_system:.4g} requests/s, of {plan.rate:.4g}"),
        ("what binds", plan.binding),
        ("figures", band(answer)),
        ("from", plan.provenance),
    ])  # fmt: skip
    if answer.not_simulated:
        click.echo(f"  {cut_short(answer)}")
    for one in answer.there:
        click.echo(
            f"  there are {one.systems} of {one.device}, which serve {one.rate:.4g} requests/s within the limits"
        )
    _part("What users wait for", "limits are on the " + plan.limits.of)
    _waits(plan)
    _part("Beside each other", "requests/s are of a system; times in ms")
    _points(answer)
    _part("How the question was read")
    _lines(read_as(answer))
    _memory(answer)
    _why(answer)
    _configurations(answer)
    _changes(answer)
    _follows(answer)
    show_devices(answer)
    show_money(answer)


def _part(name: str, more: str = "") -> None:
    click.echo()
    heading(name + (f" ({more})" if more else ""))


def _lines(lines: Sequence[str]) -> None:
    for line in lines:
        click.echo(f"  {line}")


def _bought(utilisation: float, spare: int) -> str:
    return f"planned with {utilisation:.0%} of what they can, {spare or 'none'} to spare"


def _waits(plan: Plan) -> None:
    point, limits = plan.point, plan.limits
    p99 = point.sampled.p99 if point.sampled else None
    rows = [
        [name, *(_ms(getattr(waits, field) if waits else None) for waits in (point.mean, point.p95, p99)),
         _ms(getattr(limits, field))]
        for name, field in (("TTFT, ms", "ttft_s"), ("ITL, ms", "itl_s"), ("E2E, ms", "e2e_s"))
    ]  # fmt: skip
    table(["", "mean", "p95", "p99", "limit"], rows)
    if point.sampled is not None:
        s = point.sampled
        mean, p95 = s.mean_within.ttft_s * 1e3, s.p95_within.ttft_s * 1e3
        click.echo(f"  simulated: {s.counted} requests, after {s.dropped} that were dropped")
        click.echo(f"  intervals of 95 %: mean TTFT +-{mean:.1f} ms, p95 +-{p95:.1f} ms")


def _few(systems: float) -> str:
    """Of less than a tenth, what can be told apart."""
    return f"{systems:.2f}" if not 0 < systems < 0.1 else f"{systems:.2g}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.1f}"


def _points(answer: Answer) -> None:
    plan, other = answer.plan, answer.other
    rows = [("chosen", plan.point)]
    if answer.operating != plan.point:
        rows.append(("at this load", answer.operating))
    if other is not None:
        rows.append((f"with limits on the {other.limits.of}", other.point))
    rows += [("latency-optimal", plan.latency_optimal), ("throughput-optimal", plan.throughput_optimal)]
    table(
        ["", "configuration", "in flight", "requests/s", "TTFT", "p95", "ITL", "E2E", "systems", "figures"],
        [[name, *_point(point), _few(plan.rate / point.rate_of_system), point.source] for name, point in rows],
    )
    if other is not None:
        needed = (
            f"{other.systems} system{'' if other.systems == 1 else 's'}, {plan.systems}"
            if answer.demand
            else f"{other.rate:.4g} requests/s, {plan.rate:.4g}"
        )
        click.echo(f"  limits on the {other.limits.of}: {needed} with limits on the {plan.limits.of}")
    else:
        of = "p95" if plan.limits.of == "mean" else "mean"
        click.echo(f"  no answer with limits on the {of}: {answer.why_no_other}")


def _point(point: Point) -> list[str]:
    p95 = point.p95.ttft_s if point.p95 else None
    return [
        point.configuration, f"{point.concurrency:.4g}", f"{point.rate_of_system:,.2f}", _ms(point.mean.ttft_s),
        _ms(p95), _ms(point.mean.itl_s), _ms(point.mean.e2e_s),
    ]  # fmt: skip


def _memory(answer: Answer) -> None:
    m = answer.memory
    if m is None:
        return
    n, device = answer.plan.point.devices, answer.plan.point.device
    _part("Memory of an instance", f"{n} x {device}; GB are 10^9 bytes")
    pairs([
        ("weights", f"{m.weights / GB:.1f} GB"),
        ("keys and values", f"{m.held / GB:.1f} GB of {answer.plan.point.concurrency:.4g} requests half-way; "
                            f"{m.free / GB:.1f} GB more would fit"),
        ("kept back", f"{m.kept_back / GB:.1f} GB, for activations, software and margin"),
        ("there are", f"{m.total / GB:.0f} GB"),
    ])  # fmt: skip


def _why(answer: Answer) -> None:
    if answer.demand is None:
        return
    _part(f"Why {answer.plan.systems}")
    before, rows = 0.0, []
    for step in answer.why:
        more = step.systems - before
        rows.append([_few(step.systems), "+" + _few(more), step.why])
        before = step.systems
    table(["systems", "", ""], rows)
    if answer.plan.shares:
        shares = sorted(answer.plan.shares.items(), key=lambda share: -share[1])
        click.echo(
            "  an instance's time: " + ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.005)
        )


def _configurations(answer: Answer) -> None:
    _part("Every configuration within the limits", "requests/s are of a system; times in ms")
    rows = []
    for offer in answer.table[:_MOST_ROWS]:
        if offer.point is None:
            rows.append([offer.configuration, "", "-", "-", "-", "-", "-", "-", f"breaks {' and '.join(offer.broken)}"])
        else:
            systems = answer.plan.rate / offer.point.rate_of_system
            rows.append([*_point(offer.point), _few(systems), offer.point.source])
    table(["configuration", "in flight", "requests/s", "TTFT", "p95", "ITL", "E2E", "systems", "figures"], rows)
    if len(answer.table) > _MOST_ROWS:
        click.echo(f"  and {len(answer.table) - _MOST_ROWS} more: --json has them")


def _changes(answer: Answer) -> None:
    if not answer.changes:
        return
    _part("What would change it")
    rows = []
    for change in answer.changes:
        figure = "-" if change.fractional is None else _few(change.fractional)
        rows.append([change.what, "-" if change.systems is None else str(change.systems), figure])
    table(["", "systems", "by the figures"], rows)
    if any(change.systems is None for change in answer.changes):
        click.echo("  -: nothing keeps the limits then")


def _follows(answer: Answer) -> None:
    f = answer.follows
    _part("What follows", "from what is bought, but for what is to spare")
    like = "as busy as the one that was asked for"
    pairs([
        ("requests", f"{f.rate:,.4g} a second" + (f", {count(f.requests_a_day)} a day" if f.hours else
                     f" at the peak, {count(f.requests_a_day)} on a day {like}")),
        ("tokens", f"{count(f.tokens_a_day)} a day, in and out"),
        ("users", f"{count(f.users)}, with {f.requests_each:g} requests a day each" +
                  (f", in {f.hours:g} hours" if f.hours else "")),
    ])  # fmt: skip


def show_shared(together: Shared) -> None:
    _part("Together", "all peaks at once")
    pairs([
        ("systems", f"{together.systems} for all models, of {together.device}; {together.apart} were each by itself"),
        ("devices", f"{together.devices} are needed"),
    ])  # fmt: skip
