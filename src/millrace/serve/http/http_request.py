"""HTTP plumbing of one request: parsing and checks of its head, its context, and its access-log line."""

import asyncio
import json
import logging
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, AnyStr, Protocol

import httptools
from starlette.types import Scope

from millrace.serve.http.errors import HttpError

ACCESS = "millrace.serve.access"  # the logger of requests
LOG_ATTRIBUTE = "request"  # attribute of a LogRecord that carries a RequestLog, or Lines of them
EVENT_STREAM = b"text/event-stream; charset=utf-8"  # the content type of server-sent events
UNBUFFERED = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))  # nginx would hold events back
LOG_DELAY_S, MAX_BUFFERED_LINES = 0.1, 500
PIECE_BYTES = 256 * 1024  # of a long response, written at once
QUIET_PATHS = (
    "/health", "/v1/health/", "/v2/health/", "/metrics", "/v1/metrics", "/grpc.health.v1.Health/",
    "/inference.GRPCInferenceService/ServerLive", "/inference.GRPCInferenceService/ServerReady",
)  # fmt: skip  # asked every few seconds: logged at DEBUG
_RANDOM = random.Random()  # for ids: users of the global generator in this process may have seeded it
_SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")  # nothing that could break a header or a log line
_PLAIN = re.compile(r"[!-~]+")
_UPGRADE = frozenset((b"upgrade", b"http2-settings"))  # headers, and what the header `connection` says of them


@dataclass(slots=True)
class RequestLog:
    """The access-log line of one request, without its text; None: does not apply."""

    method: str
    path: str  # as it was sent, percent signs and all, so that it cannot break the line
    request_id: str
    status: int | None = None
    total_ms: float | None = None
    model: str | None = None
    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    queue_ms: float | None = None
    ttft_ms: float | None = None
    finish_reason: str | None = None
    ignored: str | None = None  # fields that change nothing here
    error: str | None = None  # the reason of a refusal, in short

    def to_dict(self) -> dict[str, object]:
        """Return the fields that apply, rounded."""
        values: dict[str, object] = {}
        for name in _NAMES:
            value = getattr(self, name)
            if value is not None:
                values[name] = round(value, 1) if isinstance(value, float) else value
        return values

    def __str__(self) -> str:
        values = self.to_dict()
        del values["method"], values["path"]
        return " ".join([self.method, self.path, *[f"{key}={_quote(value)}" for key, value in values.items()]])


_NAMES = tuple(f.name for f in fields(RequestLog))


def request_id_of(header_value: bytes | None) -> str:
    """Return a request's id: the value of its header x-request-id if it is valid, otherwise a new one."""
    return (
        header_value.decode()
        if header_value and _SANE_ID.fullmatch(header_value)
        else f"{_RANDOM.getrandbits(128):032x}"
    )


def _quote(value: object) -> object:
    """Quote text from clients so that it stays one value on one line: white space and control characters."""
    return json.dumps(value) if isinstance(value, str) and not _PLAIN.fullmatch(value) else value


def log_request(entry: RequestLog) -> None:
    quiet = entry.path.startswith(QUIET_PATHS) and (entry.status or 0) < 400
    level = logging.DEBUG if quiet else logging.INFO
    logging.getLogger(ACCESS).log(level, "%s", entry, extra={LOG_ATTRIBUTE: entry})


class BufferedRequestLog:
    """Log lines of very short requests, which are written together, at most LOG_DELAY_S late."""

    def __init__(self) -> None:
        self._lines: list[tuple[float, str, str, str | None, int, float, str]] = []
        self._logger = logging.getLogger(ACCESS)

    def add(
        self, method: str, path: str, request_id: str | None, status: int, total_ms: float, error: str = ""
    ) -> None:
        """Add a line; to be called in the event loop's thread. request_id: None if the client did not receive one"""
        if not self._logger.isEnabledFor(logging.INFO):
            return
        if not self._lines:
            asyncio.get_running_loop().call_later(LOG_DELAY_S, self.write)
        self._lines.append((time.time(), method, path, request_id, status, total_ms, error))
        if len(self._lines) >= MAX_BUFFERED_LINES:
            self.write()

    def write(self) -> None:
        if self._lines:
            rows, self._lines = self._lines, []
            random_hex = _RANDOM.getrandbits(128 * len(rows)).to_bytes(16 * len(rows)).hex()
            lines = BatchedRequestLogs(
                (row[0], row[1], row[2], row[3] or random_hex[32 * i : 32 * i + 32], row[4], row[5], row[6])
                for i, row in enumerate(rows)
            )
            self._logger.info("%s", lines, extra={LOG_ATTRIBUTE: lines})


Line = tuple[float, str, str, str, int, float, str]  # time.time(), method, path, id, status, total_ms, error


class BatchedRequestLogs(list[Line]):
    """The lines of short requests in one log record."""

    def __str__(self) -> str:
        return "\n".join(str(entry) for _, entry in self.entries())

    def entries(self) -> Iterator[tuple[float, RequestLog]]:
        for at_s, method, path, request_id, status, total_ms, error in self:
            yield at_s, RequestLog(method, path, request_id, status, total_ms, error=error or None)


class ParserOwner(Protocol):
    """The connection that owns a parser: its callbacks, and the head of a request that offers an upgrade."""

    parser: Any

    def head_without_upgrade(self) -> bytes | None:
        """Return the head that was just read, without its upgrade; None if the request was refused."""


class Parser(httptools.HttpRequestParser):
    """HTTP parser that ignores `upgrade: h2c` (`curl --http2`), so that such requests are answered with HTTP/1.1.

    httptools takes the bytes after such a head for the other protocol, so it gets the head again without the offer.
    """

    def __init__(self, connection: ParserOwner) -> None:
        super().__init__(connection)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._connection = connection

    def feed_data(self, data: Any) -> None:
        """Parse data, which should be a small piece, because what follows an upgrade offer is copied."""
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
                parser = self._connection.parser = Parser(self._connection)  # this one may be at its end


def without_upgrade(request_line: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the head of a request without its upgrade offer."""
    lines = [request_line]
    for name, value in headers:
        if name == b"connection":
            value = b",".join(token for token in value.split(b",") if token.strip().lower() not in _UPGRADE)
        if name not in _UPGRADE:
            lines.append(name + b": " + value)
    return b"\r\n".join(lines) + b"\r\n\r\n"


def fault_of_head(version: str, headers: Sequence[tuple[bytes, bytes]]) -> tuple[int, str, str, str] | None:
    """Return status, code, fault and expectation of a head that the parser accepts and RFC 9112 (3.2, 6.1) forbids."""
    transfer_codings = b",".join(value for name, value in headers if name == b"transfer-encoding").split(b",")
    codings = [coding.strip().lower() for coding in transfer_codings if coding.strip()]
    if codings not in ([], [b"chunked"]):
        what = f"the transfer coding is {b', '.join(codings).decode('latin-1')}"
        return 501, "unknown_transfer_coding", what, "chunked, or none"
    n_hosts = sum(name == b"host" for name, _ in headers)
    if n_hosts > 1 or (version == "1.1" and not n_hosts):
        return 400, "invalid_host", f"the request has {n_hosts or 'no'} headers `host`", "one, with the server's name"
    return None


class CoalescingTransport:
    """Transport for one answer, which sends the head with the first part of the body if both come in the same turn."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        """close: closes the connection after the answer"""
        self._transport, self._close = transport, close
        self._head: bytes | None = None
        self._has_begun = False

    def write(self, data: bytes) -> None:
        if not self._has_begun:
            self._has_begun, self._head = True, data
            asyncio.get_running_loop().call_soon(self._flush)
            return
        if self._head is not None:
            data, self._head = self._head + data, None
        self._transport.write(data)

    def _flush(self) -> None:
        if self._head is not None:
            data, self._head = self._head, None
            self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


CALL = "millrace.call"  # where the edge leaves the Call in the ASGI scope


@dataclass(slots=True)
class RequestContext:
    """The context of one HTTP request for its handler."""

    id: str  # x-request-id
    arrived_s: float  # time.perf_counter()
    log: RequestLog
    body_bytes: int = 0
    ignored: tuple[str, ...] = ()  # fields of the request that change nothing
    names: Mapping[str, str] = field(default_factory=dict)  # once it is read: our fields -> as its client knows them
    model: str = ""  # the requested name, or that of the model which answers
    tenant: str = ""  # name of its API key, if there are several keys
    is_admin: bool = False  # its key may see all requests, and change every model
    ended: Callable[[int], None] | None = None  # called with the tokens used, for the limits of its API key


def header(scope: Scope, name: bytes) -> bytes | None:
    """Return the first header of a (lower-case) name, or None."""
    return next((value for key, value in scope["headers"] if key == name), None)


def combine_duplicate_headers(headers: Iterable[tuple[AnyStr, AnyStr]], comma: AnyStr) -> dict[AnyStr, AnyStr]:
    """Return headers by name; repeated ones are joined with commas (RFC 9110, 5.3).

    For a header that must come once, the result is invalid, as it should be.
    """
    combined: dict[AnyStr, AnyStr] = {}
    for name, value in headers:
        combined[name] = combined[name] + comma + value if name in combined else value
    return combined


def check_content_type(scope: Scope) -> None:
    """Check the content type. raises HttpError with 415 if it is not JSON, such as the form type of `curl -d`"""
    kind = (header(scope, b"content-type") or b"application/json").split(b";")[0].strip().lower()
    if kind != b"application/json" and not kind.endswith(b"+json"):
        raise HttpError(
            415,
            "unsupported_media_type",
            f"the content type is {kind.decode('latin-1')}",
            "application/json",
            "send the header content-type: application/json",
        )
