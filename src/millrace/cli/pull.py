"""`millrace pull`: a checkpoint from the hub to this machine."""

import click

from millrace.cli.options import json_option
from millrace.cli.screen import note, print_json, progress, size
from millrace.compile.find import model_folder
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
    with progress(as_json) as report:
        name, folder = model_folder(model, env, report)
    files = folder.iterdir() if folder.is_dir() else [folder]  # a GGUF file is one that is here already
    nbytes = sum(f.stat().st_size for f in files if f.is_file())
    if as_json:
        print_json({"name": name, "folder": str(folder), "bytes": nbytes})
    else:
        note(f"{model}: {size(nbytes)} in {folder}")
