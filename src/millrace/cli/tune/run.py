"""Runs `millrace tune`, whose options are in `options.py`: `--help` imports nothing else."""

import math

from msgspec import to_builtins

from millrace.cli.console import heading, pairs, print_json, progress
from millrace.cli.engine_tables import Tables, tuning_text
from millrace.compile.cache.timing_cache import TimingCache
from millrace.compile.resolve_model import find_built
from millrace.compile.tune.tuner import Tuning, tune_folder
from millrace.engine.artifact.engine import Engine
from millrace.env import Env
from millrace.errors import ConfigError, MachineError


def run(env: Env, engine: str, seconds: float, threads: int | None, cached: bool, as_json: bool) -> None:
    """Run `millrace tune`."""
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
    pairs([("tactics", tuning_text(Tables(Engine.open(folder)))), ("details", f"millrace inspect {engine} --tactics")])
