"""Options of `millrace bench compare`: compares two servers or results, with confidence intervals."""

from typing import Any

import click

from millrace.bench.names import READING
from millrace.bench.settings import InputSettings, LoadSettings, SessionSettings, TargetSettings
from millrace.cli.bench.foreign_flags import ForeignFlags, certify_option
from millrace.cli.options import json_option, settings_options
from millrace.env import Env

EPILOG = """\b
Examples:
  millrace bench compare http://old:8000 http://new:8000 --model M --concurrency 8 --request-count 40 --rounds 10
  millrace bench compare --engine old.engine --engine new.engine --input-file traffic.jsonl --replay-speed 4
  millrace bench compare old-results/ new-results/ --allow 5 --goodput ttft:500 itl:50 --json"""


@click.command(cls=ForeignFlags, epilog=EPILOG)
@click.argument("a", required=False)
@click.argument("b", required=False)
@click.option(
    "--engine",
    "engines",
    multiple=True,
    metavar="MODEL",
    help="Engines in this process instead of A and B; give it twice.",
)
@settings_options(TargetSettings, LoadSettings, InputSettings, SessionSettings)
@click.option(
    "--rounds",
    type=click.IntRange(3, 1000),
    default=10,
    show_default=True,
    help="Rounds of each side, alternating: A B, B A, ...",
)
@click.option(
    "--allow",
    type=click.FloatRange(0, 1e6),
    default=0.0,
    show_default=True,
    metavar="PERCENT",
    help="Exit with 3 only if B is worse by more than this with confidence.",
)
@click.option(
    "--goodput",
    multiple=True,
    metavar="METRIC:MS",
    help=f"Latency limits, to compare the shares of good requests; or {READING}.",
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
    goodput: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> int:
    """Compare two servers, two engines or two results: is B faster than A?

    A and B are URLs, which get the same requests in alternating rounds (--request-count and --duration-s are per
    round), or folders of `millrace bench -o`; or --engine A --engine B, models or engines in this process. Each
    difference has a 95 % interval and the smallest detectable effect. The exit code is 3 if B is worse with confidence.
    """  # fmt: skip
    from millrace.cli.bench.compare import run  # imported when it runs: --help needs none of it

    return run(env, a=a, b=b, engines=engines, rounds=rounds, allow=allow, goodput=goodput, as_json=as_json, **options)
