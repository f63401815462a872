"""The table of a server's open connections: which are admitted, closed for new ones, or ended for being slow."""

import logging
import time
from collections import OrderedDict
from typing import Protocol

from millrace.serve.http.connection_limits import MAX_REFUSED, ConnectionLimits
from millrace.serve.ops.logs import RateLimitedLog

log = logging.getLogger(__name__)


class ConnectionView(Protocol):
    """The interface of a connection to the table."""

    since_s: float  # time.monotonic(): when the current wait began
    n_unread: int  # bytes of replies that the client had not read at the last sweep
    unread_since_s: float  # when it last read some

    @property
    def is_waiting(self) -> bool:
        """Return whether no request is being answered."""

    @property
    def is_incomplete(self) -> bool:
        """Return whether a part of the current request's body is missing, and no earlier request is being answered."""

    @property
    def is_refused(self) -> bool:
        """Return whether the refusal was sent."""

    def check(self, now_s: float) -> None:
        """Check the timeouts; called by the sweep."""

    def close_gracefully(self) -> None:
        """Close; unread data is lost."""

    def abort(self) -> None:
        """Close at once."""


class Connections:
    """The connections of one server."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.seldom = RateLimitedLog(log)
        self._open: dict[ConnectionView, None] = {}  # in the order in which they came
        # in the order of their since_s: ordered dictionaries, because a plain one scans removed entries for its first
        self._waiting: OrderedDict[ConnectionView, None] = OrderedDict()
        self._incomplete: OrderedDict[ConnectionView, None] = OrderedDict()  # of those that do not wait
        self._refused: dict[ConnectionView, None] = {}

    def admit(self, connection: ConnectionView) -> bool:
        """Admit a connection; if the table is full, close the one that has waited for a request the longest, as nginx.

        If none waits, close the one whose request has been incomplete the longest. This takes constant time, and a
        flood of connections takes none from those that are being answered.
        """
        if len(self._open) >= self.limits.max_connections:
            waiting = next(iter(self._waiting), None) or next(iter(self._incomplete), None)
            if waiting is None:
                self.seldom.warn("all connections are in use; new ones get a 503 (raise `ulimit -n`)")
                if len(self._refused) >= MAX_REFUSED:
                    self._close_refused()
                self._refused[connection] = None
                return False
            self.seldom.warn("all connections are in use; idle ones are closed (raise `ulimit -n`)")
            self.remove(waiting)
            waiting.close_gracefully()
        self._open[connection] = None
        self.touch(connection)
        return True

    def touch(self, connection: ConnectionView) -> None:
        """Move a connection to the end of its queue, because its wait has just begun."""
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

    def _close_refused(self) -> None:
        """Close a refused connection for a new one, preferably one that has received its refusal."""
        evicted = next((c for c in self._refused if c.is_refused), None) or next(iter(self._refused))
        self.remove(evicted)
        evicted.close_gracefully()

    def abort(self) -> None:
        """Abort all open connections, and discard unread data."""
        for connection in [*self._open, *self._refused]:
            connection.abort()

    def sweep(self) -> None:
        """End connections that take too long, and the slowest readers if unread replies exceed their bound."""
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
            self.seldom.warn("unread replies hold too much memory; their connections are closed")
            unread -= connection.n_unread
            connection.abort()
            if unread <= self.limits.max_unread_bytes:
                return
