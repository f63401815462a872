"""Options of `millrace bench sweep`: finds the highest load of a server within latency limits."""

from pathlib import Path
from typing import Any

import click

from millrace.bench.settings import InputSettings, LoadSettings, SessionSettings, TargetSettings
from millrace.cli.bench.foreign_flags import ForeignFlags, certify_option, png_option
from millrace.cli.options import json_option, settings_options

EPILOG = """\b
Examples:
  millrace bench sweep http://127.0.0.1:8000 --model M --ttft-ms 500 --itl-ms 50 --isl 1000 --osl 200
  millrace bench sweep URL --model M --by rate --from 0.5 --most 32 --duration-s 30 -o page.html"""


@click.command(cls=ForeignFlags, epilog=EPILOG)
@click.argument("url")
@settings_options(TargetSettings, LoadSettings, InputSettings, SessionSettings)
@click.option(
    "--by",
    type=click.Choice(["concurrency", "rate"]),
    default="concurrency",
    show_default=True,
    help="Load to increase: concurrent users, or requests per second.",
)
@click.option(
    "--from",
    "first",
    type=click.FloatRange(1e-6, 65_536),
    default=1.0,
    show_default=True,
    help="First level; each further level is twice as high.",
)
@click.option(
    "--most", "max_level", type=click.FloatRange(1e-6, 65_536), default=256.0, show_default=True, help="Last level."
)
@click.option("--ttft-ms", type=click.FloatRange(0.001), metavar="X", help="Limit on the time to the first token.")
@click.option("--itl-ms", type=click.FloatRange(0.001), metavar="X", help="Limit on the time between tokens.")
@click.option(
    "--percentile",
    type=click.Choice(["50", "75", "90", "95", "99"]),
    default="90",
    show_default=True,
    help="Percentile of requests that must meet the limits.",
)
@certify_option
@click.option("-o", "--output", type=Path, metavar="FILE", help="File for an offline HTML page.")
@png_option
@json_option
def command(
    url: str, by: str, first: float, max_level: float, output: Path | None, as_json: bool, **options: Any
) -> None:  # fmt: skip
    """Raise the load until a limit breaks, and find the best below.

    Each level lasts --duration-s (default 10, or --request-count). Ctrl-C ends the sweep and reports the levels so far.
    At the end the client is certified at the level with the most tokens/s.
    """
    from millrace.cli.bench.sweep import run  # imported when it runs: --help needs none of it

    run(url=url, by=by, first=first, max_level=max_level, output=output, as_json=as_json, **options)
