"""Limits of connections: their number, from the process's file limit, and their timeouts."""

import logging
import resource
from dataclasses import dataclass
from pathlib import Path

MAX_REFUSED = 8  # connections over the limit that wait for their 503
RESERVED_FILES = 24  # sockets of tokeniser processes, and files that are opened briefly
MAX_CONNECTIONS = 4096  # by default, even if the file limit allows more
log = logging.getLogger(__name__)


def number_of_connections(max_connections: int | None) -> int:
    """Return the requested number, or MAX_CONNECTIONS; fewer if the file limit is too low."""
    limit, max_files = max_connections or MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if max_files == resource.RLIM_INFINITY:
        return limit
    n_open = sum(1 for _ in Path("/dev/fd").iterdir())
    room = max(4, max_files - n_open - RESERVED_FILES - MAX_REFUSED)
    if max_connections is not None and room < max_connections:
        log.warning("max_connections is %d, but there are files for %d (raise `ulimit -n`)", max_connections, room)
    return min(limit, room)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    max_connections: int
    header_timeout_s: float
    keep_alive_s: float
    write_timeout_s: float
    max_unread_bytes: int  # of all replies together that wait for their readers
