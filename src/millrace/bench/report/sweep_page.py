"""A sweep as one offline HTML page: throughput against latency, and a table of all levels."""

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from millrace.bench.client.certify import Certificate
from millrace.bench.run.sweep import Best, SweepLimits, SweepPoint, limiting_factor, on_front, throughput
from millrace.report.page import render
from millrace.report.plots import Axis, Plot


def sweep_plot(points: Sequence[SweepPoint]) -> Markup:
    """Plot throughput against latency, with a line through the Pareto front."""
    answered, by = [p for p in points if p.metrics.n], throughput(points)
    ys = [by.value(p) for p in answered]
    xs = [p.value("request_latency") or 0.0 for p in answered]
    plot = Plot(Axis.over("ms to completion, median", xs), Axis.over(by.unit, ys))
    front = sorted(on_front(points), key=lambda p: p.value("request_latency") or 0.0)
    plot.line([p.value("request_latency") or 0.0 for p in front], [by.value(p) for p in front], 4)
    for p, x, y in zip(answered, xs, ys, strict=True):
        plot.dots([x], [y], 0 if p.meets else 1)
        plot.text(x, y, f"{p.level:g}")
    return plot.svg(f"{by.unit} against latency")


def sweep_page(
    url: str, by: str, points: Sequence[SweepPoint], best_points: Best, limits: SweepLimits,
    certificate: Certificate | None = None, notes: Sequence[str] = (),
) -> str:  # fmt: skip
    unit = throughput(points).unit
    chosen = [
        ("best within limits", best_points.within), ("lowest latency", best_points.latency),
        (f"most {unit}", best_points.throughput), (f"knee: most {unit} for its latency", best_points.knee),
    ]  # fmt: skip
    return render(
        Path(__file__).with_name("sweep_page.html"), url=url, by=by, points=points, chosen=chosen,
        limits=limits.description, limited=limiting_factor(points), has_server=any(p.server for p in points),
        client=certificate, svg=sweep_plot(points), notes=notes, unit=unit, rate=throughput(points).value,
    )  # fmt: skip
