"""HTTP client of the load generator: timestamps every chunk on arrival, at low CPU cost.

Bytes go from the socket through a C HTTP parser into typed JSON, without tasks or queues in between
(tests/bench/test_cost.py measures the cost). Everything that a server may send is bounded.
"""

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import cast
from urllib.parse import SplitResult, quote, urlsplit

import httptools
import msgspec

from millrace.bench.client.endpoints import PAGE, BenchEndpoint
from millrace.bench.client.request_record import BenchRecord, BenchRequest, Failure, request_ids
from millrace.errors import ConfigError

_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # what msgspec raises for such bytes
MAX_ANSWER_BYTES, MAX_HEAD_BYTES, MAX_EVENT_BYTES = 256 << 20, 64 << 10, 1 << 20
CONNECT_S = 10.0
_SHOWN = 500  # bytes of an error's body
OnText = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """The server and protocol to send requests to. url: of the server, with or without a trailing /v1"""

    url: str
    endpoint: BenchEndpoint
    model: str = ""
    streamed: bool = True
    each_usage: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 600.0
    keep_text: bool = False
    max_bytes: int | None = None  # of an answer, where it is less than MAX_ANSWER_BYTES

    @property
    def path(self) -> str:
        """Return the path of the endpoint. raises ConfigError if it contains a model name and there is none"""
        if "{model}" in self.endpoint.path and not self.model:
            raise ConfigError(f"--endpoint {self.endpoint.name} without a model", "--model", "give its name")
        path = self.endpoint.path.format(model=quote(self.model, safe=""))
        return path + self.endpoint.stream_suffix if self.streamed else path

    @property
    def streams(self) -> bool:
        """Whether answers are streamed token by token."""
        return self.streamed and self.endpoint.streams

    @property
    def place(self) -> SplitResult:
        """Parse the URL. raises ConfigError"""
        url = self.url if "://" in self.url else f"http://{self.url}"
        try:
            place = urlsplit(url)
            usable = place.scheme in ("http", "https") and bool(place.hostname) and place.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise ConfigError(f'the URL is "{self.url}"', "http://HOST:PORT or https://HOST", "write it so")
        return place

    def head(self, method: str = "POST", path: str | None = None) -> bytes:
        """Return the request line and common headers. path: instead of the endpoint's"""
        place = self.place
        base = place.path.rstrip("/").removesuffix("/v1").removesuffix("/v2")
        fields = {"host": place.netloc.rpartition("@")[2], "content-type": "application/json", **self.headers}
        for name, value in fields.items():
            if not (name + value).isprintable() or not (name + value).isascii():
                raise ConfigError(f'the header "{name}: {value}"', "printable ASCII", "correct it")
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"{method} {base}{self.path if path is None else path} HTTP/1.1\r\n{lines}".encode()


class Client:
    """A pool of connections to one server. `async with Client(target) as client:`"""

    def __init__(self, target: BenchTarget) -> None:
        self.target, self._head = target, target.head()
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._ids = request_ids()

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in list(self._open):
            connection.close()
        await asyncio.sleep(0)  # transports close in the loop's next turn

    async def ask(
        self, question: BenchRequest, answer: BenchRecord | None = None, on_text: OnText | None = None
    ) -> BenchRecord:
        """Send one request and read its answer to the end. Failures are in the answer; only cancellation raises.

        answer: the record to fill, if the caller wants what arrived before a cancellation
        """
        target = self.target
        body = target.endpoint.request(target.model, question, target.streamed, target.each_usage)
        return await self.send(answer or BenchRecord(), body, on_text=on_text)

    async def send(
        self, answer: BenchRecord, body: bytes, more: bytes = b"", on_text: OnText | None = None
    ) -> BenchRecord:
        """Send a request with a given body. more: additional header lines"""
        lines = b"%b%bcontent-length: %d\r\n" % (self._head, more, len(body))
        return await self._sent(answer, self.target, lines, body, on_text)

    async def get(self, path: str, timeout_s: float, max_bytes: int | None = None) -> BenchRecord:
        """Get another page of the server; its body is the text of the answer."""
        target = replace(self.target, endpoint=PAGE, streamed=False, keep_text=True)
        page = replace(target, timeout_s=timeout_s, max_bytes=max_bytes)
        return await self._sent(BenchRecord(), page, page.head("GET", path))

    async def _sent(
        self, answer: BenchRecord, target: BenchTarget, lines: bytes, body: bytes = b"", on_text: OnText | None = None
    ) -> BenchRecord:
        answer.id = next(self._ids)
        head = b"%bx-request-id: %b\r\n\r\n" % (lines, answer.id.encode())
        answer.sent_s = time.perf_counter()
        answer.intended_s = answer.intended_s or answer.sent_s
        again = True
        while again:
            connection = await self._connection(answer)
            if connection is None:
                break
            reused, connection.used = connection.used, True
            await connection.exchange(_Exchange(answer, target, on_text), (head, body))
            # a pooled connection that the server had just closed: no part of the request was answered
            again = reused and answer.failure is Failure.BROKEN_OFF and not answer.status
            if again:
                answer.failure, answer.detail, answer.end_s = None, "", 0.0
        answer.end_s = answer.end_s or time.perf_counter()
        return answer

    async def _connection(self, answer: BenchRecord) -> "_Connection | None":
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        place = self.target.place
        port = place.port or (443 if place.scheme == "https" else 80)
        secure = ssl.create_default_context() if place.scheme == "https" else None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._idle, self._open), place.hostname or "", port, ssl=secure
                )
        except TimeoutError:
            answer.fail(Failure.UNREACHABLE, f"no connection within {CONNECT_S:g} s")
            return None
        except OSError as error:  # refused, unknown host, a certificate that does not fit
            answer.fail(Failure.UNREACHABLE, f"{type(error).__name__}: {error}")
            return None
        return connection


class _Exchange:
    """One request on a connection; collects what arrives in its record."""

    def __init__(self, answer: BenchRecord, target: BenchTarget, on_text: OnText | None) -> None:
        self.answer, self.done = answer, asyncio.get_running_loop().create_future()
        self._endpoint, self.timeout_s, self._max_bytes = (
            target.endpoint,
            target.timeout_s,
            target.max_bytes or MAX_ANSWER_BYTES,
        )
        self._on_text, self._keep_text = on_text, target.keep_text or on_text is not None
        self._is_stream = target.streamed and target.endpoint.streams
        self._to_the_end, self.is_complete = True, False  # to the connection's end, unless the head says otherwise
        self._streams = self._is_stream
        self._rest = bytearray()  # of a body that is not streamed, or the beginning of an event's line
        self._n_bytes = 0

    def fail(self, failure: Failure, detail: str) -> None:
        self.answer.fail(failure, detail)
        self.finish()

    def finish(self) -> None:
        if not self.done.done():
            self.answer.end_s = self.answer.end_s or time.perf_counter()
            self.done.set_result(None)

    def on_interim(self) -> None:
        """Discard the headers of an interim response (100, 102, 103)."""
        self._to_the_end, self._is_stream, self.answer.n_json = True, self._streams, None

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type" and value.lower().startswith(b"application/json"):
            self._is_stream = False
        elif name in (b"content-length", b"transfer-encoding"):
            self._to_the_end = False
        elif name == b"inference-header-content-length":
            self.answer.n_json = int(value) if value.isdigit() and len(value) < 16 else None

    def on_body(self, body: bytes, at_s: float) -> None:
        self._n_bytes += len(body)
        if self._n_bytes > self._max_bytes:
            return self.fail(Failure.TOO_LARGE, f"an answer of more than {self._max_bytes} bytes")
        if not self._is_stream or self.answer.status != 200:
            self._rest += body
            return None
        if b"\n" in body:
            *lines, rest = (bytes(self._rest) + body).split(b"\n")
            self._rest[:] = rest
            for line in lines:
                if line.startswith(b"data:"):
                    self._on_event(line[5:].strip(), at_s)
        else:
            self._rest += body
        if len(self._rest) > MAX_EVENT_BYTES:
            self.fail(Failure.TOO_LARGE, f"an event of more than {MAX_EVENT_BYTES} bytes")
        return None

    def _on_event(self, data: bytes, at_s: float) -> None:
        if self.answer.failure is not None or data == b"[DONE]":
            return None
        try:
            text = self._endpoint.on_event(self.answer, data)
        except _NOT_JSON as error:
            return self.fail(Failure.MALFORMED, f"{error}: {_printable(data)}")
        if text is not None:
            self.answer.chunk_s.append(at_s)
            if self._keep_text:
                self.answer.text += text
            if self._on_text is not None:
                self._on_text(text)
        return None

    def on_close(self, detail: str) -> None:
        if self._to_the_end and self.answer.status:
            self.on_end(time.perf_counter())
        else:
            self.fail(Failure.BROKEN_OFF, f"the stream broke off, the connection was closed{detail}")

    def on_end(self, at_s: float) -> None:
        """Finish a message that was complete at `at_s`; parsing time is not attributed to the server."""
        answer, rest = self.answer, bytes(self._rest)
        answer.end_s = at_s
        if answer.status != 200:
            answer.fail(Failure.STATUS, f"status {answer.status}: {_printable(rest)}")
        elif not self._is_stream:
            self._take_body(rest)
        elif answer.finish_reason is None:
            answer.fail(Failure.BROKEN_OFF, "the stream broke off without a finish_reason")
        elif not answer.chunk_s:
            answer.fail(Failure.EMPTY, "the stream holds no token")
        self.is_complete = True
        self.finish()

    def _take_body(self, data: bytes) -> None:
        try:
            text = self._endpoint.on_body(self.answer, data)
        except _NOT_JSON as error:
            return self.fail(Failure.MALFORMED, f"{error}: {_printable(data)}")
        if self._endpoint.streams and text is None:
            self.answer.fail(Failure.EMPTY, f"the answer holds no text: {_printable(data)}")
        elif text is not None and self._keep_text:
            self.answer.text = text
        return None


class _Connection(asyncio.Protocol):
    """One connection with one exchange at a time. idle, open: pools of the client that it adds itself to"""

    def __init__(self, idle: "list[_Connection]", open_: "set[_Connection]") -> None:
        self._idle, self._open, self._at_s = idle, open_, 0.0
        self._transport: asyncio.Transport | None = None
        self._exchange: _Exchange | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self.used, self._n_head, self._is_interim = False, 0, False

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def exchange(self, exchange: _Exchange, request: Sequence[bytes]) -> None:
        """Run an exchange until its answer is complete or failed. Cancellation closes the connection."""
        assert self._transport is not None
        self._n_head = 0
        self._exchange, self._parser = exchange, httptools.HttpResponseParser(self)
        timer = asyncio.get_running_loop().call_later(exchange.timeout_s, self._too_late)
        try:
            exchange.answer.sent_s = time.perf_counter()
            self._transport.writelines(request)  # tensors are large: not joined
            await exchange.done
        finally:
            timer.cancel()
            self._exchange = None
            if exchange.is_complete and self.usable and self._parser.should_keep_alive():
                self._idle.append(self)
            else:
                self.close()

    def _too_late(self) -> None:
        if self._exchange is not None:
            self._exchange.fail(Failure.TIMEOUT, f"no whole answer within {self._exchange.timeout_s:g} s")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self._open.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._open.discard(self)
        if self._exchange is not None:
            detail = f": {type(error).__name__}: {error}" if error else ""
            self._exchange.on_close(detail)

    def data_received(self, data: bytes) -> None:
        self._at_s = time.perf_counter()
        exchange = self._exchange
        if exchange is None or self._parser is None or exchange.done.done():  # more than was asked for
            return self.close()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            exchange.fail(Failure.MALFORMED, f"not HTTP: {error}: {_printable(data)}")
        if not exchange.answer.status:
            self._n_head += len(data)
            if self._n_head > MAX_HEAD_BYTES:
                exchange.fail(Failure.TOO_LARGE, f"headers of more than {MAX_HEAD_BYTES} bytes")
        return None

    # callbacks of the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._exchange is not None:
            self._exchange.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._exchange is not None and self._parser is not None:
            status = self._parser.get_status_code()
            self._is_interim = 100 <= status < 200 and status != 101
            if self._is_interim:
                self._exchange.on_interim()
            else:
                self._exchange.answer.status = status

    def on_body(self, body: bytes) -> None:
        if self._exchange is not None:
            self._exchange.on_body(body, self._at_s)

    def on_message_complete(self) -> None:
        if self._exchange is not None and not self._is_interim:
            self._exchange.on_end(self._at_s)


def _printable(data: bytes) -> str:
    return data[:_SHOWN].decode(errors="replace")
