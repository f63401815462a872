"""`millrace tune`: time the kernels of a built engine again, for the machine at hand."""

import math

import click
from msgspec import to_builtins

from millrace.cli.options import json_option
from millrace.cli.screen import heading, pairs, print_json, progress
from millrace.cli.tables import Tables, tuned
from millrace.compile.find import find_built
from millrace.compile.timings import TimingCache
from millrace.compile.tune import Tuning, tune_folder
from millrace.engine.engine import Engine
from millrace.env import Env
from millrace.errors import ConfigError, MachineError

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
    help="About how long to time; up to twice that.",
)
@click.option("--threads", type=click.IntRange(1, 1024), help="Compute threads it will run with; default: all cores.")
@click.option("--cached", is_flag=True, help="Take what was timed on this machine before; time only what is missing.")
@json_option
@click.pass_obj
def command(env: Env, engine: str, seconds: float, threads: int | None, cached: bool, as_json: bool) -> None:
    """Time the kernels of a built engine on this machine.

    The fastest settings are kept in it. ENGINE is as for `millrace inspect`. Answers never depend on it, only speed
    does. What time does not suffice for stays as it was.
    """
    if math.isnan(seconds):
        raise ConfigError("--seconds is nan", "a number of seconds", "write one")
    timings = TimingCache(env.cache / "timings.json")
    with progress(as_json) as report:
        folder = find_built(engine, env, report)
        table = tune_folder(folder, Tuning(seconds, threads, timings, anew=not cached), report)
    if not table.compared():
        raise MachineError(
            f"nothing was timed: {table.note or 'there is nothing to time'}", "time for a few passes of the engine",
            "give more --seconds",
        )  # fmt: skip
    if as_json:
        print_json(to_builtins(table))
        return
    heading(str(folder))
    pairs([("tactics", tuned(Tables(Engine.open(folder)))), ("details", f"millrace inspect {engine} --tactics")])
