"""`millrace bench compare`: which of two servers, or of two results, is faster, and how surely."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from millrace.bench.certify import Certificate, certify, told_of
from millrace.bench.compare import Difference, Side, compared_answers, compared_rounds, interleaved, read_answers
from millrace.bench.plan import Plan, measure, planned, reached
from millrace.bench.settings import InputSettings, LoadSettings, SessionSettings, TargetSettings
from millrace.cli.bench_flags import TheirFlags, certify_option
from millrace.cli.bench_runner import Begins, driven
from millrace.cli.options import json_option, made, settings_options
from millrace.cli.screen import print_json, table
from millrace.env import Env
from millrace.errors import ConfigError, MachineError

WORSE = 3  # the exit code for CI
EPILOG = """\b
Examples:
  millrace bench compare http://old:8000 http://new:8000 --model M --concurrency 8 --request-count 40 --rounds 10
  millrace bench compare --engine old.engine --engine new.engine --input-file traffic.jsonl --replay-speed 4
  millrace bench compare old-results/ new-results/ --allow 5 --json"""


@click.command(cls=TheirFlags, epilog=EPILOG)
@click.argument("a", required=False)
@click.argument("b", required=False)
@click.option(
    "--engine", "engines", multiple=True, metavar="MODEL", help="In place of A and of B: engines, without HTTP."
)
@settings_options(TargetSettings, LoadSettings, InputSettings, SessionSettings)
@click.option(
    "--rounds",
    type=click.IntRange(3, 1000),
    default=10,
    show_default=True,
    help="Rounds of each, in turns: A B, B A, ...",
)
@click.option(
    "--allow",
    type=click.FloatRange(0, 1e6),
    default=0.0,
    show_default=True,
    metavar="PERCENT",
    help="Exit with 3 only where B is surely worse by more than this.",
)
@certify_option
@json_option
@click.pass_obj
def command(
    env: Env,
    /,
    a: str | None,
    b: str | None,
    engines: tuple[str, ...],
    rounds: int,
    allow: float,
    as_json: bool,
    **given: Any,
) -> int:
    """Compare two servers, two engines or two results: is B faster than A?

    A and B are URLs, asked the same in turns (--request-count and --duration-s are those of a round), or folders that
    `millrace bench -o` wrote; or --engine A --engine B, models or engines in this process. Each difference comes with
    its interval of 95 % and the smallest that would have been seen. The exit code is 3 where B is surely worse.
    """  # fmt: skip
    if engines:
        if a is not None or len(engines) != 2:
            raise ConfigError(f"{len(engines)} engines", "--engine A --engine B, and no URL", "name two")
        from millrace.cli.bench_engine import compared_engines  # what runs engines takes a second to import

        sides = compared_engines((engines[0], engines[1]), given, rounds, env, as_json)
        told = _told(compared_rounds(*sides), allow, sides)
    elif a is None or b is None:
        raise ConfigError("there are not two to compare", "A and B: URLs or results; or --engine twice", "name both")
    else:
        told = _compared(a, b, rounds, allow, as_json, given)
    if not told["metrics"]:
        raise MachineError("nothing can be compared", "whole answers of both", "see what each says by itself")
    print_json(told) if as_json else _show(told)
    return WORSE if told["worse"] else 0


def _compared(a: str, b: str, rounds: int, allow: float, quiet: bool, given: dict[str, Any]) -> dict[str, Any]:
    """Two URLs, or two results."""
    are_files = [Path(x).exists() for x in (a, b)]
    if are_files[0] != are_files[1]:
        raise ConfigError(
            f"{a} and {b}: one is a file, one is none", "two URLs, or two results", "compare like with like"
        )
    if all(are_files):
        return _told(compared_answers(*(read_answers(Path(x)) for x in (a, b))), allow)
    certify_s, plans = given.pop("certify_s"), (_plans(a, given), _plans(b, given))

    async def compared(begins: Begins) -> tuple[Certificate | None, tuple[Side, Side]]:
        words, _ = [await reached(plan(0)) for plan in plans]  # both answer, and are asked the same
        certificate = await certify(plans[0](0), certify_s) if certify_s else None
        return certificate, await interleaved(*plans, rounds, begins, lambda plan, on: measure(plan, on, words))

    certificate, sides = driven(compared, quiet)
    return {**_told(compared_rounds(*sides), allow, sides), **told_of(certificate)}


def _plans(url: str, given: dict[str, Any]) -> Any:
    load = made(LoadSettings, given)

    def plan(round_: int) -> Plan:
        return planned(
            url, made(TargetSettings, given), replace(load, random_seed=load.random_seed + round_),
            made(InputSettings, given), made(SessionSettings, given),
        )  # fmt: skip

    return plan


def _told(differences: list[Difference], allow: float, sides: tuple[Side, Side] | None = None) -> dict[str, Any]:
    """More failures are worse, too."""
    failed = [side.n_failed for side in sides] if sides else [0, 0]
    worse = [d.name for d in differences if d.is_worse_by(allow)] + ["failures"] * (failed[1] > failed[0])
    ended = [run.ended for side in sides for run in side.runs if run.ended] if sides else []
    return {
        "metrics": [{**asdict(d), "verdict": d.verdict} for d in differences],
        "failed": failed, "worse": worse, "allowed_percent": allow, "ended_early": ended[0] if ended else None,
        **told_of(None),
    }  # fmt: skip


def _show(told: dict[str, Any]) -> None:
    rows = [
        [d["name"], f"{d['a']:,.2f}", f"{d['b']:,.2f}", f"{d['percent']:+.1f} %", _interval(d["interval"]),
         "-" if d["visible"] is None else f"{d['visible']:.1f} %", d["verdict"]]
        for d in told["metrics"]
    ]  # fmt: skip
    click.echo()
    table(["", "A", "B", "B over A", "95 %", "visible", "B is"], rows)
    click.echo("  visible: what would have been seen four times out of five")
    if told["client"]:
        click.echo(f"  client: {told['client']}")
    if told["ended_early"]:
        click.echo(f"  The comparison ended early: {told['ended_early']}.")
    if any(told["failed"]):
        click.echo(f"  Failed requests: {told['failed'][0]} of A, {told['failed'][1]} of B.")
    if told["worse"]:
        click.echo(f"  B is worse by more than {told['allowed_percent']:g} %: {', '.join(told['worse'])}.")


def _interval(interval: tuple[float, float] | None) -> str:
    return "too few rounds" if interval is None else f"{interval[0]:+.1f} to {interval[1]:+.1f} %"
