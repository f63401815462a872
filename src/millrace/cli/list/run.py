"""Runs `millrace list`, whose options are in `options.py`: `--help` imports nothing else."""

from collections.abc import Mapping, Sequence
from typing import Any

from millrace.cli.console import note, print_json, size, table
from millrace.compile.cache.engine_cache import DEFAULT_LIMIT, CacheEntry, EngineCache, age
from millrace.engine.artifact.engine_tables import read_program_table
from millrace.engine.artifact.manifest import read_manifest
from millrace.env import Env
from millrace.errors import EngineError, sanitize
from millrace.model.families import HEAD

UNREADABLE = "unreadable"


def run(env: Env, as_json: bool) -> None:
    """Run `millrace list`."""
    entries = EngineCache(env.cache).entries()
    settings = describe_engines(entries)
    if as_json:
        print_json([_plain(e, settings[e.name]) for e in entries])
    elif entries:
        apart = distinguishing_settings(settings)
        rows = [
            (e.model, settings[e.name].get("precision", UNREADABLE), size(e.nbytes), f"{age(e.last_used)} ago",
             apart[e.name], e.name)
            for e in entries
        ]  # fmt: skip
        header = ("model", "precision", "size", "used", "differs in", "engine")
        shown = [i for i, name in enumerate(header) if name != "differs in" or any(apart.values())]
        table([header[i] for i in shown], [[row[i] for i in shown] for row in rows])
        total = sum(e.nbytes for e in entries)
        note(f"  {size(total)} of {size(DEFAULT_LIMIT)} in {env.cache}")
    else:
        note(f"no engines in {env.cache}; `millrace serve tiny` builds one")


def describe_engines(entries: Sequence[CacheEntry]) -> dict[str, dict[str, Any]]:
    """Return the settings of each engine by name; {} for an unreadable one, which is listed all the same."""
    return {e.name: _settings(e) for e in entries}


def _settings(entry: CacheEntry) -> dict[str, Any]:
    try:
        m, steps = read_manifest(entry.folder), read_program_table(entry.folder).calls
    except (EngineError, OSError):  # of another version, damaged, or removed just now
        return {}
    head = [m.precision.get(HEAD) or m.precision.get("default", "?")] if m.is_language_model else []
    head += ["rescored"] if any(step.kernel == "rescore" for step in steps) else []
    layers = {pattern: value for pattern, value in m.precision.items() if pattern not in ("default", HEAD)}
    return {
        "model": entry.model, "precision": sanitize(m.precision.get("default", "?")), "context": m.max_context,
        "batch": m.max_sequences, "kv": sanitize(m.kv_format), "head": sanitize(" ".join(head)), "groups": m.group,
        "sums": m.cpu.bf16_sums,
        "layers": sanitize(" ".join(f"{pattern} {value}" for pattern, value in layers.items())),
        "content": m.identity[:6],
        "kl": m.evaluation.chosen_loss.kl if m.evaluation.chosen_loss else None, "accuracy": m.evaluation.summary,
    }  # fmt: skip


def distinguishing_settings(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return by name the settings in which an engine differs from others of its model and precision; "" if none.

    content: differing weights, only if all else is equal; the accuracy loss is not included, because it follows
    """
    differences = {}
    for name, mine in settings.items():
        alike = [k for k in settings.values() if k and all(k[i] == mine.get(i) for i in ("model", "precision"))]
        differ = [i for i in mine if i not in ("kl", "accuracy") and any(k[i] != mine[i] for k in alike)]
        differences[name] = ", ".join(f"{i} {mine[i]!s:.40}" for i in differ if i != "content" or differ == [i])
    return differences


def _plain(entry: CacheEntry, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": entry.name, "precision": UNREADABLE, **settings, "model": entry.model, "folder": str(entry.folder),
        "bytes": entry.nbytes, "last_used": entry.last_used,
    }  # fmt: skip
