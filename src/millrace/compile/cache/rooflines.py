"""The roofline that `millrace doctor` measured, kept beside the timing cache: what is measured is set against it.

Each entry is for one processor, instruction set, number of threads and build of the kernels, as times are.
"""

from pathlib import Path

import msgspec

from millrace.compile.cache.timing_cache import machine_key
from millrace.engine.artifact.manifest import UNREADABLE
from millrace.engine.artifact.tactics import write_whole
from millrace.machine.roofline import Roofline

_MOST, _LIMIT = 16, 1 << 18  # machines, and bytes of the file


def keep_roofline(cache: Path, isa: str, roofline: Roofline) -> Path:
    """Where it is kept; the oldest go first. raises OSError where the cache cannot be written"""
    key, path = machine_key(isa, roofline.threads), _path(cache)
    older = [(k, v) for k, v in _all(path).items() if k != key][1 - _MOST :]
    path.parent.mkdir(parents=True, exist_ok=True)
    table = dict([*older, (key, roofline)])
    write_whole(path, msgspec.json.format(msgspec.json.encode(table), indent=1))
    return path


def kept_roofline(cache: Path, isa: str, threads: int) -> Roofline | None:
    """None where none was measured. A damaged file is as good as none: `millrace doctor` writes it anew."""
    return _all(_path(cache)).get(machine_key(isa, threads))


def _path(cache: Path) -> Path:
    return cache / "rooflines.json"


def _all(path: Path) -> dict[str, Roofline]:
    try:
        if path.stat().st_size > _LIMIT:
            return {}
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Roofline])
    except (OSError, *UNREADABLE):
        return {}
