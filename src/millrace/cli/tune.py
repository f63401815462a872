"""`millrace tune`: time the kernels of a built engine again, for the machine at hand."""

import click
from msgspec import to_builtins

from millrace.cli.inspect import find
from millrace.cli.options import json_option
from millrace.cli.screen import heading, pairs, print_json, progress
from millrace.cli.tables import Tables, tuned
from millrace.compile.cache import EngineCache
from millrace.compile.timings import TimingCache
from millrace.compile.tune import Tuning, tune_folder
from millrace.engine.engine import Engine
from millrace.env import Env

EPILOG = """\b
Examples:
  millrace tune ./llama.engine                 for this machine, after it was built on another
  millrace tune tiny --threads 1 --seconds 10"""


@click.command(epilog=EPILOG)
@click.argument("engine")
@click.option("--seconds", type=click.FloatRange(0.01, 3600), default=2.0, show_default=True, help="How long to time.")
@click.option("--threads", type=click.IntRange(1, 1024), help="Compute threads it will run with; default: all cores.")
@click.option(
    "--cache/--no-cache", default=True, help="Take what was timed before on this machine; else time all anew."
)
@json_option
@click.pass_obj
def command(env: Env, engine: str, seconds: float, threads: int | None, cache: bool, as_json: bool) -> None:
    """Time the kernels of a built engine on this machine, and keep the fastest settings in it.

    ENGINE is as for `millrace inspect`. Answers never depend on it, only speed does.
    """
    folder = find(engine, EngineCache(env.cache))
    timings = TimingCache(env.cache / "timings.json") if cache else None
    with progress() as report:
        table = tune_folder(folder, Tuning(seconds, threads or 0, timings), report)
    if as_json:
        print_json(to_builtins(table))
        return
    heading(str(folder))
    pairs([("tactics", tuned(Tables(Engine.open(folder)))), ("details", f"millrace inspect {engine} --tactics")])
