"""`millrace rm`: engines out of the cache."""

import click

from millrace.cli.list import described, told_apart
from millrace.cli.options import json_option
from millrace.cli.screen import note, print_json, size
from millrace.compile.cache import EngineCache
from millrace.env import Env

EPILOG = """\b
Examples:
  millrace rm tiny                 every engine of tiny
  millrace rm tiny-0123456789ab    this one"""


@click.command(epilog=EPILOG)
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@json_option
@click.pass_obj
def command(env: Env, names: tuple[str, ...], as_json: bool) -> None:
    """Remove engines from the cache.

    NAME is one engine's, or a model's for all of its engines, as `millrace list` shows them.
    """
    cache = EngineCache(env.cache)
    known = described(cache.entries())  # while it can still be read
    apart, removed = told_apart(known), cache.remove(names)
    if as_json:
        print_json([{"name": e.name, "bytes": e.nbytes} for e in removed])
    for entry in () if as_json else removed:
        about = ", ".join(filter(None, (known.get(entry.name, {}).get("precision"), apart.get(entry.name))))
        note(f"removed {entry.name}{f' ({about})' if about else ''}, {size(entry.nbytes)}")
