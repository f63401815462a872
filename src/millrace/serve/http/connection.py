"""Limits of one connection: size of its head, idle time, unread replies. `connection_table.py` limits their number.

uvicorn speaks HTTP; this adds what it leaves open. It derives from a class that uvicorn does not document, so
`pyproject.toml` allows only versions that the tests of this room have run with. Nothing is done per token or per write:
`Connections.sweep` checks all connections twice a second.
"""

import asyncio
import contextlib
import enum
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from millrace.serve.http.connection_table import Connections
from millrace.serve.http.errors import HttpError, problem_of
from millrace.serve.http.fast_path import FastPath, FastPathCycle
from millrace.serve.http.http_request import PIECE_BYTES, CoalescingTransport, Parser, fault_of_head, without_upgrade

MAX_HEAD_BYTES = 64 * 1024  # request line and headers
HEADER_BYTES = 32  # overhead counted per header, as in HTTP/2 (RFC 7541, 4.1): tiny headers take much memory
MAX_PIPELINED = 8  # requests of one connection that wait behind the one that is being answered
MAX_WAITING_BYTES = 64 * 1024  # of heads and bodies that came while others waited
FEED_BYTES = 16 * 1024  # to the parser at a time, as what it finds may be refused in the middle of a packet
HOLD_S = 0.05  # how long the fast path waits for the body after a head that it knows
LINGER_S = 2.0  # how long input of a refused client is still read; otherwise it would lose the refusal


class _ParserState(enum.Enum):
    """State of the parser: what it expects next."""

    START = enum.auto()  # of a request
    HEAD = enum.auto()
    BODY = enum.auto()
    NOTHING = enum.auto()  # the connection was refused: what still comes is thrown away


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP connection, with limits and a fast path."""

    def __init__(self, connections: Connections, fast_path: FastPath | None = None, **uvicorn_options: Any) -> None:
        super().__init__(**uvicorn_options)
        self._fast_path = fast_path
        self.parser = Parser(self)
        self._connections, self._limits = connections, connections.limits
        self._state = _ParserState.START
        self._head_bytes = self._n_heads = 0  # bytes of this head; heads so far
        self._field_bytes = self._waiting_bytes = 0  # of this head's headers; of requests behind others
        self._trailer_bytes = 0  # of this body: headers behind it, and what came since its last content
        self._parsed_something = False  # whether the parser made something of the last packet
        self._admitted = True
        self._head = b""  # that came alone: most clients send their body after it
        self._head_timer: asyncio.TimerHandle | None = None  # the usual path has not read `_head`, and will then
        self._running: RequestResponseCycle | None = None  # what is being answered; uvicorn's `cycle`: what came last
        self._is_half_closed = self._was_probed = False  # the client has closed its side; and was told that we are here
        self.since_s = 0.0  # time.monotonic(): the beginning of what is being waited for
        self.n_unread = 0  # bytes of replies that the client has not taken, at the last sweep
        self.unread_since_s = 0.0  # when it last took some

    # ------------------------------------------------------------------ asyncio's

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.since_s = time.monotonic()
        self._admitted = self._connections.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._head_timer is not None:
            self._take_head()
        self._abandon()
        super().connection_lost(exc)
        self._connections.remove(self)

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio asks for this; uvicorn gives nothing
        """Handle a half-closed connection: complete requests are still answered (`nc -N`)."""
        if self._head_timer is not None:
            self._read_head()
        http_1_1 = self._running is not None and self._running.scope["http_version"] == "1.1"  # see _look_for_client
        self._is_half_closed = http_1_1 and not self.is_waiting and not self.is_incomplete
        if self._is_half_closed:
            self._stop_reading()
        return self._is_half_closed

    def data_received(self, data: bytes) -> None:
        if self._head_timer is not None:
            data = self._take_head() + data
        if self._fast_path is None:
            self._read(data)
        elif (self._state, self.is_waiting) != (
            _ParserState.START,
            True,
        ):  # it is no begin, or others are in front of it
            head, self._head, n_heads = self._head, b"", self._n_heads
            self._read(data)
            if head:
                self._offer_to_fast_path(self._fast_path, head + data, n_heads)
        elif self._fast_path.expects_body(data):
            self._head, self._head_timer = data, self.loop.call_later(HOLD_S, self._read_head)
        elif not self._answer_by_fast_path(self._fast_path, data):
            n_heads = self._n_heads + 1
            self._read(data)
            if self.is_incomplete and self._n_heads == n_heads and data.endswith(b"\r\n\r\n"):
                self._head = data
            else:
                self._offer_to_fast_path(self._fast_path, data, n_heads)

    def _offer_to_fast_path(self, fast_path: FastPath, packet: bytes, n_heads: int) -> None:
        """Let the fast path remember what the normal path has just read, if that was exactly one request."""
        is_one = self._state is _ParserState.START and self._n_heads == n_heads and not self.pipeline
        if is_one and self.scope["http_version"] == "1.1":
            fast_path.remember(self.scope["method"], self.scope["raw_path"], self.headers, packet)

    def _take_head(self) -> bytes:
        assert self._head_timer is not None, "a head is held"
        self._head_timer.cancel()
        head, self._head, self._head_timer = self._head, b"", None
        return head

    def _read_head(self) -> None:
        """Hand a delayed head to the normal path, which waits for its body."""
        head = self._take_head()
        self._read(head)
        self._head = head if self._state is _ParserState.BODY else b""

    def _answer_by_fast_path(self, fast_path: FastPath, data: bytes) -> bool:
        if self.flow.write_paused or not self._admitted or self.transport.is_closing():
            return False
        response = fast_path.begin(data, self.server_state.default_headers, self)
        if response is None:
            return False
        if isinstance(response, bytes):
            self.transport.write(response)
            self.server_state.total_requests += 1
        else:
            self.cycle = self._running = cast(RequestResponseCycle, response)
        self._set_state(_ParserState.START)
        return True

    def send(self, answered: FastPathCycle, response: bytes) -> None:
        """As `ResponseWriter` has it."""
        self.transport.write(response)
        self._finish_response(answered)

    async def send_in_pieces(self, answered: FastPathCycle, head: bytes, body: bytes) -> None:
        """As `ResponseWriter` has it."""
        answered.response_started = True
        self.transport.write(head)
        for at in range(0, len(body), PIECE_BYTES):  # what the client has not taken is copied
            self.transport.write(body[at : at + PIECE_BYTES])
            await self.flow.drain()
            await asyncio.sleep(0)  # a client that takes it at once would hold up all others
            if answered.disconnected:
                return
        self._finish_response(answered)

    def _finish_response(self, answered: FastPathCycle) -> None:
        answered.response_started = answered.response_complete = True
        if not answered.keep_alive:
            self.transport.close()
        self.on_response_complete()

    def _read(self, data: bytes) -> None:
        if not self._admitted and not self.is_refused:
            self._refuse(503, "too_many_connections", "all connections are in use", "fewer at a time")
        for at in range(0, len(data), FEED_BYTES):
            if self._state is _ParserState.NOTHING or self.transport.is_closing():
                return
            self._feed(data[at : at + FEED_BYTES])

    def _feed(self, data: bytes) -> None:
        this_head = self._n_heads + (self._state is _ParserState.START)
        in_body, self._parsed_something = self._state is _ParserState.BODY, False
        super().data_received(data)
        if in_body and self._state is _ParserState.BODY and not self._parsed_something:  # a line without an end
            self._add_trailer(len(data))
        if self._state is _ParserState.HEAD and self._n_heads == this_head:  # it holds nothing else
            self._head_bytes += len(data)
            self._check_head(self._head_bytes)

    # ------------------------------------------------------------------ the parser's

    def on_message_begin(self) -> None:
        if self._state is not _ParserState.NOTHING:
            super().on_message_begin()
            self._head_bytes = self._field_bytes = 0
            self._n_heads += 1
            self._set_state(_ParserState.HEAD)

    def on_url(self, url: bytes) -> None:
        if self._state is _ParserState.HEAD:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._state is _ParserState.HEAD:
            super().on_header(name, value)
            self._field_bytes += len(name) + len(value) + HEADER_BYTES
            self._check_head(self._field_bytes)
        elif self._state is _ParserState.BODY:  # a trailer, which is ignored
            self._add_trailer(len(name) + len(value) + 4)

    def on_headers_complete(self) -> None:
        if self._state is _ParserState.HEAD:
            self._check_head(len(self.url) + self._field_bytes)
        if self._state is _ParserState.HEAD and self.parser.get_method() == b"CONNECT":
            self._refuse(405, "method_not_allowed", "this server is no proxy", "GET or POST")
        if self._state is _ParserState.HEAD and (fault := fault_of_head(self.parser.get_http_version(), self.headers)):
            self._refuse(*fault)
        if self._state is _ParserState.HEAD and not self.parser.should_upgrade():  # still: it was not refused
            if not self.is_waiting and not self._has_pipeline_room(len(self.url) + self._field_bytes):
                return
            super().on_headers_complete()
            self._trailer_bytes = 0
            self._set_state(_ParserState.BODY)
            if self.pipeline:
                self.flow.resume_reading()  # uvicorn would not read on, and so not notice that the client leaves

    def on_body(self, body: bytes) -> None:
        if self._state is not _ParserState.BODY:
            return
        self._parsed_something, self._trailer_bytes = True, 0
        if not self.pipeline or self._has_pipeline_room(len(body)):
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._state is _ParserState.BODY:
            super().on_message_complete()
            self._set_state(_ParserState.START)

    # ------------------------------------------------------------------ uvicorn's

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        cycle.transport = cast(asyncio.Transport, CoalescingTransport(self.transport, self._close_behind_answer))
        super()._start_asgi_task(cycle, app)

    def _close_behind_answer(self) -> None:
        """Close; if the client is still sending its body, read on for a while, so that it gets the answer."""
        if not self.is_incomplete or self.transport.is_closing() or not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.write_eof()
        self._set_state(_ParserState.NOTHING)

    def shutdown(self) -> None:
        """Close the connection once its answers are finished."""
        if self.is_waiting or self.is_incomplete:
            self.transport.close()
        else:
            self._stop_reading()

    def on_response_complete(self) -> None:
        if self.pipeline or self.transport.is_closing():
            super().on_response_complete()
        else:  # as uvicorn, but without its timer for each request: `Connections.sweep` closes idle connections
            self.server_state.total_requests += 1
            self.flow.resume_reading()
        self._set_state(self._state)

    def send_400_response(self, msg: str) -> None:
        if self._state is not _ParserState.NOTHING:
            self._refuse(400, "invalid_http", "this is not HTTP", "HTTP/1.1 requests")

    # ------------------------------------------------------------------ ours

    def head_without_upgrade(self) -> bytes | None:
        """Return the head that was just read, without its upgrade; None if the request was refused."""
        if self._state is not _ParserState.HEAD:
            return None
        version = self.parser.get_http_version().encode()
        return without_upgrade(b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version), self.headers)

    @property
    def is_waiting(self) -> bool:
        """Return whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.disconnected

    @property
    def is_incomplete(self) -> bool:
        """Return whether a part of the current request's body is missing, and no earlier request is being answered."""
        return self._state is _ParserState.BODY and not self.pipeline

    @property
    def is_refused(self) -> bool:
        """Return whether the refusal was sent."""
        return self._state is _ParserState.NOTHING

    def _set_state(self, state: _ParserState) -> None:
        """Set the parser's state, and restart the timeout."""
        self._state, self.since_s = state, time.monotonic()
        self._connections.touch(self)

    def check(self, now_s: float) -> None:
        """Check the timeouts; called by the sweep."""
        n_unread = self.transport.get_write_buffer_size()
        if not n_unread or n_unread < self.n_unread or not self.n_unread:
            self.unread_since_s = now_s
        self.n_unread = n_unread
        if n_unread and now_s - self.unread_since_s > self._limits.write_timeout_s:
            self._connections.seldom.warn("a reader took nothing for too long, so that its connection is closed")
            self.abort()
        elif self.is_waiting and not self.transport.is_closing():
            self._check_idle_time(now_s - self.since_s)
        elif self._is_half_closed:
            self._probe_half_closed_client()

    def close_gracefully(self) -> None:
        """Close; unread data is lost."""
        if self.transport.get_write_buffer_size():
            self.abort()
        else:
            self.transport.close()

    def abort(self) -> None:
        """Close at once, and discard unread data in the kernel, too, which would otherwise keep megabytes."""
        with contextlib.suppress(OSError), self._socket() as own:  # the other side was quicker
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    @contextlib.contextmanager
    def _socket(self) -> Iterator[socket.socket]:
        same = socket.socket(fileno=self.transport.get_extra_info("socket").fileno())
        try:
            yield same
        finally:
            same.detach()  # or it would be closed with `same`

    def _probe_half_closed_client(self) -> None:
        """Detect whether a half-closed client is gone: writing to it fails only then."""
        with contextlib.suppress(OSError), self._socket() as own:
            if own.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.abort()
                return
        if not self._was_probed and self._running is not None and not self._running.response_started:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._was_probed = True

    def _check_idle_time(self, silent_s: float) -> None:
        limits = self._limits
        match self._state:
            case _ParserState.HEAD if silent_s > limits.header_timeout_s:
                self._refuse(408, "header_timeout", "the headers did not come", f"all in {limits.header_timeout_s:g} s")
            case _ParserState.START if not self._admitted and silent_s > LINGER_S:
                self.transport.close()
            case _ParserState.START if self.cycle is None and silent_s > limits.header_timeout_s:
                self._connections.seldom.warn("a connection without a request was closed")
                self.transport.close()
            case _ParserState.START if silent_s > limits.keep_alive_s:
                self.transport.close()
            case _ParserState.BODY | _ParserState.NOTHING if (
                silent_s > LINGER_S
            ):  # it was answered before it was complete
                self.transport.close()

    def _abandon(self) -> None:
        """Cancel the running request, because the client does not wait for it any more."""
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def _has_pipeline_room(self, n_bytes: int) -> bool:
        """Return whether more bytes may wait behind the running request; if not, stop reading."""
        self._waiting_bytes = n_bytes + (self._waiting_bytes if self.pipeline else 0)
        in_head, n_waiting = self._state is _ParserState.HEAD, len(self.pipeline)
        if self._waiting_bytes <= MAX_WAITING_BYTES and n_waiting + in_head <= MAX_PIPELINED:
            return True
        self._connections.seldom.warn("too many requests came at once, so that only the first ones are answered")
        self._stop_reading()
        return False

    def _stop_reading(self) -> None:
        """Discard all further input. The requests so far are answered, then the connection closes."""
        if self._state is _ParserState.BODY and self.pipeline:  # an incomplete request that has not been started
            self.pipeline.popleft()
            assert self._running is not None
            self.cycle = self.pipeline[0][0] if self.pipeline else self._running
        if self.cycle is not None:
            self.cycle.keep_alive = False
        self._set_state(_ParserState.NOTHING)

    def _add_trailer(self, n_bytes: int) -> None:
        self._parsed_something = True
        self._trailer_bytes += n_bytes
        self._check_head(self._trailer_bytes)

    def _check_head(self, n_bytes: int) -> None:
        if n_bytes > MAX_HEAD_BYTES:
            self._refuse(431, "headers_too_large", "the headers are too large", f"at most {MAX_HEAD_BYTES} bytes")

    def _refuse(self, status: int, code: str, what: str, expected: str) -> None:
        """Answer with an error and stop reading; answers to earlier requests are not affected."""
        self._connections.seldom.warn(f"{status} {code}: {what}")
        is_own = (
            self._state is _ParserState.BODY and not self.pipeline
        )  # it is about the request that is being answered
        self._stop_reading()
        if is_own and self.cycle.response_complete:
            return  # what came was said already
        if is_own and self.cycle.response_started:  # it can only be cut off
            self.abort()
            return
        if is_own:
            self._abandon()
            self._set_state(_ParserState.NOTHING)
        elif not self.is_waiting:
            return
        refusal = HttpError(status, code, what, expected, "open a new connection for the next request")
        if status == 405:
            refusal.headers["allow"] = "GET, POST"
        self.transport.write(problem_of(refusal, accepting=True).raw_response(refusal.headers))
        if self.transport.can_write_eof():
            self.transport.write_eof()
