"""Runs `millrace bench sweep`, whose options are in `sweep_options.py`: `--help` imports nothing else."""

from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import click

from millrace.bench.analysis.metrics import compute_metrics
from millrace.bench.client.certify import Certificate, certificate_text, certify, doubts, kept_up
from millrace.bench.client.client_load import ClientHealth
from millrace.bench.report.sweep_page import sweep_page, sweep_plot
from millrace.bench.run.plan import BenchPlan, make_plan, measure
from millrace.bench.run.server_load import Watch
from millrace.bench.run.sweep import (
    Best,
    LevelResult,
    SweepLimits,
    SweepPoint,
    best,
    limiting_factor,
    on_front,
    run_sweep,
    throughput,
)
from millrace.bench.settings import InputSettings, LoadSettings, SessionSettings, TargetSettings
from millrace.cli.bench.foreign_flags import check_pictures, ready_file, reseed, show_and_write
from millrace.cli.bench.progress import Begins, run_with_progress
from millrace.cli.console import pairs, print_json, table
from millrace.cli.options import make_settings
from millrace.errors import ConfigError, MachineError
from millrace.report.png import png

EACH_S = 10.0
RATES = {"tokens/s": "output_tokens_per_s", "requests/s": "requests_per_s"}
NAMES = {"within": "best within limits", "latency": "lowest latency", "throughput": "most {unit}", "knee": "knee"}


def run(
    url: str, by: str, first: float, max_level: float, output: Path | None, as_json: bool, **options: Any
) -> None:  # fmt: skip
    """Run `millrace bench sweep`."""
    _agree(by, first, max_level, options)
    check_pictures(output, as_png := options.pop("as_png"))
    certify_s = options.pop("certify_s")
    if options["duration_s"] is None and options["request_count"] is None:
        options["duration_s"] = EACH_S
    limits = SweepLimits(options.pop("ttft_ms"), options.pop("itl_ms"), int(options.pop("percentile")))
    level = _level(url, by, options)
    limits.check(level(first, 0).target.streams)
    ready_file(output, *([output.with_suffix(".png")] if output and as_png else []))

    async def sweep(begins: Begins) -> tuple[list[SweepPoint], Best | None, Certificate | None]:
        numbers = count()
        points = await run_sweep(
            first, max_level, by == "concurrency", limits, lambda at: _run(level(at, next(numbers)), limits, begins)
        )
        best_points = best(points)
        certified = certify(level(best_points.throughput.level, 0), certify_s) if best_points and certify_s else None
        return points, best_points, await certified if certified else None

    points, best_points, certificate = run_with_progress(sweep, as_json)
    if best_points is None:
        raise MachineError("no request was answered", "one whole answer at least", "ask one level: millrace bench URL")
    efforts = [p.effort for p in points]
    document = {**_document(by, points, best_points, limits, certificate), **certificate_text(certificate, efforts)}
    document["notes"] = doubts(certificate, efforts, f"at {_levels_invalid(points) or 'most'}")

    def write(file: Path) -> list[str]:
        file.write_text(
            sweep_page(url, by, points, best_points, limits, certificate, document["notes"]), encoding="utf-8"
        )
        if as_png:
            file.with_suffix(".png").write_bytes(png(sweep_plot(points)))
        return [file.name]

    show_and_write(lambda: print_json(document) if as_json else _show(document), output, write)


def _levels_invalid(points: list[SweepPoint]) -> str:
    return " and ".join(f"{p.level:g}" for p in points if not p.effort.keeps_up)


def _agree(by: str, first: float, max_level: float, options: dict[str, Any]) -> None:
    if by == "concurrency" and options["concurrency"] is not None:
        raise ConfigError("--concurrency in a sweep of it", "--from and --most", "leave it out")
    if options["request_rate"] is not None:
        raise ConfigError("--request-rate in a sweep", "--by rate --from X --most Y", "leave it out")
    if max_level < first:
        raise ConfigError(f"--most {max_level:g} is below --from {first:g}", "the other way round", "correct them")
    if by == "concurrency" and first != round(first):
        raise ConfigError(f"--from {first:g}", "a whole number of users", "correct it")


def _level(url: str, by: str, options: dict[str, Any]) -> Callable[[float, int], BenchPlan]:
    """Return a function from level and its number to a plan; each level uses new texts, so that prefix caches do not
    speed it up."""
    load = make_settings(LoadSettings, options)

    def plan(level: float, n: int) -> BenchPlan:
        at = replace(load, concurrency=round(level)) if by == "concurrency" else replace(load, request_rate=level)
        at = reseed(at, n)
        return make_plan(
            url,
            make_settings(TargetSettings, options),
            at,
            make_settings(InputSettings, options),
            make_settings(SessionSettings, options),
        )

    return plan


async def _run(plan: BenchPlan, limits: SweepLimits, begins: Begins) -> LevelResult | None:
    async with Watch(plan.target) as watch:
        done = await measure(plan, begins)
    if done.ended == "Ctrl-C":
        return None
    surely = limits.surely_keeps(done.records)
    return LevelResult(
        compute_metrics(done.records), watch.during(done), ClientHealth.from_run(done), surely, done.ended
    )


def _document(
    by: str, points: list[SweepPoint], best_points: Best, limits: SweepLimits, certificate: Certificate | None
) -> dict[str, Any]:  # fmt: skip
    by_level = {p.level: _point(p, certificate) for p in points}
    chosen = {name: getattr(best_points, name) for name in NAMES}
    return {
        "by": by, "limits": limits.description, "limited_by": limiting_factor(points),
        "ranked_by": throughput(points).unit,
        "points": list(by_level.values()), "front": [p.level for p in on_front(points)],
        **{name: None if point is None else by_level[point.level] for name, point in chosen.items()},
    }  # fmt: skip


def _point(p: SweepPoint, certificate: Certificate | None) -> dict[str, Any]:
    names = ("time_to_first_token", "inter_token_latency", "request_latency")
    return {
        "level": p.level, "keeps": p.meets, "surely": p.surely, "verdict": p.verdict, "ended_early": p.ended or None,
        "output_tokens_per_s": p.tokens_per_s, "requests_per_s": p.requests_per_s,
        "output_tokens_per_s_interval": p.metrics.output_tokens_per_s.interval,
        "requests_per_s_interval": p.metrics.requests_per_s.interval,
        "answers": p.metrics.n, "failed": p.metrics.n_failed,
        "server": None if p.server is None else asdict(p.server), "client_cpu_share": p.effort.peak_share,
        "valid": kept_up(certificate, [p.effort]),
        **{
            name: {
                "p50": p.value(name, 50), "p90": p.value(name, 90),
                "intervals": {at: p.interval(name, at) for at in ("p50", "p90")},
            }
            for name in names
        },
    }  # fmt: skip


def _show(document: dict[str, Any]) -> None:
    def ms(p: dict[str, Any], name: str) -> str:
        return "-" if p[name]["p50"] is None else f"{p[name]['p50']:,.1f} / {p[name]['p90']:,.1f}"

    rows = [
        [f"{p['level']:g}", f"{p['output_tokens_per_s']:,.1f}", f"{p['requests_per_s']:,.2f}",
         ms(p, "time_to_first_token"), ms(p, "inter_token_latency"),
         p["verdict"] + (", INVALID" if p["valid"] is False else "")]
        for p in document["points"]
    ]  # fmt: skip
    click.echo()
    table([document["by"], "tokens/s", "requests/s", "TTFT p50 / p90, ms", "ITL p50 / p90, ms", "kept"], rows)
    click.echo(f"  kept: {document['limits']}")
    click.echo()
    unit = document["ranked_by"]
    pairs([(says.format(unit=unit), _level_text(document["by"], unit, document[name])) for name, says in NAMES.items()])
    if document["within"] and document["within"]["surely"] is None:
        click.echo(f"  At {document['within']['level']:g} too few requests were asked to say that it keeps the limits.")
    click.echo(f"  {document['limited_by']}")
    if document["client"]:
        click.echo(f"  client: {document['client']}")
    for sentence in document["notes"]:
        click.echo(f"  {sentence}")


def _level_text(by: str, unit: str, p: dict[str, Any] | None) -> str:
    if p is None:
        return "none"
    rate, latency_ms = p[RATES[unit]], p["request_latency"]["p50"]
    return f"{by} {p['level']:g}: {rate:,.1f} {unit}, {latency_ms:,.1f} ms to completion (p50)"
