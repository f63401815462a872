"""`millrace rm`: engines out of the cache."""

import click

from millrace.cli.options import json_option
from millrace.env import Env

EPILOG = """\b
Examples:
  millrace rm tiny                 every engine of tiny
  millrace rm tiny-0123456789ab    this one"""


@click.command(epilog=EPILOG)
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@json_option
@click.pass_obj
def command(env: Env, names: tuple[str, ...], as_json: bool) -> None:
    """Remove engines from the cache.

    NAME is one engine's, or a model's for all of its engines, as `millrace list` shows them.
    """
    from millrace.cli.rm.run import run  # imported when it runs: --help needs none of it

    run(env=env, names=names, as_json=as_json)
