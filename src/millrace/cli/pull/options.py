"""`millrace pull`: a checkpoint from the hub to this machine."""

import click

from millrace.cli.options import json_option
from millrace.env import Env

EPILOG = """\b
Examples:
  millrace pull Qwen/Qwen2.5-0.5B-Instruct
  HF_HOME=/data/hf millrace pull org/name@revision"""


@click.command(epilog=EPILOG)
@click.argument("model", metavar="HUB_ID")
@json_option
@click.pass_obj
def command(env: Env, model: str, as_json: bool) -> None:
    """Download a checkpoint from the hub.

    HUB_ID is org/name or org/name@revision. A download that broke off is finished. It lands in the hub's own cache
    ($HF_HOME); HF_TOKEN is used where set. `serve` and the others download by themselves; this is for machines that
    will be without a network.
    """
    from millrace.cli.pull.run import run  # imported when it runs: --help needs none of it

    run(env=env, model=model, as_json=as_json)
