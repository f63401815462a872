"""`millrace list`: the engines in the cache."""

import click

from millrace.cli.options import json_option
from millrace.env import Env

EPILOG = """\b
Example:
  millrace list --json"""


@click.command(epilog=EPILOG)
@json_option
@click.pass_obj
def command(env: Env, as_json: bool) -> None:
    """List the engines in the cache.

    The most recently used come first; those of one model and precision with what they differ in. Engines land there
    when `serve`, `chat`, `generate` or Python's LLM build one; the least recently used go when the cache outgrows
    its limit.
    """
    from millrace.cli.list.run import run  # imported when it runs: --help needs none of it

    run(env=env, as_json=as_json)
