"""`millrace tune`: time the kernels of a built engine again, for the machine at hand."""

import click

from millrace.cli.options import json_option
from millrace.env import Env

EPILOG = """\b
Examples:
  millrace tune ./llama.engine                 for this machine, after it was built on another
  millrace tune tiny --threads 1 --seconds 10"""


@click.command(epilog=EPILOG)
@click.argument("engine")
@click.option(
    "--seconds",
    type=click.FloatRange(0.01, 3600),
    default=2.0,
    show_default=True,
    help="Approximate time for measurements; at most twice that.",
)
@click.option("--threads", type=click.IntRange(1, 1024), help="Compute threads it will run with; default: all cores.")
@click.option("--cached", is_flag=True, help="Reuse earlier timings of this machine; time only what is missing.")
@json_option
@click.pass_obj
def command(env: Env, engine: str, seconds: float, threads: int | None, cached: bool, as_json: bool) -> None:
    """Time the kernels of a built engine on this machine.

    The fastest settings are stored in the engine. ENGINE is as for `millrace inspect`. Settings change only the speed,
    never the answers. Kernels for which time runs out keep their settings.
    """
    from millrace.cli.tune.run import run  # imported when it runs: --help needs none of it

    run(env=env, engine=engine, seconds=seconds, threads=threads, cached=cached, as_json=as_json)
