"""Options of `millrace size verify`: compares predictions of a server with measurements."""

from pathlib import Path
from typing import Any

import click

from millrace.cli.options import json_option, settings_options
from millrace.env import Env
from millrace.size.question.settings import VerifySettings

EPILOG = """\b
Examples:
  millrace size verify tiny
  millrace size verify ./engine --isl 512 --osl 128 --loads 0.5,0.8 -o profile.json -- --itl-ms 50
  millrace size verify --url http://127.0.0.1:8000
  millrace serve ./engine --profile profile.json      /metrics has predicted step times beside measured ones"""


@click.command(epilog=EPILOG)
@click.argument("model", required=False)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[-- FLAGS]")
@click.option("--url", metavar="URL", help="A running server instead of MODEL; it must have no other clients.")
@settings_options(VerifySettings)
@click.option("-o", "--output", type=Path, metavar="FILE", help="File for the fitted step times, as a profile.")
@json_option
@click.pass_obj
def command(
    env: Env, /, model: str | None, flags: tuple[str, ...], url: str | None, output: Path | None,
    as_json: bool, **options: Any,
) -> int:  # fmt: skip
    """Predict the performance of a server of this machine under load, and measure it.

    MODEL is served on loopback with FLAGS of `millrace serve`, and loaded like by `millrace bench`: Poisson arrivals at
    shares of the predicted capacity. Its steps are timed by probes in between; a simulation of its scheduler predicts
    the latencies. The exit code is 3 if the errors exceed a median of 10 % or a 90th percentile of 25 %.
    """
    from millrace.cli.size.verify import run  # imported when it runs: --help needs none of it

    return run(env, model=model, flags=flags, url=url, output=output, as_json=as_json, **options)
