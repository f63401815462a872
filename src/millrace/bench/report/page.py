"""A run as one offline HTML page: the usual plots, each with a verdict in numbers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from millrace.bench.analysis.intervals import Interval
from millrace.bench.analysis.latency_breakdown import TO_END, TO_FIRST, Waterfall, latency_shares
from millrace.bench.analysis.metrics import good, last_s, latency_ms, ttft_ms
from millrace.bench.client.request_record import BenchRecord
from millrace.bench.report.plot_summaries import fit_line, gaps_by_position, itl_drift, spread_percent, ttft_by_length
from millrace.bench.report.results import RunResult, report
from millrace.bench.run.plan import patterns
from millrace.bench.run.run import TurnRecord
from millrace.report.page import render
from millrace.report.plots import Axis, Plot, downsample
from millrace.report.png import png

_BINS, _POSITIONS, _LANES = 24, 60, 300
_BOX = (5, 25, 50, 75, 95)


def bench_page(result: RunResult) -> str:
    """Render the page of a run."""
    return render(Path(__file__).with_name("bench_page.html"), report=report(result), plots=plots_of(result))


def plots_of(result: RunResult) -> list[dict[str, Any]]:
    """Return all plots in order, each with `title`, `svg` and `verdict`."""
    records, answers = result.run.records, good(result.run.records)
    plots = [
        lengths(answers), ttft(answers), positions(answers), *boxes(records), waterfall(result.waterfall),
        timeline(result),
    ]  # fmt: skip
    return [p for p in plots if p is not None]


def pictures(result: RunResult) -> dict[str, bytes]:
    """Return the plots as PNG, by file name."""
    return {f"{p['title'].lower().replace(' ', '-')}.png": png(p["svg"]) for p in plots_of(result)}


def _plot_entry(title: str, svg: Markup, verdict: str) -> dict[str, Any]:
    return {"title": title, "svg": svg, "verdict": verdict}


def lengths(answers: Sequence[BenchRecord]) -> dict[str, Any] | None:
    """Plot input against output lengths as a heat map."""
    x = np.array([a.n_prompt for a in answers if a.n_prompt is not None], dtype=np.float64)
    y = np.array([a.n_output for a in answers if a.n_prompt is not None], dtype=np.float64)
    if not x.size:
        return None
    across, up = Axis.over("input tokens", x.tolist()), Axis.over("output tokens", y.tolist())
    counts, x_edges, y_edges = np.histogram2d(x, y, _BINS, [(across.low, across.high), (up.low, up.high)])
    plot = Plot(across, up)
    for i, j in np.argwhere(counts > 0):
        n = counts[i, j]
        label = (
            f"{n:.0f} requests of {x_edges[i]:.0f} to {x_edges[i + 1]:.0f} and {y_edges[j]:.0f} to {y_edges[j + 1]:.0f}"
        )
        plot.box((x_edges[i], y_edges[j]), (x_edges[i + 1], y_edges[j + 1]), 0, 0.15 + 0.85 * n / counts.max(), label)
    verdict = f"{x.size} answers: {_middle(x)} input tokens, {_middle(y)} output tokens."
    return _plot_entry("Input and output lengths", plot.svg("histogram of input and output lengths"), verdict)


def _middle(values: "np.ndarray[Any, np.dtype[np.float64]]") -> str:
    low, middle, high = np.percentile(values, (5, 50, 95))
    return f"{middle:,.0f} (5 % to 95 %: {low:,.0f} to {high:,.0f})"


def ttft(answers: Sequence[BenchRecord]) -> dict[str, Any] | None:
    points = [(float(a.n_prompt), t) for a in answers if a.n_prompt is not None and (t := ttft_ms(a)) is not None]
    if not points:
        return None
    xs, ys = [x for x, _ in points], [y for _, y in points]
    plot = Plot(Axis.over("input tokens", xs), Axis.over("ms to the first token", ys))
    plot.dots(xs, ys)
    fit = ttft_by_length(answers)
    if fit is None:
        verdict = "Prompts are all of one length: no slope."
    else:
        ends = np.clip([fit.start + fit.slope * x for x in (min(xs), max(xs))], plot.y.low, plot.y.high)
        plot.line([min(xs), max(xs)], ends.tolist(), 1)
        verdict = f"{1e3 * fit.slope:+.1f} ms per 1,000 input tokens{_interval(fit.interval, 1e3)}."
    return _plot_entry(
        "Time to first token against input length", plot.svg("time to first token by input length"), verdict
    )


def positions(answers: Sequence[BenchRecord]) -> dict[str, Any] | None:
    at, gaps = gaps_by_position(answers)
    if at.size < 2:
        return None
    edges = np.linspace(at.min(), at.max() + 1, min(_POSITIONS, int(at.max() - at.min()) + 1) + 1)
    which = np.digitize(at, edges) - 1
    centres = [(edges[i] + edges[i + 1]) / 2 for i in np.unique(which)]
    middle = [float(np.median(gaps[which == i])) for i in np.unique(which)]
    high = [float(np.percentile(gaps[which == i], 90)) for i in np.unique(which)]
    plot = Plot(
        Axis.over("output token", centres), Axis.over("ms a token: median, and 90th percentile above", high + middle)
    )
    plot.line(centres, high, 1)
    plot.line(centres, middle, 0)
    drift = itl_drift(answers)
    verdict = "Answers are too short for a drift." if drift is None else (
        f"A token of an answer's second half takes {drift.percent:+.1f} % longer than one of its first half"
        f"{_interval(drift.interval)}."
    )  # fmt: skip
    return _plot_entry("Inter-token latency along the answer", plot.svg("time between tokens by position"), verdict)


def boxes(records: Sequence[TurnRecord]) -> list[dict[str, Any] | None]:
    """Plot boxes of completion time and TTFT, one for each pattern of a mix."""
    parts = patterns(records) or {"all": list(records)}
    return [
        _boxes("Time to completion", {k: [latency_ms(a) for a in good(v)] for k, v in parts.items()}),
        _boxes(
            "Time to first token", {k: [t for t in map(ttft_ms, good(v)) if t is not None] for k, v in parts.items()}
        ),
    ]


def _boxes(title: str, values: dict[str, list[float]]) -> dict[str, Any] | None:
    values = {name: samples for name, samples in values.items() if samples}
    if not values:
        return None
    flat = [v for samples in values.values() for v in samples]
    plot = Plot(Axis.over("ms", flat), Axis("", -0.6, len(values) - 0.4, list(values)), height=90 + 50 * len(values))
    for i, samples in enumerate(values.values()):
        p5, p25, p50, p75, p95 = np.percentile(samples, _BOX).tolist()
        plot.line([p5, p95], [i, i], 4)
        plot.box((p25, i - 0.28), (p75, i + 0.28), 0, 0.8, f"25 % to 75 %: {p25:,.1f} to {p75:,.1f} ms")
        plot.line([p50, p50], [i - 0.28, i + 0.28], 1)
        plot.dots([max(samples)], [float(i)], 1)
    spreads = (
        f"{spread_percent(samples) or 0:.0f} % of the median" + f" ({n})" * (len(values) > 1)
        for n, samples in values.items()
    )
    verdict = (
        f"From the 10th to the 90th percentile: {', '.join(spreads)}. Whiskers 5 % and 95 %, the dot is the slowest."
    )
    return _plot_entry(title, plot.svg(f"box plot: {title}"), verdict)


def waterfall(breakdown: Waterfall | None) -> dict[str, Any] | None:
    """Plot the stages to the first token, of typical and of the slowest requests."""
    slow = None if breakdown is None else latency_shares(breakdown.to_first, TO_FIRST)
    if breakdown is None or slow is None:
        return None
    lanes = {"the slowest": slow.slow, "usual": slow.usual}
    plot = Plot(
        Axis.over("ms to the first token", [sum(means.values()) for means in lanes.values()]),
        Axis("", -0.6, len(lanes) - 0.4, list(lanes)), height=190,
    )  # fmt: skip
    for lane, means in enumerate(lanes.values()):
        begin = 0.0
        for kind, (stage, ms) in enumerate(means.items()):
            plot.box((begin, lane - 0.3), (begin + ms, lane + 0.3), kind, label=f"{stage}: {ms:,.1f} ms")
            begin += ms
    last = latency_shares(breakdown.to_end, TO_END)
    stages = ", ".join(f"{stage} {slow.slow[stage]:,.1f} ms (usually {slow.usual[stage]:,.1f})" for stage in TO_FIRST)
    verdict = f"To the first token {slow.description}: {stages}." + (
        "" if last is None else f" To its end {last.description}."
    )
    return _plot_entry("Where the time went", plot.svg("stages of the usual and of the slowest requests"), verdict)


def timeline(result: RunResult) -> dict[str, Any] | None:
    """Plot each request as a line: delay in the client, time to first token, decoding; failures end in a dot."""
    records = some_records(sorted(result.run.records, key=lambda r: r.answer.sent_s))
    if not records:
        return None
    start_s = result.run.started_s
    ends = [max(last_s(r.answer), r.answer.end_s) - start_s for r in records]
    plot = Plot(Axis.over("seconds", ends), Axis("request", -1, len(records)), height=min(900, 90 + 3 * len(records)))
    for lane, record in enumerate(records):
        a, end_s = record.answer, max(last_s(record.answer), record.answer.end_s)
        first_s = a.chunk_s[0] if a.chunk_s else end_s
        for kind, begin, end in ((4, a.intended_s, a.sent_s), (1, a.sent_s, first_s), (0, first_s, end_s)):
            if end > begin:
                plot.box((max(begin - start_s, 0), lane - 0.4), (end - start_s, lane + 0.4), kind)
        if a.failure is not None:
            plot.dots([end_s - start_s], [float(lane)], 1)
    shown = (
        "" if len(records) == len(result.run.records) else f" {len(records)} of {len(result.run.records)} are drawn."
    )
    verdict = (
        f"{_later_is_slower(result)} Orange waits for its first token, blue is being answered, grey waited here.{shown}"
    )
    return _plot_entry("Timeline", plot.svg("timeline of requests"), verdict)


def _later_is_slower(result: RunResult) -> str:
    answers = good(result.run.records)
    x = np.array([a.sent_s - result.run.started_s for a in answers], dtype=np.float64)
    fit = fit_line(x, np.array([latency_ms(a) for a in answers]))
    if fit is None:
        return ""
    return f"Latency grows by {fit.slope:+.2f} ms with each second of the run{_interval(fit.interval)}."


def some_records(records: Sequence[TurnRecord]) -> list[TurnRecord]:
    chosen = downsample([float(i) for i in range(len(records))], _LANES)
    return [records[int(i)] for i in chosen]


def _interval(interval: Interval | None, times: float = 1.0) -> str:
    return "" if interval is None else f" (95 %: {times * interval[0]:+.1f} to {times * interval[1]:+.1f})"
