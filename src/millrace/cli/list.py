"""`millrace list`: the engines in the cache."""

from typing import Any

import click

from millrace.cli.options import json_option
from millrace.cli.screen import note, print_json, size, table
from millrace.compile.cache import DEFAULT_LIMIT, CacheEntry, EngineCache, age
from millrace.env import Env

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
        table(("engine", "size", "used"), [(e.name, size(e.nbytes), f"{age(e.last_used)} ago") for e in entries])
        total = sum(e.nbytes for e in entries)
        note(f"  {size(total)} of {size(DEFAULT_LIMIT)} in {env.cache}")
    else:
        note(f"no engines in {env.cache}; `millrace serve tiny` builds one")


def _plain(entry: CacheEntry) -> dict[str, Any]:
    return {"name": entry.name, "folder": str(entry.folder), "bytes": entry.nbytes, "last_used": entry.last_used}
