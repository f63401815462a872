"""Runs `millrace bench compare`, whose options are in `compare_options.py`: `--help` imports nothing else."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from millrace.bench.analysis.compare import (
    ComparedRun,
    Difference,
    SavedResult,
    compare_answers,
    compare_rounds,
    more_failures,
    only_one_has,
    read_result,
    run_interleaved,
)
from millrace.bench.analysis.compare_goodput import GoodputDifference, compare_goodput_results, compare_goodput_rounds
from millrace.bench.analysis.goodput import GoodputLimits, check_limits, parse_limits
from millrace.bench.client.certify import Certificate, certificate_text, certify, doubts
from millrace.bench.run.plan import BenchPlan, check_server, make_plan, measure
from millrace.bench.settings import InputSettings, LoadSettings, SessionSettings, TargetSettings
from millrace.cli.bench.foreign_flags import reseed
from millrace.cli.bench.progress import Begins, run_with_progress
from millrace.cli.console import print_json, table
from millrace.cli.options import make_settings
from millrace.env import Env
from millrace.errors import ConfigError, MachineError

WORSE = 3  # exit code for CI


@dataclass(frozen=True, slots=True)
class CompareBounds:
    """Criteria of a comparison. limits: for goodput; allow: percent by which B may be worse, percentage points of
    shares"""

    limits: list[GoodputLimits]
    allow: float


def run(
    env: Env,
    /,
    a: str | None,
    b: str | None,
    engines: tuple[str, ...],
    rounds: int,
    allow: float,
    goodput: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> int:
    """Run `millrace bench compare`."""
    bounds = CompareBounds(parse_limits(goodput), allow)
    if engines:
        if a is not None or len(engines) != 2:
            raise ConfigError(f"{len(engines)} engines", "--engine A --engine B, and no URL", "name two")
        from millrace.cli.bench.engine import compared_engines  # what runs engines takes a second to import

        report = _rounds_report(compared_engines((engines[0], engines[1]), options, rounds, env, as_json), bounds, None)
    elif a is None or b is None:
        raise ConfigError("there are not two to compare", "A and B: URLs or results; or --engine twice", "name both")
    else:
        report = _compare(a, b, rounds, bounds, as_json, options)
    if not report["metrics"]:
        raise MachineError("nothing can be compared", "whole answers of both", "see what each says by itself")
    print_json(report) if as_json else _show(report)
    return WORSE if report["worse"] else 0


def _compare(
    a: str, b: str, rounds: int, bounds: CompareBounds, quiet: bool, options: dict[str, Any]
) -> dict[str, Any]:
    """Compare two URLs or two results."""
    are_files = [Path(x).exists() for x in (a, b)]
    if are_files[0] != are_files[1]:
        raise ConfigError(
            f"{a} and {b}: one is a file, one is none", "two URLs, or two results", "compare like with like"
        )
    if all(are_files):
        return _results_report((read_result(Path(a)), read_result(Path(b))), bounds)
    certify_s, plans = options.pop("certify_s"), (_plans(a, options), _plans(b, options))
    check_limits(bounds.limits, plans[0](0).target.streams)

    async def compared(begins: Begins) -> tuple[Certificate | None, tuple[ComparedRun, ComparedRun]]:
        words, _ = [await check_server(plan(0)) for plan in plans]  # both answer, and are asked the same
        certificate = await certify(plans[0](0), certify_s) if certify_s else None
        return certificate, await run_interleaved(*plans, rounds, begins, lambda plan, on: measure(plan, on, words))

    certificate, sides = run_with_progress(compared, quiet)
    return _rounds_report(sides, bounds, certificate)


def _plans(url: str, options: dict[str, Any]) -> Any:
    load = make_settings(LoadSettings, options)

    def plan(round_: int) -> BenchPlan:
        return make_plan(
            url, make_settings(TargetSettings, options), reseed(load, round_), make_settings(InputSettings, options),
            make_settings(SessionSettings, options),
        )  # fmt: skip

    return plan


def _rounds_report(
    sides: tuple[ComparedRun, ComparedRun], bounds: CompareBounds, certificate: Certificate | None
) -> dict[str, Any]:
    ended = [run.ended for side in sides for run in side.runs if run.ended]
    efforts = [effort for side in sides for effort in side.efforts]
    proved = certificate_text(certificate, efforts)
    notes = doubts(certificate, efforts, "in a round")
    if ended:
        notes.append(f"The comparison ended early: {ended[0]}.")
    satisfied = [compare_goodput_rounds(*sides, limits) for limits in bounds.limits]
    report = _report(compare_rounds(*sides), satisfied, bounds.allow, sides, notes)
    return {**report, "ended_early": ended[0] if ended else None, **proved}


def _results_report(sides: tuple[SavedResult, SavedResult], bounds: CompareBounds) -> dict[str, Any]:
    """Report on saved results; the validity of their clients was determined when they were measured."""
    valid = [side.valid for side in sides]
    notes = [
        f"INVALID: the client of {name} did not keep up when it was measured; measure it again with less load."
        for name, is_valid in zip("AB", valid, strict=True) if is_valid is False
    ]  # fmt: skip
    satisfied = [compare_goodput_results(*sides, limits) for limits in bounds.limits]
    report = _report(compare_answers(sides[0].answers, sides[1].answers), satisfied, bounds.allow, sides, notes)
    both = None if None in valid else True
    return {
        **report, "ended_early": None, "valid": False if False in valid else both,
        "client": None, "client_cpu_share": None,
    }  # fmt: skip


def _report(
    differences: list[Difference], satisfied: list[GoodputDifference | None], allow: float,
    sides: tuple[ComparedRun, ComparedRun] | tuple[SavedResult, SavedResult], notes: list[str],
) -> dict[str, Any]:  # fmt: skip
    """Create the report; more failures and lower goodput also count as worse."""
    a, b = sides
    failed, requests = (a.n_failed, b.n_failed), (a.n, b.n)
    alone = only_one_has(a.answers, b.answers)
    notes += [f"Only {name} has {metric}: it is not compared." for metric, name in alone.items()]
    shares = [share for share in satisfied if share is not None]
    worse = [d.name for d in differences if d.is_worse_by(allow)]
    worse += [f"goodput ({share.limits})" for share in shares if share.is_worse_by(allow)]
    return {
        "metrics": [{**asdict(d), "verdict": d.verdict} for d in differences],
        "goodput": [{**asdict(share), "verdict": share.verdict} for share in shares],
        "failed": failed, "requests": requests, "worse": worse + ["failures"] * more_failures(failed, requests),
        "allowed_percent": allow, "only_one_has": alone, "notes": notes,
    }  # fmt: skip


def _show(report: dict[str, Any]) -> None:
    rows = [
        [d["name"], f"{d['a']:,.2f}", f"{d['b']:,.2f}", f"{d['percent']:+.1f} %", _interval(d["interval"]),
         "-" if d["visible"] is None else f"{d['visible']:.1f} %", d["verdict"]]
        for d in report["metrics"]
    ]  # fmt: skip
    click.echo()
    table(["", "A", "B", "B over A", "95 %", "visible", "B is"], rows)
    click.echo("  visible: what would have been seen four times out of five")
    for row in report["goodput"]:
        low, high = row["interval"]
        click.echo(
            f"  {row['limits']}: {row['a']:.1%} of A's requests, {row['b']:.1%} of B's "
            f"[{row['of_b'][0]:.1%}, {row['of_b'][1]:.1%}]; {row['points']:+.1f} points ({low:+.1f} to {high:+.1f}): "
            f"{row['verdict']}"
        )
    if report["client"]:
        click.echo(f"  client: {report['client']}")
    for sentence in report["notes"]:
        click.echo(f"  {sentence}")
    if any(report["failed"]):
        table_rows = [
            f"{n} of {name}'s {all_}" for name, n, all_ in zip("AB", report["failed"], report["requests"], strict=True)
        ]
        click.echo(f"  Failed requests: {', '.join(table_rows)}.")
    if report["worse"]:
        click.echo(f"  B is worse by more than {report['allowed_percent']:g} %: {', '.join(report['worse'])}.")


def _interval(interval: tuple[float, float] | None) -> str:
    return "too few rounds" if interval is None else f"{interval[0]:+.1f} to {interval[1]:+.1f} %"
