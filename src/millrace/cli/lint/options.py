"""`millrace lint`: checks a model repository before it is served."""

from pathlib import Path

import click

from millrace.cli.options import json_option

EPILOG = """\b
Examples:
  millrace lint ./models
  millrace lint ./models --model-config-name h100
  millrace lint ./models --json"""


@click.command(epilog=EPILOG)
@click.argument("folders", nargs=-1, required=True, metavar="DIR...", type=Path)
@click.option("--model-config-name", default="", metavar="NAME", help="Take DIR/MODEL/configs/NAME.pbtxt where it is.")
@click.option("--model-namespacing", is_flag=True, help="Let a name occur in several DIR.")
@json_option
def command(folders: tuple[Path, ...], model_config_name: str, model_namespacing: bool, as_json: bool) -> int:
    """Explain a Triton model repository before it is served.

    Each model with its versions and backend, what is wrong (file:line:column, what was expected, how to fix it), and
    what changes nothing here, with the reason. Exit code 2 where a model would not be served, or not as it is written.
    """
    from millrace.cli.lint.run import run

    return run(folders, model_config_name, namespacing=model_namespacing, as_json=as_json)
