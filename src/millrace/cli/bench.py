"""`millrace bench`: a load on a server, and what its users would feel of it."""

import asyncio
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import uvloop

from millrace.bench.exports import write_results
from millrace.bench.goodput import READING, parse_limits
from millrace.bench.plan import Plan, measure, planned
from millrace.bench.results import Finished, report
from millrace.bench.run import Run
from millrace.bench.settings import InputSettings, LoadSettings, SessionSettings, TargetSettings
from millrace.cli.bench_flags import TheirFlags
from millrace.cli.options import json_option, made, settings_options
from millrace.cli.screen import heading, note, pairs, print_json, table
from millrace.cli.screen import progress as bars
from millrace.errors import ConfigError, MachineError

EPILOG = """\b
Examples:
  millrace bench http://127.0.0.1:8000 --model tiny --concurrency 16 --duration-s 30
  millrace bench URL --model M --request-rate 4 --isl 1000 --osl 200 --goodput ttft:500 itl:50
  millrace bench URL --model M --input-file trace.jsonl --replay-speed 2 -o results/
  millrace bench URL --model M --pattern short/long --pattern long/short:2 --json"""
SHOWN = ("mean", "p50", "p90", "p99")
ROWS = {
    "time_to_first_token": "TTFT, ms", "inter_token_latency": "ITL, ms a token", "request_latency": "latency, ms",
    "request_latency_from_intended": "  as intended", "output_token_throughput_per_user": "tokens/s a user",
    "input_sequence_length": "input tokens", "output_sequence_length": "output tokens",
}  # fmt: skip


@click.command(cls=TheirFlags, epilog=EPILOG)
@click.argument("url", required=False)
@click.option("--url", "url_given", hidden=True, help="The URL, as other tools take it.")
@settings_options(TargetSettings, LoadSettings, InputSettings, SessionSettings)
@click.option("--goodput", multiple=True, metavar="METRIC:MS", help=f"Limits that good requests keep; or {READING}.")
@click.option("-o", "--output", type=Path, metavar="FOLDER", help="Write results there, as other tools do, too.")
@json_option
def command(
    url: str | None, url_given: str | None, goodput: tuple[str, ...], output: Path | None, as_json: bool, **given: Any
) -> None:
    """Measure what users of a server feel.

    URL is any server of OpenAI's protocol. Flags of GenAI-Perf, AIPerf and `vllm bench serve` are taken where they mean
    the same. Ctrl-C ends the run and reports what there is.
    """
    target = url or url_given
    if target is None or (url and url_given):
        raise ConfigError("there is no one URL", "millrace bench http://HOST:PORT", "give it, once")
    limits = parse_limits(goodput)
    plan = planned(
        target, made(TargetSettings, given), made(LoadSettings, given), made(InputSettings, given),
        made(SessionSettings, given),
    )  # fmt: skip
    if output is not None and output.exists() and not output.is_dir():
        raise ConfigError(f"--output {output} is a file", "a folder", "name another")
    done = Finished.of(plan, run_plan(plan, quiet=as_json), limits)
    if output is not None:
        names = write_results(output, done)
        note(f"  {len(names)} files in {output}")
    told = report(done)
    print_json(told) if as_json else show(told)
    if not done.metrics.n:
        raise MachineError("no request was answered", "one whole answer at least", "the failures above say why")


def run_plan(plan: Plan, quiet: bool) -> Run:
    """With progress; Ctrl-C ends it in order, a second one at once."""
    with bars(quiet) as tell, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_stoppable(plan, tell))


async def _stoppable(plan: Plan, tell: Callable[[str, int, int], None]) -> Run:
    loop, running = asyncio.get_running_loop(), list[Run]()
    ticking = loop.create_task(_tick(plan, running, tell))

    def stop() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        running[-1].stop("Ctrl-C")

    def begins(run: Run) -> None:
        if not running and sys.platform != "win32":
            loop.add_signal_handler(signal.SIGINT, stop)  # from here on there is something to report
        running.append(run)

    try:
        return await measure(plan, begins)
    finally:
        ticking.cancel()


async def _tick(plan: Plan, running: list[Run], tell: Callable[[str, int, int], None]) -> None:
    """Ten times a second; it costs a client little."""
    load = plan.load
    while True:
        if running:
            run = running[-1]
            n, is_warm_up = len(run.records), bool(plan.warm_up) and len(running) == 1
            what = f"{'warm-up: ' if is_warm_up else ''}{n} answers, {run.n_running} running"
            if run.load.n_sessions is not None:
                tell(what, min(n, run.load.n_sessions), run.load.n_sessions)
            elif load.duration_s is not None:
                passed_s = time.perf_counter() - run.started_s
                tell(what, min(round(passed_s), round(load.duration_s)), round(load.duration_s))
            else:
                tell(what, n, 0)
        await asyncio.sleep(0.1)


def show(told: dict[str, Any]) -> None:
    """The report, for people."""
    failed = told["requests"]["failed"]
    click.echo()
    heading(
        f"{told['requests']['whole']} answers in {told['duration_s']:.1f} s" + (f", {failed} failed" * bool(failed))
    )
    rate, requests = told["output_tokens_per_s"], told["requests_per_s"]
    rows = [
        ("output tokens/s", f"{rate['value']:,.1f}{_interval(rate['interval'])}"),
        ("requests/s", f"{requests['value']:,.2f}{_interval(requests['interval'], 2)}"),
        ("at a time", f"{told['mean_concurrency']:.1f} requests in the mean"),
    ]
    rows += [
        ("goodput", f"{g['requests_per_s']:.2f} requests/s, {g['share']:.0%}{_percent(g['interval'])}: {g['limits']}")
        for g in told["goodput"]
    ]
    pairs(rows)
    click.echo()
    _metrics(told["metrics"])
    for label, part in told["patterns"].items():
        click.echo()
        heading(f"{label}: {part['requests']['whole']} answers, {part['output_tokens_per_s']['value']:,.1f} tokens/s")
        _metrics(part["metrics"])
    if told["notes"]:
        click.echo()
    for said in told["notes"]:
        click.echo(f"  {said}")


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
