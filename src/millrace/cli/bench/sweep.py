"""Runs `millrace bench sweep`, whose options are in `sweep_options.py`: `--help` imports nothing else."""

from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import click

from millrace.bench.analysis.metrics import measured
from millrace.bench.client.certify import Certificate, certificate_text, certify, doubts, kept_up
from millrace.bench.client.client_load import Effort
from millrace.bench.report.sweep_page import sweep_page, sweep_plot
from millrace.bench.run.plan import Plan, measure, planned
from millrace.bench.run.server_load import Watch
from millrace.bench.run.sweep import Best, LevelResult, Point, SweepLimits, best, limited, on_front, swept, throughput
from millrace.bench.settings import InputSettings, LoadSettings, SessionSettings, TargetSettings
from millrace.cli.bench.foreign_flags import check_pictures, ready_file, reseeded, told_and_written
from millrace.cli.bench.progress import Begins, driven
from millrace.cli.console import pairs, print_json, table
from millrace.cli.options import made
from millrace.errors import ConfigError, MachineError
from millrace.report.png import png

EACH_S = 10.0
RATES = {"tokens/s": "output_tokens_per_s", "requests/s": "requests_per_s"}
NAMES = {"within": "best within limits", "latency": "lowest latency", "throughput": "most {unit}", "knee": "knee"}


def run(
    url: str, by: str, first: float, most: float, output: Path | None, as_json: bool, **given: Any
) -> None:  # fmt: skip
    """Run `millrace bench sweep`."""
    _agree(by, first, most, given)
    check_pictures(output, as_png := given.pop("as_png"))
    certify_s = given.pop("certify_s")
    if given["duration_s"] is None and given["request_count"] is None:
        given["duration_s"] = EACH_S
    limits = SweepLimits(given.pop("ttft_ms"), given.pop("itl_ms"), int(given.pop("percentile")))
    level = _level(url, by, given)
    limits.check(level(first, 0).target.streams)
    ready_file(output, *([output.with_suffix(".png")] if output and as_png else []))

    async def sweep(begins: Begins) -> tuple[list[Point], Best | None, Certificate | None]:
        numbers = count()
        points = await swept(
            first, most, by == "concurrency", limits, lambda at: _run(level(at, next(numbers)), limits, begins)
        )
        found = best(points)
        certified = certify(level(found.throughput.level, 0), certify_s) if found and certify_s else None
        return points, found, await certified if certified else None

    points, found, certificate = driven(sweep, as_json)
    if found is None:
        raise MachineError("no request was answered", "one whole answer at least", "ask one level: millrace bench URL")
    efforts = [p.effort for p in points]
    told = {**_told(by, points, found, limits, certificate), **certificate_text(certificate, efforts)}
    told["notes"] = doubts(certificate, efforts, f"at {_levels_invalid(points) or 'most'}")

    def write(file: Path) -> list[str]:
        file.write_text(sweep_page(url, by, points, found, limits, certificate, told["notes"]), encoding="utf-8")
        if as_png:
            file.with_suffix(".png").write_bytes(png(sweep_plot(points)))
        return [file.name]

    told_and_written(lambda: print_json(told) if as_json else _show(told), output, write)


def _levels_invalid(points: list[Point]) -> str:
    return " and ".join(f"{p.level:g}" for p in points if not p.effort.keeps_up)


def _agree(by: str, first: float, most: float, given: dict[str, Any]) -> None:
    if by == "concurrency" and given["concurrency"] is not None:
        raise ConfigError("--concurrency in a sweep of it", "--from and --most", "leave it out")
    if given["request_rate"] is not None:
        raise ConfigError("--request-rate in a sweep", "--by rate --from X --most Y", "leave it out")
    if most < first:
        raise ConfigError(f"--most {most:g} is below --from {first:g}", "the other way round", "correct them")
    if by == "concurrency" and first != round(first):
        raise ConfigError(f"--from {first:g}", "a whole number of users", "correct it")


def _level(url: str, by: str, given: dict[str, Any]) -> Callable[[float, int], Plan]:
    """Of a level, and how many were before: each asks new texts, for what a server remembers of the last would make the
    next seem faster."""
    load = made(LoadSettings, given)

    def plan(level: float, n: int) -> Plan:
        at = replace(load, concurrency=round(level)) if by == "concurrency" else replace(load, request_rate=level)
        at = reseeded(at, n)
        return planned(url, made(TargetSettings, given), at, made(InputSettings, given), made(SessionSettings, given))

    return plan


async def _run(plan: Plan, limits: SweepLimits, begins: Begins) -> LevelResult | None:
    async with Watch(plan.target) as watch:
        done = await measure(plan, begins)
    if done.ended == "Ctrl-C":
        return None
    surely = limits.surely_keeps(done.records)
    return LevelResult(measured(done.records), watch.during(done), Effort.of(done), surely, done.ended)


def _told(
    by: str, points: list[Point], found: Best, limits: SweepLimits, certificate: Certificate | None
) -> dict[str, Any]:  # fmt: skip
    told = {p.level: _point(p, certificate) for p in points}
    chosen = {name: getattr(found, name) for name in NAMES}
    return {
        "by": by, "limits": limits.says, "limited_by": limited(points), "ranked_by": throughput(points).unit,
        "points": list(told.values()), "front": [p.level for p in on_front(points)],
        **{name: None if point is None else told[point.level] for name, point in chosen.items()},
    }  # fmt: skip


def _point(p: Point, certificate: Certificate | None) -> dict[str, Any]:
    names = ("time_to_first_token", "inter_token_latency", "request_latency")
    return {
        "level": p.level, "keeps": p.keeps, "surely": p.surely, "verdict": p.verdict, "ended_early": p.ended or None,
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


def _show(told: dict[str, Any]) -> None:
    def ms(p: dict[str, Any], name: str) -> str:
        return "-" if p[name]["p50"] is None else f"{p[name]['p50']:,.1f} / {p[name]['p90']:,.1f}"

    rows = [
        [f"{p['level']:g}", f"{p['output_tokens_per_s']:,.1f}", f"{p['requests_per_s']:,.2f}",
         ms(p, "time_to_first_token"), ms(p, "inter_token_latency"),
         p["verdict"] + (", INVALID" if p["valid"] is False else "")]
        for p in told["points"]
    ]  # fmt: skip
    click.echo()
    table([told["by"], "tokens/s", "requests/s", "TTFT p50 / p90, ms", "ITL p50 / p90, ms", "kept"], rows)
    click.echo(f"  kept: {told['limits']}")
    click.echo()
    unit = told["ranked_by"]
    pairs([(says.format(unit=unit), _said(told["by"], unit, told[name])) for name, says in NAMES.items()])
    if told["within"] and told["within"]["surely"] is None:
        click.echo(f"  At {told['within']['level']:g} too few requests were asked to say that it keeps the limits.")
    click.echo(f"  {told['limited_by']}")
    if told["client"]:
        click.echo(f"  client: {told['client']}")
    for said in told["notes"]:
        click.echo(f"  {said}")


def _said(by: str, unit: str, p: dict[str, Any] | None) -> str:
    if p is None:
        return "none"
    rate, latency_ms = p[RATES[unit]], p["request_latency"]["p50"]
    return f"{by} {p['level']:g}: {rate:,.1f} {unit}, {latency_ms:,.1f} ms to completion (p50)"
