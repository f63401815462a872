"""`millrace list`: the engines in the cache."""

from typing import Any

import click

from millrace.cli.options import json_option
from millrace.cli.screen import note, print_json, size, table
from millrace.compile.cache import DEFAULT_LIMIT, CacheEntry, EngineCache, age
from millrace.engine.manifest import read_manifest
from millrace.env import Env
from millrace.errors import EngineError

EPILOG = """\b
Example:
  millrace list --json"""


@click.command(epilog=EPILOG)
@json_option
@click.pass_obj
def command(env: Env, as_json: bool) -> None:
    """List the engines in the cache, most recently used first.

    Engines land there when `serve`, `chat`, `generate` or Python's LLM build one; the least recently used go when the
    cache outgrows its limit.
    """
    entries = EngineCache(env.cache).entries()
    if as_json:
        print_json([_plain(e) for e in entries])
    elif entries:
        rows = [(e.model, _precision(e), size(e.nbytes), f"{age(e.last_used)} ago", e.name) for e in entries]
        table(("model", "precision", "size", "used", "engine"), rows)
        total = sum(e.nbytes for e in entries)
        note(f"  {size(total)} of {size(DEFAULT_LIMIT)} in {env.cache}")
    else:
        note(f"no engines in {env.cache}; `millrace serve tiny` builds one")


def _precision(entry: CacheEntry) -> str:
    try:
        return read_manifest(entry.folder).precision["default"]
    except EngineError:  # of another version, or damaged: still to be listed, and removed
        return "unreadable"


def _plain(entry: CacheEntry) -> dict[str, Any]:
    return {
        "name": entry.name, "model": entry.model, "precision": _precision(entry), "folder": str(entry.folder),
        "bytes": entry.nbytes, "last_used": entry.last_used,
    }  # fmt: skip
