"""`millrace size verify`: what is predicted of a server beside what `millrace bench` measures of it."""

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
@click.option("--url", metavar="URL", help="A server that runs, in place of MODEL; nobody else may ask it meanwhile.")
@settings_options(VerifySettings)
@click.option("-o", "--output", type=Path, metavar="FILE", help="Write the fitted step times there, as a profile.")
@json_option
@click.pass_obj
def command(
    env: Env, /, model: str | None, flags: tuple[str, ...], url: str | None, output: Path | None,
    as_json: bool, **given: Any,
) -> int:  # fmt: skip
    """Predict how a server of this machine does under loads, and measure it.

    MODEL is served on loopback, with FLAGS of `millrace serve`, and asked by `millrace bench`'s load: Poisson arrivals
    at shares of the predicted capacity. Its steps are timed by probes in between; a simulation with the scheduler that
    serves predicts the rest. The exit code is 3 where the figures are further off than they should be: a median of
    10 %, nine of ten within 25 %.
    """
    from millrace.cli.size.verify import run  # imported when it runs: --help needs none of it

    return run(env, model=model, flags=flags, url=url, output=output, as_json=as_json, **given)
