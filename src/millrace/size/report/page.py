"""An answer as one offline HTML page with plots of throughput, TTFT, arrivals, hours, the waterfall and costs."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from markupsafe import Markup

from millrace.report.format_numbers import format_4_digits, format_exact
from millrace.report.page import render
from millrace.report.plots import Axis, Plot
from millrace.size.answer.answer import SizingAnswer
from millrace.size.load.load_forecast import Demand, window_counts
from millrace.size.load.peak_load import poisson_quantile
from millrace.size.performance.operating_point import Limits, OperatingPoint
from millrace.size.question.settings import DemandSettings
from millrace.size.report.answer_json import cut_short, headline, uncertainty_text
from millrace.size.report.answer_tables import tables

_COLOURS, _MAX_BARS, _SPREAD = 5, 400, 4.5
_MARK = 1  # the colour of limits and percentiles


def size_page(answer: SizingAnswer) -> str:
    """Render the page of an answer."""
    return render(
        Path(__file__).with_name("size_page.html"),
        a=answer,
        plan=answer.plan,
        money=answer.money,
        headline=headline(answer),
        band=uncertainty_text(answer),
        cut=cut_short(answer),
        load=answer.demand,
        throughput=throughput_plot(answer),
        ttft=ttft_plot(answer.offers.points, answer.plan.point, answer.plan.limits),
        shown=best_configurations(answer),
        four=format_4_digits,
        tables=list(tables(answer)),
        drawings=_drawings(answer),
    )


def _drawings(answer: SizingAnswer) -> Mapping[str, list[tuple[str, Markup | None]]]:
    """Return captions and plots below each table, by the key of the table."""
    load, money = answer.demand, answer.money
    arrivals = None if load is None else arrivals_plot(answer.question.load, load)
    hours = hours_plot(money.hourly) if money and len(set(money.hourly)) > 1 else None
    return defaultdict(list, {
        "read": [("Arrivals: how many requests come at once, and what is planned for", arrivals)],
        "why": [("Why this number of systems", why_plot(answer))],
        "costs": [("Costs of a year, by how systems are paid for", costs_plot(answer)),
                  ("Hours of a day: instances that each needs", hours)],
    })  # fmt: skip


def best_configurations(answer: SizingAnswer) -> list[str]:
    """Return as many configurations as there are colours, most requests/s within the limits first."""
    return [offer.configuration for offer in answer.table][:_COLOURS]


def throughput_plot(answer: SizingAnswer) -> Markup:
    """Plot requests/s of a system against the time to the last token; dots meet the limits."""
    lines = _by_configuration(answer.offers.computed.points, best_configurations(answer))
    everything = [*(point for line in lines for point in line), answer.plan.point]
    plot = Plot(
        Axis.over("s to the last token, mean", [p.mean.e2e_s for p in everything]),
        Axis.over("requests/s of a system", [p.rate_of_system for p in everything]),
    )
    for kind, line in enumerate(lines):
        plot.line([p.mean.e2e_s for p in line], [p.rate_of_system for p in line], kind)
        within_limits = [p for p in line if not answer.plan.limits.broken(p)]
        plot.dots([p.mean.e2e_s for p in within_limits], [p.rate_of_system for p in within_limits], kind)
    chosen = answer.plan.point
    plot.dots([chosen.mean.e2e_s], [chosen.rate_of_system], 0)
    plot.text(chosen.mean.e2e_s, chosen.rate_of_system, f"chosen: {format_4_digits(chosen.concurrency)} in flight")
    return plot.svg("Requests a second of a system against the time to the last token, a line for each configuration")


def ttft_plot(points: Sequence[OperatingPoint], chosen: OperatingPoint, limits: Limits) -> Markup:
    """Plot TTFT of the chosen configuration against load: the mean, the p95 if known, and the limit."""
    (line,) = _by_configuration([p for p in points if p.source == chosen.source], [chosen.configuration])
    ms = [p.mean.ttft_s * 1e3 for p in line]
    high = [p.p95.ttft_s * 1e3 for p in line if p.p95 is not None]
    limit = [] if limits.ttft_s is None else [limits.ttft_s * 1e3]
    plot = Plot(
        Axis.over("requests/s of an instance", [p.rate for p in line]),
        Axis.over("ms to the first token", [*ms, *high, *limit]),
    )
    plot.line([p.rate for p in line], ms, 0)
    plot.dots([p.rate for p in line], ms, 0)
    if len(high) == len(line):
        plot.line([p.rate for p in line], high, 2)
        plot.text(line[-1].rate * 0.9, high[-1], "p95")
    if limit:
        plot.line([plot.x.low, plot.x.high], limit * 2, _MARK)
        plot.text((plot.x.low + plot.x.high) / 2, limit[0], f"limit on the {limits.statistic}")  # beside the axis' name
    return plot.svg("Time to the first token against requests a second of an instance")


def arrivals_plot(settings: DemandSettings, load: Demand) -> Markup | None:
    """Plot the distribution of requests per window with the percentile; None if only the peak is given."""
    if load.busy is None or not settings.percentile or settings.rate is not None:
        return None
    if load.trace is not None:
        counts = window_counts(load.trace, settings.window_s)
        shares = np.bincount(counts) / len(counts)
        mark = float(np.quantile(counts, settings.percentile / 100, method="higher"))
        xs = np.arange(len(shares))
    else:
        mean = load.busy * settings.burst * settings.window_s / settings.split
        mark = float(poisson_quantile(settings.percentile / 100, mean))
        half = _SPREAD * math.sqrt(mean) + 3
        xs = np.arange(max(0, int(mean - half)), int(max(mean + half, mark)) + 2)
        shares = np.array([math.exp(n * math.log(mean) - mean - math.lgamma(n + 1)) for n in xs])
    whose = f"requests in {settings.window_s:g} s" + (
        f", of each of {settings.split} replicas" if settings.split > 1 else ""
    )
    plot = Plot(Axis(whose, float(xs[0]) - 1, float(xs[-1]) + 1), Axis.over("share of windows, %", list(shares * 100)))
    step = -(-len(xs) // _MAX_BARS)
    for x, share in zip(xs[::step].tolist(), (shares[::step] * 100).tolist(), strict=True):
        plot.box((x - 0.4 * step, 0), (x + 0.4 * step, share), 0, label=f"{x}: {share:.2g} %")
    plot.line([mark, mark], [plot.y.low, plot.y.high], _MARK)
    plot.text(mark, plot.y.high * 0.9, f"{settings.percentile:g} % stay within {format_exact(mark)}")
    return plot.svg("Probability of each number of requests in a window, and the planned percentile")


def hours_plot(hourly: Sequence[int]) -> Markup:
    """Plot the instances that each hour needs."""
    plot = Plot(Axis("hour of the day", 0, len(hourly)), Axis.over("instances", [float(n) for n in hourly]))
    for hour, n in enumerate(hourly):
        plot.box((hour + 0.1, 0), (hour + 0.9, n), 0, label=f"{hour} h: {n}")
    return plot.svg("Instances that each hour of the day needs")


def why_plot(answer: SizingAnswer) -> Markup:
    """Plot the waterfall: what each step adds."""
    steps = answer.waterfall
    names = [str(i) for i in range(1, len(steps) + 1)]
    plot = Plot(
        Axis("step, as above", -0.5, len(steps) - 0.5, names), Axis.over("systems", [step.systems for step in steps])
    )
    before = 0.0
    for i, step in enumerate(steps):
        plot.box((i - 0.4, 0), (i + 0.4, before), 4, 0.45)
        plot.box((i - 0.4, before), (i + 0.4, step.systems), 0, label=f"{step.why}: {step.systems:.2f}")
        plot.text(i - 0.4, step.systems, f"{step.systems:.2f}")
        before = step.systems
    return plot.svg("From what physics allows to the systems that are bought")


def costs_plot(answer: SizingAnswer) -> Markup | None:
    """Plot a year's costs of each option; None if no price is known."""
    m = answer.money
    if m is None or m.cheapest is None:
        return None
    ways = (
        ("bought", m.bought.year if m.bought else None), ("rented always", m.rented.always if m.rented else None),
        ("rented by the hour", m.rented.scaled if m.rented else None),
        ("both", m.hybrid.year if m.hybrid else None), ("by the token", m.by_token),
    )  # fmt: skip
    priced = [(name, value) for name, value in ways if value is not None]
    plot = Plot(
        Axis("", -0.5, len(priced) - 0.5, [name for name, _ in priced]),
        Axis.over(f"thousand {m.currency} a year", [value / 1e3 for _, value in priced]),
    )
    for i, (name, value) in enumerate(priced):
        plot.box((i - 0.3, 0), (i + 0.3, value / 1e3), 0, label=f"{name}: {value:,.0f}")
        plot.text(i - 0.3, value / 1e3, f"{value:,.0f}")
    return plot.svg("Costs of a year, by how systems are paid for")


def _by_configuration(points: Sequence[OperatingPoint], names: Sequence[str]) -> list[list[OperatingPoint]]:
    """Return the points of each configuration, in the order of their rates."""
    return [sorted((p for p in points if p.configuration == name), key=lambda point: point.rate) for name in names]
