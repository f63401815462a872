"""`millrace inspect`: what an engine is made of."""

from pathlib import Path

import click

from millrace.cli.options import json_option
from millrace.env import Env

EPILOG = """\b
Examples:
  millrace inspect ./llama.engine
  millrace inspect tiny --calls
  millrace inspect tiny --html tiny.html"""


@click.command(epilog=EPILOG)
@click.argument("engine")
@click.option("--calls", "part", flag_value="calls", help="Every call of the program, in its order.")
@click.option("--weights", "part", flag_value="weights", help="Every packed weight.")
@click.option("--memory", "part", flag_value="memory", help="The memory plan of a step, buffer by buffer.")
@click.option("--tactics", "part", flag_value="tactics", help="What was timed for each kernel and shape, and chosen.")
@click.option("--graph", "part", flag_value="graph", help="The graph as traced from the model, before any pass.")
@click.option("--html", type=Path, metavar="FILE", help="Write all of it as one page for a browser; needs no network.")
@json_option
@click.pass_obj
def command(env: Env, engine: str, part: str | None, html: Path | None, as_json: bool) -> None:
    """Show what an engine is made of.

    Model, precision, layers with their kernels, fusions with their origin, bytes, memory plan. ENGINE is an engine
    folder, or the name of an engine in the cache (`millrace list`), or the model it was built from: its name, folder
    or GGUF file.
    """
    from millrace.cli.inspect.run import run  # imported when it runs: --help needs none of it

    run(env=env, engine=engine, part=part, html=html, as_json=as_json)
