"""Options of `millrace convert`: rewrites weights of PyTorch as safetensors."""

from pathlib import Path

import click

from millrace.cli.options import json_option
from millrace.env import Env

EPILOG = """\b
Examples:
  millrace convert old-model -o new-model
  millrace convert org/name@revision -o new-model --json
  millrace serve new-model

docs/convert.md says what is read, and what is refused."""


@click.command(epilog=EPILOG)
@click.argument("model")
@click.option("-o", "--output", type=Path, required=True, metavar="FOLDER", help="The folder to write; must not exist.")
@click.option("--format", "format_", type=click.Choice(["hf"]), default="hf", show_default=True,
              help="The format to write: hf is a Hugging Face folder with safetensors.")  # fmt: skip
@json_option
@click.pass_obj
def command(env: Env, model: str, output: Path, format_: str, as_json: bool) -> None:
    """Rewrite PyTorch weights (.bin, .pt) as safetensors.

    MODEL is a checkpoint folder or a hub id. Its weights are read without executing anything that their pickles
    hold, and written with the values that they have; configuration, tokenizer and templates are copied.
    """
    from millrace.cli.convert.run import run  # imported when it runs: --help needs none of it

    run(env=env, model=model, output=output, format_=format_, as_json=as_json)
