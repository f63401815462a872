"""Runs `millrace bench`, whose options are in `options.py`: `--help` imports nothing else."""

import asyncio
from pathlib import Path
from typing import Any

import click
import uvloop

from millrace.bench.analysis.goodput import check_limits, parse_limits
from millrace.bench.analysis.latency_breakdown import TO_END, Waterfall, fetch_traces, join_client_server_traces
from millrace.bench.analysis.metrics import good
from millrace.bench.client.certify import Certificate, certify
from millrace.bench.report.exports import NAMES, write_results
from millrace.bench.report.results import RunResult, report
from millrace.bench.run.plan import BenchPlan, check_server, make_plan, measure
from millrace.bench.run.run import Run
from millrace.bench.settings import InputSettings, LoadSettings, SessionSettings, TargetSettings
from millrace.cli.bench.foreign_flags import check_pictures, ready_folder, show_and_write
from millrace.cli.bench.progress import Begins, run_with_progress
from millrace.cli.console import heading, note, pairs, print_json, table
from millrace.cli.options import make_settings
from millrace.compile.settings import BuildSettings
from millrace.env import Env
from millrace.errors import ConfigError, MachineError
from millrace.runtime.settings import RunSettings
from millrace.settings import Settings, flag_of

SHOWN = ("mean", "p50", "p90", "p99")
ROWS = {
    "time_to_first_token": "TTFT, ms", "inter_token_latency": "ITL, ms a token", "request_latency": "latency, ms",
    "request_latency_from_intended": "  as intended", "output_token_throughput_per_user": "tokens/s a user",
    "input_sequence_length": "input tokens", "output_sequence_length": "output tokens",
}  # fmt: skip


def run(
    env: Env,
    /,
    url: str | None,
    url_given: str | None,
    goodput: tuple[str, ...],
    engine: str | None,
    certify_s: float,
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Run `millrace bench`."""
    targets = [target for target in (url, url_given, engine) if target]
    if len(targets) != 1:
        raise ConfigError("there is no one URL", "millrace bench http://HOST:PORT, or --engine MODEL", "give it, once")
    build, runs = make_settings(BuildSettings, options), make_settings(RunSettings, options)
    if engine is None:
        _check_no_engine(build, runs)
    limits = parse_limits(goodput)
    check_pictures(output, as_png := options.pop("as_png"))
    if engine is None:
        plan = make_plan(
            targets[0],
            make_settings(TargetSettings, options),
            make_settings(LoadSettings, options),
            make_settings(InputSettings, options),
            make_settings(SessionSettings, options),
        )
        check_limits(limits, plan.target.streams)
        ready_folder(output, NAMES)
        certificate, run = run_with_progress(lambda begins: _measure(plan, certify_s, as_json, begins), quiet=as_json)
    else:
        from millrace.cli.bench.engine import (
            in_process,
            make_in_process_plan,
        )  # what runs engines takes a second to import

        plan = make_in_process_plan(engine, options)
        ready_folder(output, NAMES)
        certificate, run = None, in_process(engine, plan, build, runs, env, quiet=as_json)
    done = RunResult.from_run(plan, run, limits, certificate, None if engine is not None else _join_traces(plan, run))
    document = report(done)
    show_and_write(
        lambda: print_json(document) if as_json else show(document),
        output,
        lambda folder: write_results(folder, done, as_png),
    )
    if not done.metrics.n:
        raise MachineError("no request was answered", "one whole answer at least", "the failures above say why")


def _check_no_engine(*groups: Settings) -> None:
    """Refuse settings of an in-process engine if there is none. raises ConfigError"""
    for settings in groups:
        if settings.changed_fields:
            message = f"{flag_of(settings.changed_fields[0])} is given for a server"
            raise ConfigError(message, "--engine MODEL, which runs here", "leave it out")


async def _measure(plan: BenchPlan, certify_s: float, quiet: bool, begins: Begins) -> tuple[Certificate | None, Run]:
    """Check the server, certify the client, and run the plan."""
    words = await check_server(plan)
    certificate = await certify(plan, certify_s) if certify_s else None
    if certificate is not None and not quiet:
        note(f"  client: {certificate.description}")
    return certificate, await measure(plan, begins, words)


def _join_traces(plan: BenchPlan, run: Run) -> Waterfall | None:
    """Fetch the server's traces; Ctrl-C skips them."""
    answers = good(run.records)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return join_client_server_traces(answers, runner.run(fetch_traces(plan.target, answers)))
    except KeyboardInterrupt:
        return None


def show(document: dict[str, Any]) -> None:
    """Print a report."""
    failed = document["requests"]["failed"]
    click.echo()
    heading(
        f"{document['requests']['whole']} answers in {document['duration_s']:.1f} s"
        + (f", {failed} failed" * bool(failed))
    )
    rate, requests = document["output_tokens_per_s"], document["requests_per_s"]
    rows = [
        ("output tokens/s", f"{rate['value']:,.1f}{_interval(rate['interval'])}"),
        ("requests/s", f"{requests['value']:,.2f}{_interval(requests['interval'], 2)}"),
        ("at a time", f"{document['mean_concurrency']:.1f} requests in the mean"),
    ]
    rows += [
        ("goodput", f"{g['requests_per_s']:.2f} requests/s, {g['share']:.0%}{_percent(g['interval'])}: {g['limits']}")
        for g in document["goodput"]
    ]
    pairs(rows)
    click.echo()
    _metrics(document["metrics"])
    for label, part in document["patterns"].items():
        click.echo()
        heading(f"{label}: {part['requests']['whole']} answers, {part['output_tokens_per_s']['value']:,.1f} tokens/s")
        _metrics(part["metrics"])
    if document["waterfall"]:
        _waterfall(document["waterfall"])
    if document["notes"]:
        click.echo()
    for sentence in document["notes"]:
        click.echo(f"  {sentence}")


def _waterfall(document: dict[str, Any]) -> None:
    click.echo()
    heading(f"where the time went, of {document['n']} requests that the server tells of")
    rows = []
    for name, part in (("ms to the first token", document["to_first_token"]), ("ms to its end", document["to_end"])):
        slowest = part["slowest"]
        rows.append([name, *(_stage(part["mean_ms"].get(stage)) for stage in TO_END)])
        if slowest:
            rows.append([f"  the {slowest['n']} slowest", *(_stage(slowest["mean_ms"].get(s)) for s in TO_END)])
    table(["", *TO_END], rows)
    slowest = document["to_first_token"]["slowest"]
    if slowest:
        click.echo(f"  to the first token, {slowest['says']}")


def _stage(ms: float | None) -> str:
    return "" if ms is None else f"{ms:,.1f}"


def _metrics(metrics: dict[str, Any]) -> None:
    rows = [
        [label, *(_cell(metrics[name], column) for column in SHOWN)] for name, label in ROWS.items() if name in metrics
    ]
    if rows:
        table(["", *SHOWN], rows)
        if any("?" in cell for row in rows for cell in row):
            click.echo("  ?: too few requests for an interval of 95 %, which stands in brackets elsewhere")


def _cell(metric: dict[str, Any], column: str) -> str:
    interval = metric["intervals"][column]
    return f"{metric[column]:,.1f}{'?' if interval is None else _interval(interval)}"


def _interval(interval: tuple[float, float] | None, digits: int = 1) -> str:
    return "" if interval is None else f" [{interval[0]:,.{digits}f}, {interval[1]:,.{digits}f}]"


def _percent(interval: tuple[float, float]) -> str:
    return f" [{interval[0]:.0%}, {interval[1]:.0%}]"
