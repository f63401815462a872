"""Address space: how much this process uses, and how much its limit (`ulimit -v`) leaves.

Native tokenizer libraries abort the process if an allocation fails, so a file that needs too much memory is refused
before they read it.
"""

import resource
from pathlib import Path

from millrace.errors import CheckpointError

_STATM = Path("/proc/self/statm")  # Linux
_UNKNOWN_BYTES = 2 << 30  # assumed to be in use if the system does not report it
_BASE_BYTES = 16 << 20  # independent of the file's size: the library's tables, and the step of an allocator


def used_address_space() -> int | None:
    """Return the bytes of address space that this process uses; None if the system does not report it."""
    return int(_STATM.read_text().split()[0]) * resource.getpagesize() if _STATM.exists() else None


def limit_address_space(more_bytes: int) -> None:
    """Let this process allocate `more_bytes` beyond its current use; a larger allocation fails or aborts it."""
    limit = (used_address_space() or _UNKNOWN_BYTES) + more_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def check_address_space(data: bytes, per_byte: int, path: Path) -> None:
    """Check that the limit on address space (ulimit -v) leaves enough to read the file.

    per_byte: address space that the library uses per byte of the file
    raises CheckpointError
    """
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY or (used := used_address_space()) is None:
        return
    needed = _BASE_BYTES + per_byte * len(data)
    if limit - used < needed:
        raise CheckpointError(
            f"{path} cannot be read: the limit of {limit >> 20} MiB of address space leaves "
            f"{max(limit - used, 0) >> 20} MiB",
            f"{needed >> 20} MiB",
            "raise the limit (ulimit -v), or remove it",
        )
