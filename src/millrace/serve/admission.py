"""How many connections there may be, which of them gives way to a new one, and what all of them together may hold."""

import logging
import resource
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from millrace.serve.logs import Seldom

MAX_REFUSED = 8  # connections over the limit that wait for their 503
RESERVED_FILES = 24  # sockets of processes for texts, files that are opened for a moment
MAX_CONNECTIONS = 4096  # where there are files for more
log = logging.getLogger(__name__)


def number_of_connections(asked: int | None) -> int:
    """As many as were asked for, or MAX_CONNECTIONS; fewer where there are no files left for so many."""
    wanted, most_files = asked or MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if most_files == resource.RLIM_INFINITY:
        return wanted
    n_open = sum(1 for _ in Path("/dev/fd").iterdir())
    room = max(4, most_files - n_open - RESERVED_FILES - MAX_REFUSED)
    if asked is not None and room < asked:
        log.warning("max_connections is %d, but there are files for %d (raise `ulimit -n`)", asked, room)
    return min(wanted, room)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    max_connections: int
    header_timeout_s: float
    keep_alive_s: float
    write_timeout_s: float
    max_unread_bytes: int  # of all replies together that wait for their readers


class Guest(Protocol):
    """A connection, as far as others are concerned."""

    since_s: float  # time.monotonic(): the beginning of what is being waited for
    n_unread: int  # bytes of replies that the client has not taken, at the last sweep
    unread_since_s: float  # when it last took some

    @property
    def is_waiting(self) -> bool:
        """No request is being answered."""

    @property
    def is_incomplete(self) -> bool:
        """It sends a body, of which a part is missing, while nothing in front of it is being answered."""

    @property
    def is_refused(self) -> bool:
        """It was told so."""

    def check(self, now_s: float) -> None:
        """Once in a while: has this waited too long?"""

    def end(self) -> None:
        """Close; what the client has not taken so far is lost."""

    def abort(self) -> None:
        """Close at once."""


class Connections:
    """All connections of one server."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.seldom = Seldom(log)
        self._open: dict[Guest, None] = {}  # in the order in which they came
        # in the order of their since_s: ordered dictionaries, for a plain one looks at all that left before its first
        self._waiting: OrderedDict[Guest, None] = OrderedDict()
        self._incomplete: OrderedDict[Guest, None] = OrderedDict()  # of those that do not wait
        self._refused: dict[Guest, None] = {}

    def admit(self, connection: Guest) -> bool:
        """Where there is no room, the connection that has waited for a request the longest is closed, as in nginx.

        Where none waits, it is the one whose request has been incomplete the longest. Constant time: a flood of
        connections takes none from those that are answered.
        """
        if len(self._open) >= self.limits.max_connections:
            waiting = next(iter(self._waiting), None) or next(iter(self._incomplete), None)
            if waiting is None:
                self.seldom.warn("all connections are in use, so that new ones get a 503 (raise `ulimit -n`)")
                if len(self._refused) >= MAX_REFUSED:
                    self._end_refused()
                self._refused[connection] = None
                return False
            self.seldom.warn("all connections are in use, so that waiting ones are closed (raise `ulimit -n`)")
            self.leave(waiting)
            waiting.end()
        self._open[connection] = None
        self.changed(connection)
        return True

    def changed(self, connection: Guest) -> None:
        """Its since_s is now: it has waited, or been incomplete, for the shortest time of all."""
        self._waiting.pop(connection, None)
        self._incomplete.pop(connection, None)
        if connection not in self._open:
            return
        if connection.is_waiting:
            self._waiting[connection] = None
        elif connection.is_incomplete:
            self._incomplete[connection] = None

    def leave(self, connection: Guest) -> None:
        for group in (self._open, self._waiting, self._incomplete):
            group.pop(connection, None)
        self._refused.pop(connection, None)

    def _end_refused(self) -> None:
        """One that was told, and is only listened to so that it hears it, makes place for one that was not."""
        told = next((c for c in self._refused if c.is_refused), None) or next(iter(self._refused))
        self.leave(told)
        told.end()

    def abort(self) -> None:
        """Whatever is still open, and all that is unread."""
        for connection in [*self._open, *self._refused]:
            connection.abort()

    def sweep(self) -> None:
        """End what takes too long, and the laziest readers where all of them together hold too much."""
        now_s, unread = time.monotonic(), 0
        readers: list[Guest] = []
        for connection in [*self._open, *self._refused]:
            connection.check(now_s)
            if connection.n_unread:
                unread += connection.n_unread
                readers.append(connection)
        if unread <= self.limits.max_unread_bytes:
            return
        for connection in sorted(readers, key=lambda c: c.unread_since_s):
            self.seldom.warn("replies that nobody reads hold too much memory, so that their connections are closed")
            unread -= connection.n_unread
            connection.abort()
            if unread <= self.limits.max_unread_bytes:
                return
