"""Results of `bench infer` as JSON, perf_analyzer's CSV and an HTML page."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from markupsafe import Markup

from millrace.bench.client.certify import Certificate, doubts, kept_up
from millrace.bench.infer.latency_curves import SCHEMA, LatencyCurve, curves_of, labels
from millrace.bench.infer.measure import InferResults, LevelMeasurement
from millrace.bench.report.results import DEFINITIONS
from millrace.report.page import render
from millrace.report.plots import Axis, Plot
from millrace.report.png import png

LATENCY, PICTURE = "request_latency", "inferences.png"
_PERCENTILES = (50, 90, 95, 99)
_KINDS = 5  # colours of the style sheet


def report(result: InferResults) -> dict[str, Any]:
    """Convert results to JSON data. Times in ms."""
    model = asdict(result.model)
    return {
        "schema": SCHEMA, "url": result.target.url, "protocol": result.target.protocol, "model": model,
        "definitions": {
            "inferences_per_s": "items of whole answers, from the first sending to the last answer or failure",
            "latency_ms": DEFINITIONS[LATENCY][1] + ", of a request with its whole batch",
            "server": "means of the server's own statistics, for each request",
        },
        "valid": result.valid, "ended_early": result.ended or None,
        "certificate": None if result.certificate is None else {
            **asdict(result.certificate), "holds": result.certificate.holds,
        },
        "points": [_point(p, result.certificate) for p in result.points], "verdict": verdict(result.points),
        "notes": notes(result),
    }  # fmt: skip


def _point(p: LevelMeasurement, certificate: Certificate | None) -> dict[str, Any]:
    stats = p.metrics.of_requests.get(LATENCY)
    latency = None if stats is None else {
        "mean": stats.mean, "std": stats.std, "min": stats.min, "max": stats.max,
        **{f"p{n}": stats.percentiles[n] for n in _PERCENTILES}, "intervals": stats.intervals,
    }  # fmt: skip
    rate = p.metrics.output_tokens_per_s
    return {
        "batch_size": p.level.batch, "concurrency": p.level.concurrency, "request_rate": p.level.rate,
        "inferences_per_s": {"value": rate.value, "interval": rate.interval},
        "requests": {"whole": p.metrics.n, "failed": p.metrics.n_failed, "by_failure": p.metrics.failures},
        "latency_ms": latency, "server": None if p.server is None else asdict(p.server),
        "client_cpu_share": p.effort.peak_share, "valid": kept_up(certificate, [p.effort]),
    }  # fmt: skip


def with_answers(points: Sequence[LevelMeasurement]) -> list[LevelMeasurement]:
    return [p for p in points if p.metrics.n]


def latency_ms(p: LevelMeasurement, percentile: int = 50) -> float:
    return p.metrics.of_requests[LATENCY].percentiles[percentile]


def rate(p: LevelMeasurement) -> float:
    return p.metrics.output_tokens_per_s.value


def verdict(points: Sequence[LevelMeasurement]) -> str:
    """Summarise the plot in a sentence: the highest throughput and the lowest latency."""
    usable = with_answers(points)
    if not usable:
        return "No request was answered."
    most, quickest = max(usable, key=rate), min(usable, key=latency_ms)
    sentences = [
        f"Most: {rate(most):,.1f} inferences/s at {most.level.description}, p50 {latency_ms(most):,.2f} ms.",
        f"Quickest: p50 {latency_ms(quickest):,.2f} ms at {quickest.level.description}, "
        f"{rate(quickest):,.1f} inferences/s.",
    ]
    if most is not quickest:
        sentences.append(
            f"The first has {rate(most) / rate(quickest):.2f} times the inferences of the second at "
            f"{latency_ms(most) / latency_ms(quickest):.2f} times its latency."
        )
    return " ".join(sentences)


def notes(result: InferResults) -> list[str]:
    sentences = [f"It ended early: {result.ended}."] if result.ended else []
    slow = [p.level.description for p in result.points if not p.effort.keeps_up]
    sentences += doubts(result.certificate, [p.effort for p in result.points], f"at {'; '.join(slow) or 'most'}")
    failed = {kind: n for p in result.points for kind, n in p.metrics.failures.items()}
    if failed:
        total = sum(p.metrics.n_failed for p in result.points)
        sentences.append(
            f"{total} requests failed ({', '.join(failed)}); they are in no latency, and in rates by their time alone."
        )
    if result.points and all(p.server is None for p in result.points):
        sentences.append("The server tells no statistics of its own: what is queue and what is computing is not known.")
    return sentences


def write_results(
    folder: Path, result: InferResults, with_picture: bool = False, earlier_curves: Sequence[LatencyCurve] = ()
) -> list[str]:
    """Create the folder, write all files and return their names. with_picture: the plot as PNG. raises OSError"""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"report.html": infer_page(result, earlier_curves), "summary.json": json.dumps(report(result), indent=2)}
    for size in sorted({p.level.batch for p in result.points}):
        text = perf_analyzer_csv([p for p in result.points if p.level.batch == size])
        if text:
            files[f"perf_analyzer_b{size}.csv"] = text
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8", newline="")
    svg = plot([*curves_of(report(result)), *earlier_curves]) if with_picture else None
    if svg is None:
        return list(files)
    (folder / PICTURE).write_bytes(png(svg))
    return [*files, PICTURE]


def perf_analyzer_csv(points: Sequence[LevelMeasurement]) -> str:
    """Format results like `perf_analyzer -f`, in microseconds.

    Send time is not measured separately and is part of the network column. Without server statistics their columns are
    left out, as in perf_analyzer.
    """
    usable = with_answers(points)
    if not usable:
        return ""
    stages = ("queue", "compute_input", "compute_infer", "compute_output")
    has_server_times = all(p.server is not None for p in usable)
    names = ["Server Queue", "Server Compute Input", "Server Compute Infer", "Server Compute Output"]
    rows: list[list[Any]] = [[
        "Concurrency" if usable[0].level.concurrency else "Request Rate", "Inferences/Second", "Client Send",
        *(["Network+Server Send/Recv", *names] if has_server_times else []), "Client Recv",
        *(f"p{n} latency" for n in _PERCENTILES),
    ]]  # fmt: skip
    for p in usable:
        server = []
        if has_server_times and p.server is not None:
            times = [round(1e3 * p.server.stages_ms[name]) for name in stages]
            mean_us = round(1e3 * p.metrics.of_requests[LATENCY].mean)
            server = [max(0, mean_us - sum(times)), *times]
        percentiles = [round(1e3 * latency_ms(p, n)) for n in _PERCENTILES]
        level = p.level.concurrency or f"{p.level.rate:g}"
        rows.append([level, f"{rate(p):.6g}", 0, *server, 0, *percentiles])
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def infer_page(result: InferResults, earlier_curves: Sequence[LatencyCurve] = ()) -> str:
    """Render the page. earlier_curves: of earlier results, drawn behind this one's"""
    document = report(result)
    lines = [*curves_of(document), *earlier_curves]
    return render(
        Path(__file__).with_name("infer_page.html"), report=document, model=result.model, svg=plot(lines),
        key=[(i % _KINDS, label) for i, label in enumerate(labels(lines))],
    )  # fmt: skip


def plot(lines: Sequence[LatencyCurve]) -> Markup | None:
    """Plot inferences/s against latency, with the load at each dot."""
    dots = [dot for line in lines for dot in line.dots]
    if not dots:
        return None
    figure = Plot(
        Axis.over("ms a request, median", [dot.median_ms for dot in dots]),
        Axis.over("inferences/s", [dot.rate for dot in dots]),
    )
    for i, line in enumerate(lines):
        xs, ys = [dot.median_ms for dot in line.dots], [dot.rate for dot in line.dots]
        if len(line.dots) > 1:
            figure.line(xs, ys, i % _KINDS)
        figure.dots(xs, ys, i % _KINDS)
        for dot in line.dots:
            figure.text(dot.median_ms, dot.rate, dot.load)
    return figure.svg("inferences a second against latency, by batch size and instances")
