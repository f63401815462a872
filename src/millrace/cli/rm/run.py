"""Runs `millrace rm`, whose options are in `options.py`: `--help` imports nothing else."""

from millrace.cli.console import note, print_json, size
from millrace.cli.list.run import describe_engines, distinguishing_settings
from millrace.compile.cache.engine_cache import EngineCache
from millrace.env import Env


def run(env: Env, names: tuple[str, ...], as_json: bool) -> None:
    """Run `millrace rm`."""
    cache = EngineCache(env.cache)
    settings = describe_engines(cache.entries())  # while it can still be read
    apart, removed = distinguishing_settings(settings), cache.remove(names)
    if as_json:
        print_json([{"name": e.name, "bytes": e.nbytes} for e in removed])
    for entry in () if as_json else removed:
        about = ", ".join(filter(None, (settings.get(entry.name, {}).get("precision"), apart.get(entry.name))))
        note(f"removed {entry.name}{f' ({about})' if about else ''}, {size(entry.nbytes)}")
