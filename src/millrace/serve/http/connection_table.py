"""The table of a server's open connections: which are admitted, closed for new ones, or ended for being slow."""

import logging
import time
from collections import OrderedDict
from typing import Protocol

from millrace.serve.http.connection_limits import MAX_REFUSED, ConnectionLimits
from millrace.serve.ops.logs import RateLimitedLog

log = logging.getLogger(__name__)


class ConnectionView(Protocol):
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

    def close_gracefully(self) -> None:
        """Close; what the client has not taken so far is lost."""

    def abort(self) -> None:
        """Close at once."""


class Connections:
    """All connections of one server."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.seldom = RateLimitedLog(log)
        self._open: dict[ConnectionView, None] = {}  # in the order in which they came
        # in the order of their since_s: ordered dictionaries, for a plain one looks at all that left before its first
        self._waiting: OrderedDict[ConnectionView, None] = OrderedDict()
        self._incomplete: OrderedDict[ConnectionView, None] = OrderedDict()  # of those that do not wait
        self._refused: dict[ConnectionView, None] = {}

    def admit(self, connection: ConnectionView) -> bool:
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
            self.remove(waiting)
            waiting.close_gracefully()
        self._open[connection] = None
        self.touch(connection)
        return True

    def touch(self, connection: ConnectionView) -> None:
        """Its since_s is now: it has waited, or been incomplete, for the shortest time of all."""
        self._waiting.pop(connection, None)
        self._incomplete.pop(connection, None)
        if connection not in self._open:
            return
        if connection.is_waiting:
            self._waiting[connection] = None
        elif connection.is_incomplete:
            self._incomplete[connection] = None

    def remove(self, connection: ConnectionView) -> None:
        for group in (self._open, self._waiting, self._incomplete):
            group.pop(connection, None)
        self._refused.pop(connection, None)

    def _end_refused(self) -> None:
        """One that was told, and is only listened to so that it hears it, makes place for one that was not."""
        evicted = next((c for c in self._refused if c.is_refused), None) or next(iter(self._refused))
        self.remove(evicted)
        evicted.close_gracefully()

    def abort(self) -> None:
        """Whatever is still open, and all that is unread."""
        for connection in [*self._open, *self._refused]:
            connection.abort()

    def sweep(self) -> None:
        """End what takes too long, and the laziest readers where all of them together hold too much."""
        now_s, unread = time.monotonic(), 0
        readers: list[ConnectionView] = []
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
