"""Options of `millrace compress`: quantises a float checkpoint, and measures what that costs."""

from pathlib import Path
from typing import Any

import click

from millrace.cli.compress.flags import advise_options, budget_options, proof_options
from millrace.cli.options import json_option
from millrace.compress.presets import ABOUT, SAMPLES
from millrace.env import Env
from millrace.evaluate.sizes import LENGTH

_MAX_SAMPLES = 4096

EPILOG = "\n".join([
    "\b", "Examples:",
    "  millrace compress ./llama-3.2-1b -o llama-int4 --recipe int4-wo-mse",
    "  millrace compress ./llama-3.2-1b -o llama-gptq --recipe int4-gptq --samples-from text.txt",
    "  millrace compress ./llama-3.2-1b -o llama-mix --recipe mix.toml --dry-run",
    "  millrace compress ./llama-3.2-1b -o llama-1pc --max-loss 1% --target latency --samples-from text.txt",
    "  millrace compress ./llama-3.2-1b -o advice --advise --samples-from text.txt",
    "  millrace compress ./llama-3.2-1b -o llama-int4 --recipe int4-wo --engine llama.engine",
    "  millrace serve llama-int4",
    "", "\b", "Presets:", *(f"  {name:14} {about}" for name, about in ABOUT.items()),
    "", "docs/compress.md has what a recipe file holds.",
])  # fmt: skip


@click.command(epilog=EPILOG)
@click.argument("model")
@click.option("-o", "--output", type=Path, required=True, metavar="FOLDER",
              help="The folder to write; must not exist, except for --measure and --advise.")  # fmt: skip
@click.option("--recipe", metavar="NAME|FILE", help="A preset, or a recipe as .toml or .json; see below.")
@click.option("--measure", "again", is_flag=True,
              help="Only measure an existing folder, e.g. after an interrupted run.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Show what would be done and what it needs, from the headers alone.")
@click.option(
    "--samples-from",
    metavar="FILE",
    help="UTF-8 text for calibration statistics, for recipes that need them; must differ from the text of the loss.",
)
@click.option(
    "--samples",
    type=click.IntRange(1, _MAX_SAMPLES),
    metavar="N",
    help=f"Number of samples of {LENGTH} tokens, spread over the text; default: {SAMPLES}.",
)
@click.option("--statistics", type=click.Path(path_type=Path), metavar="FOLDER",
              help="Folder for calibration statistics. An interrupted run resumes from it, and later recipes reuse it "
                   "without a text.")  # fmt: skip
@click.option("--engine", type=click.Path(path_type=Path), metavar="FOLDER",
              help="Also build an engine of the result there, like `millrace build`; must not exist.")  # fmt: skip
@proof_options
@budget_options
@advise_options
@json_option
@click.pass_obj
def command(env: Env, /, model: str, output: Path, as_json: bool, **options: Any) -> None:
    """Compress a checkpoint and measure the accuracy loss.

    MODEL is a checkpoint folder, a GGUF file, a hub id or `tiny`. The new folder has the format of compressed-tensors;
    it is read back and checked before it is moved into place.
    """
    from millrace.cli.compress.run import run  # imported when it runs: --help needs none of it

    run(env, model=model, output=output, as_json=as_json, **options)
