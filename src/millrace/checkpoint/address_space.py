"""Address space: what this process uses, and what its limit (`ulimit -v`) leaves.

Native tokenizer libraries end the process when an allocation fails, so a file that needs more is refused before they
see it.
"""

import resource
from pathlib import Path

from millrace.errors import CheckpointError

_STATM = Path("/proc/self/statm")  # Linux
_UNKNOWN_BYTES = 2 << 30  # in use, where the system does not tell
_BASE_BYTES = 16 << 20  # whatever the size of the file: tables of the library, and an allocator's step


def used_address_space() -> int | None:
    """Return the bytes of address space that this process uses; None where the system does not tell."""
    return int(_STATM.read_text().split()[0]) * resource.getpagesize() if _STATM.exists() else None


def limit_address_space(more_bytes: int) -> None:
    """Let this process take so many bytes more than it uses now; an allocation beyond that fails, or ends it."""
    limit = (used_address_space() or _UNKNOWN_BYTES) + more_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def check_address_space(data: bytes, per_byte: int, path: Path) -> None:
    """Check that the limit of address space (ulimit -v) leaves what reading the file takes.

    per_byte: address space that the library takes for each byte of the file
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
