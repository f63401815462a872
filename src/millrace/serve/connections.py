"""What one connection may take: its head, its silence, what it leaves unread; and how many there may be.

uvicorn speaks HTTP; here is what it leaves open. Nothing is done per token or per write: `Connections.sweep` looks at
all connections twice a second.
"""

import contextlib
import enum
import http
import logging
import resource
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from millrace.serve.errors import HttpError, problem_of
from millrace.serve.logs import Seldom

MAX_HEAD_BYTES = 64 * 1024  # request line and headers
LINGER_S = 2.0  # what a refused client still sends is read for so long, or it would lose the refusal
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


class Connections:
    """All connections of one server."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.seldom = Seldom(log)
        self._open: dict[Connection, None] = {}  # in the order in which they came
        self._refused: dict[Connection, None] = {}

    def protocol(self, **given: Any) -> "Connection":
        """What uvicorn makes for each connection."""
        return Connection(self, **given)

    def admit(self, connection: "Connection") -> bool:
        """Where there is no room, the connection that has waited for a request the longest is closed, as in nginx.

        Where none waits, it is the one whose request has been incomplete the longest.
        """
        if len(self._open) >= self.limits.max_connections:
            waiting = _longest(c for c in self._open if c.is_waiting) or _longest(
                c for c in self._open if c.is_incomplete
            )
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
        return True

    def leave(self, connection: "Connection") -> None:
        self._open.pop(connection, None)
        self._refused.pop(connection, None)

    def _end_refused(self) -> None:
        """One that was told, and is only listened to so that it hears it, makes place for one that was not."""
        told = next((c for c in self._refused if c.is_refused), None) or next(iter(self._refused))
        self.leave(told)
        told.end()

    def sweep(self) -> None:
        """End what takes too long, and the laziest readers where all of them together hold too much."""
        now_s, unread = time.monotonic(), 0
        readers: list[Connection] = []
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


def _longest(connections: Iterable["Connection"]) -> "Connection | None":
    """That which has waited for its client the longest."""
    return min(connections, key=lambda c: c.since_s, default=None)


class _Reading(enum.Enum):
    """What the parser expects next."""

    START = enum.auto()  # of a request
    HEAD = enum.auto()
    BODY = enum.auto()
    NOTHING = enum.auto()  # the connection was refused: what still comes is thrown away


_UPGRADE = frozenset((b"upgrade", b"http2-settings"))  # headers, and what the header `connection` says of them


class _Parser(httptools.HttpRequestParser):
    """Does not stop at `upgrade: h2c` (`curl --http2`): what offers another protocol is answered in this one.

    The parser takes whatever follows such a head for that protocol, so it is given the head again without the offer.
    """

    def __init__(self, connection: "Connection") -> None:
        super().__init__(connection)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._connection = connection

    def feed_data(self, data: Any) -> None:
        parser: httptools.HttpRequestParser = self
        while True:
            try:
                httptools.HttpRequestParser.feed_data(parser, data)
                return
            except httptools.HttpParserUpgrade as offer:
                head = self._connection.head_without_upgrade()
                if head is None:
                    raise
                data = head + data[offer.args[0] :]
                parser = self._connection.parser = _Parser(self._connection)  # this one may be at its end


class Connection(HttpToolsProtocol):
    """uvicorn's, with limits."""

    def __init__(self, all_of_them: Connections, **given: Any) -> None:
        super().__init__(**given)
        self.parser = _Parser(self)
        self._all, self._limits = all_of_them, all_of_them.limits
        self._reading = _Reading.START
        self._head_bytes = self._n_heads = 0  # bytes of this head; heads so far
        self._trailer_bytes = 0  # of this body: headers behind it, and what came since its last content
        self._understood = False  # whether the parser made something of the last packet
        self._admitted = True
        self.since_s = 0.0  # time.monotonic(): the beginning of what is being waited for
        self.n_unread = 0  # bytes of replies that the client has not taken, at the last sweep
        self.unread_since_s = 0.0  # when it last took some

    # ------------------------------------------------------------------ asyncio's

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.since_s = time.monotonic()
        self._admitted = self._all.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._all.leave(self)

    def data_received(self, data: bytes) -> None:
        if self._reading is _Reading.NOTHING or self.transport.is_closing():
            return
        if not self._admitted:
            self._refuse(503, "too_many_connections", "all connections are in use", "fewer at a time")
            return
        this_head = self._n_heads + (self._reading is _Reading.START)
        in_body, self._understood = self._reading is _Reading.BODY, False
        super().data_received(data)
        if in_body and self._reading is _Reading.BODY and not self._understood:  # a line without an end
            self._add_trailer(len(data))
        if self._reading is _Reading.HEAD and self._n_heads == this_head:  # it holds nothing else
            self._head_bytes += len(data)
            self._check_head(self._head_bytes)

    # ------------------------------------------------------------------ the parser's

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._reading is not _Reading.NOTHING:
            self._reading, self._head_bytes, self.since_s = _Reading.HEAD, 0, time.monotonic()
            self._n_heads += 1

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading is _Reading.HEAD:
            super().on_header(name, value)
        elif self._reading is _Reading.BODY:  # behind the body, where nobody looks at it
            self._add_trailer(len(name) + len(value) + 4)

    def on_headers_complete(self) -> None:
        if self._reading is _Reading.HEAD:
            self._check_head(len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers))
        if self._reading is _Reading.HEAD and not self._is_offer:  # still: it was not refused
            self._reading, self._trailer_bytes = _Reading.BODY, 0
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._reading is _Reading.BODY:
            self._understood, self._trailer_bytes = True, 0
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._reading is _Reading.BODY:
            self._reading, self.since_s = _Reading.START, time.monotonic()
            super().on_message_complete()

    # ------------------------------------------------------------------ uvicorn's

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.since_s = time.monotonic()

    def send_400_response(self, msg: str) -> None:
        if self._reading is not _Reading.NOTHING:
            self._refuse(400, "invalid_http", "this is not HTTP", "HTTP/1.1 requests")

    # ------------------------------------------------------------------ ours

    @property
    def _is_offer(self) -> bool:
        """To speak another protocol; a tunnel is none, and is told that there is no such method."""
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def head_without_upgrade(self) -> bytes | None:
        """The head that was just read, for HTTP/1.1; None where nobody will answer it."""
        if self._reading is not _Reading.HEAD or not self._is_offer:
            return None
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                value = b",".join(token for token in value.split(b",") if token.strip().lower() not in _UPGRADE)
            if name not in _UPGRADE:
                lines.append(name + b": " + value)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    @property
    def is_waiting(self) -> bool:
        """No request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_incomplete(self) -> bool:
        """It sends a body, of which a part is missing, while nothing in front of it is being answered."""
        return self._reading is _Reading.BODY and not self.pipeline

    @property
    def is_refused(self) -> bool:
        """It was told so."""
        return self._reading is _Reading.NOTHING

    def check(self, now_s: float) -> None:
        """Once in a while: has this waited too long?"""
        n_unread = self.transport.get_write_buffer_size()
        if not n_unread or n_unread < self.n_unread or not self.n_unread:
            self.unread_since_s = now_s
        self.n_unread = n_unread
        if n_unread and now_s - self.unread_since_s > self._limits.write_timeout_s:
            self._all.seldom.warn("a reader took nothing for too long, so that its connection is closed")
            self.abort()
        elif self.is_waiting and not self.transport.is_closing():
            self._check_silence(now_s - self.since_s)

    def end(self) -> None:
        """Close; what the client has not taken so far is lost."""
        if self.transport.get_write_buffer_size():
            self.abort()
        else:
            self.transport.close()

    def abort(self) -> None:
        """Close at once, and forget what is unread, in the kernel too: otherwise it would keep megabytes of it."""
        with contextlib.suppress(OSError):  # the other side was quicker
            same = socket.socket(fileno=self.transport.get_extra_info("socket").fileno())
            try:
                same.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            finally:
                same.detach()  # or it would be closed with `same`
        self.transport.abort()

    def _check_silence(self, silent_s: float) -> None:
        limits = self._limits
        match self._reading:
            case _Reading.HEAD if silent_s > limits.header_timeout_s:
                self._refuse(408, "header_timeout", "the headers did not come", f"all in {limits.header_timeout_s:g} s")
            case _Reading.START if not self._admitted and silent_s > LINGER_S:
                self.transport.close()
            case _Reading.START if self.cycle is None and silent_s > limits.header_timeout_s:
                self._all.seldom.warn("a connection without a request was closed")
                self.transport.close()
            case _Reading.START if silent_s > limits.keep_alive_s:
                self.transport.close()
            case _Reading.BODY | _Reading.NOTHING if silent_s > LINGER_S:  # it was answered before it was complete
                self.transport.close()

    def _add_trailer(self, n_bytes: int) -> None:
        self._understood = True
        self._trailer_bytes += n_bytes
        self._check_head(self._trailer_bytes)

    def _check_head(self, n_bytes: int) -> None:
        if n_bytes > MAX_HEAD_BYTES:
            self._refuse(431, "headers_too_large", "the headers are too large", f"at most {MAX_HEAD_BYTES} bytes")

    def _refuse(self, status: int, code: str, what: str, expected: str) -> None:
        """Answer without a request, and read no other."""
        self._all.seldom.warn(f"{status} {code}: {what}")
        self._reading, self.since_s = _Reading.NOTHING, time.monotonic()
        if not self.is_waiting:  # its answer is under way, and can only be cut off
            self.abort()
            return
        refusal = HttpError(status, code, what, expected, "open a new connection for the next request")
        body = problem_of(refusal, accepting=True).body()
        head = (
            f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        transport = self.transport
        transport.write(head.encode() + body)
        if transport.can_write_eof():
            transport.write_eof()
        self._unset_keepalive_if_required()
