"""Rooflines measured by `millrace doctor`, cached next to the timings, as the reference for measurements.

Each entry is for one processor, instruction set, number of threads and build of the kernels, like timings.
"""

from pathlib import Path

import msgspec

from millrace.compile.cache.timing_cache import machine_key
from millrace.engine.artifact.manifest import UNREADABLE
from millrace.engine.artifact.tactics import write_whole
from millrace.machine.roofline import Roofline

MAX_ENTRIES, _LIMIT = 16, 1 << 18  # machines, and bytes of the file


def store_roofline(cache: Path, isa: str, roofline: Roofline) -> Path:
    """Store a roofline and drop the oldest; return the file. raises OSError if the cache cannot be written"""
    key, path = machine_key(isa, roofline.threads), _path(cache)
    older = [(k, v) for k, v in _read_all(path).items() if k != key][1 - MAX_ENTRIES :]
    path.parent.mkdir(parents=True, exist_ok=True)
    table = dict([*older, (key, roofline)])
    write_whole(path, msgspec.json.format(msgspec.json.encode(table), indent=1))
    return path


def load_roofline(cache: Path, isa: str, threads: int) -> Roofline | None:
    """Return the measured roofline; None if there is none, or the file is damaged: `millrace doctor` rewrites it."""
    return _read_all(_path(cache)).get(machine_key(isa, threads))


def _path(cache: Path) -> Path:
    return cache / "rooflines.json"


def _read_all(path: Path) -> dict[str, Roofline]:
    try:
        if path.stat().st_size > _LIMIT:
            return {}
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Roofline])
    except (OSError, *UNREADABLE):
        return {}
