"""The fast path of inference requests over HTTP, for every backend: no HTTP parser, no task, no ASGI scope.

A client repeats the same HTTP head; only the body differs. A head that the normal path has parsed and admitted is
cached, byte for byte, with its meaning: model, lengths, credentials. A packet with the same head and a body of the
announced length is such a request. Its body is decoded and submitted to the model as on the normal path, and the
response is written when it is ready. Everything else takes the normal path: another head, a body in several packets or
above `UNCOUNTED_BODY_BYTES`, a stream, a request during tracing or while the server drains.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from millrace.errors import BusyError
from millrace.model_repository.execution.tracebacks import without_frames
from millrace.model_repository.models.model_version import Model, only_response
from millrace.model_repository.request.infer_request import InferRequest, InferResponse, TokenUsage
from millrace.model_repository.request.status_code import StatusError
from millrace.model_repository.request.tensors import memory_bytes
from millrace.serve.http.api_keys import ApiKeys, Grant
from millrace.serve.http.errors import BUG, CLIENT_CLOSED, HttpError, problem_of, status_line
from millrace.serve.http.fast_path import FastPath, ResponseWriter
from millrace.serve.http.http_request import PIECE_BYTES, RequestLog, log_request, request_id_of
from millrace.serve.http.request_bodies import UNCOUNTED_BODY_BYTES
from millrace.serve.http.server_context import OFF_LOOP_BODY, ServerContext
from millrace.serve.protocols.kserve.http import compression
from millrace.serve.protocols.kserve.http.frontend import (
    HttpReply,
    error_of,
    error_reply,
    header_length,
    infer_headers,
    parse_model_path,
)
from millrace.serve.protocols.kserve.http.infer_header_cache import InferHeader, InferHeaderCache
from millrace.serve.protocols.kserve.http.infer_request import HEADER
from millrace.serve.protocols.kserve.repository_backend import RepositoryBackend
from millrace.serve.protocols.kserve.routes import V2_PREFIX, pattern_of
from millrace.serve.protocols.kserve.shared_memory import regions_of_tenant

Header = tuple[bytes, bytes]
END, LENGTH, JSON_LENGTH, REQUEST_ID = b"\r\n\r\n", b"content-length", HEADER.lower().encode(), b"x-request-id"
MAX_HEADS, MAX_HEAD_BYTES = 1024, 2 << 10  # of one server: about 2 MiB
_MODELS = f"{V2_PREFIX}/models/".encode()
# Headers that change nothing here, or that are read below. A head with any other one takes the normal path.
_HARMLESS = frozenset((b"host", b"user-agent", b"accept", b"accept-encoding", b"content-type", LENGTH,
                       b"connection", b"authorization", b"x-api-key", REQUEST_ID, JSON_LENGTH))  # fmt: skip
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A parsed HTTP head of an inference request.

    n_body, n_json: bytes of the body, and of the JSON that begins it (None: all of it)
    """

    n_bytes: int
    name: str
    version: int | None
    n_body: int
    n_json: int | None
    path: str  # as the log has it
    route: str  # as the metrics call it
    coding: str  # of the response
    headers: Mapping[bytes, bytes]


class HeadCache:
    """HTTP heads of inference requests, of all connections of one server; the least recently used leave first."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: of a body"""
        self._max_bytes = min(max_bytes, UNCOUNTED_BODY_BYTES)
        self._heads: OrderedDict[bytes, RequestHead] = OrderedDict()

    def lookup(self, packet: bytes) -> RequestHead | None:
        """Return the head of `packet`, if it is known and its whole body follows; None: take the normal path."""
        end = packet.find(END, 0, MAX_HEAD_BYTES) + len(END)
        raw = packet[:end]
        head = self._heads.get(raw)
        if head is None or len(packet) - end != head.n_body:
            return None
        self._heads.move_to_end(raw)
        return head

    def has_body(self, raw: bytes) -> bool:
        """Return whether `raw` is a cached head, of a request with a body."""
        head = self._heads.get(raw)
        return head is not None and head.n_body > 0

    def add(self, path: bytes, headers: Sequence[Header], packet: bytes) -> RequestHead | None:
        """Keep the head of `packet`, a POST of HTTP/1.1 to `path`; None if something in it needs the normal path."""
        if not path.startswith(_MODELS):
            return None
        end, by_name = packet.find(END) + len(END), dict(headers)
        if end > MAX_HEAD_BYTES or len(by_name) < len(headers) or not _HARMLESS.issuperset(by_name):
            return None
        length = by_name.get(LENGTH, b"")
        if not length.isdigit() or len(length) > 9 or not int(length) == len(packet) - end <= self._max_bytes:
            return None
        if by_name.get(b"connection", b"keep-alive").lower() != b"keep-alive":
            return None
        path_text = path.decode("ascii")
        try:
            name, version, action = parse_model_path(path_text.split("/")[3:])
            n_json = header_length(by_name.get(JSON_LENGTH))
        except StatusError:
            return None
        if action != "infer":
            return None
        coding = compression.choose_coding(by_name.get(b"accept-encoding", b"identity").decode("latin-1"))
        head = RequestHead(
            end, name, version, int(length), n_json, path_text[:300], pattern_of(path_text), coding, by_name
        )
        self._heads[packet[:end]] = head
        if len(self._heads) > MAX_HEADS:
            self._heads.popitem(last=False)
        return head


class HttpFastPath(FastPath):
    """The fast path of one server, shared by its connections."""

    def __init__(self, backend: RepositoryBackend, keys: ApiKeys, serving: ServerContext) -> None:
        self.backend, self.keys, self.serving = backend, keys, serving
        self.heads, self.infer_headers = HeadCache(backend.bodies.max_bytes), InferHeaderCache()
        self._dates: Sequence[Header] = ()
        self._date_lines = b""

    def remember(self, method: str, path: bytes, headers: Sequence[Header], packet: bytes) -> None:
        if method == "POST" and path.endswith(b"/infer"):
            self.heads.add(path, headers, packet)

    def expects_body(self, head: bytes) -> bool:
        return self.heads.has_body(head)

    def begin(
        self, packet: bytes, dates: Sequence[Header], connection: ResponseWriter
    ) -> "InferExchange | bytes | None":
        head = self.heads.lookup(packet)
        model = self._model(head) if head is not None else None
        if head is None or model is None:
            return None
        grant = self._grant(head)
        if grant is None:
            return None
        exchange = InferExchange(self, head, model, grant.end, dates, connection)
        return exchange.begin(packet[head.n_bytes :], grant.tenant) or exchange

    def date_lines(self, dates: Sequence[Header]) -> bytes:
        """Return the lines of headers that every response has; uvicorn makes a new list each second."""
        if dates is not self._dates:
            self._dates, self._date_lines = dates, header_lines(dates)
        return self._date_lines

    def _grant(self, head: RequestHead) -> Grant | None:
        """Return what the credentials of a head grant; None: the normal path refuses the request, and counts that."""
        credentials = head.headers.get(b"authorization"), head.headers.get(b"x-api-key")
        try:
            return self.keys.grant(*credentials, counts_refusals=False)
        except HttpError:
            return None

    def _model(self, head: RequestHead) -> Model | None:
        backend = self.backend
        repository = backend.repository
        if repository.common.tracer.is_on or self.serving.tracer.is_on or not backend.has_room:
            return None
        if backend.shared is not None and backend.shared.slow_bytes > OFF_LOOP_BODY:
            return None  # reading it may take long
        try:
            model = repository.get(head.name, head.version)
        except StatusError:
            return None
        return None if model.is_decoupled else model


class _DisconnectEvent:
    """The `message_event` of a request, which uvicorn sets if its client disconnects."""

    __slots__ = ("set",)

    def __init__(self, called: Callable[[], None]) -> None:
        self.set = called


class InferExchange:
    """A request, from its body to its response; replaces uvicorn's RequestResponseCycle."""

    scope = {"http_version": "1.1"}  # noqa: RUF012  read by the connection, never written
    __slots__ = (
        "_began_ns",
        "_connection",
        "_dates",
        "_end_grant",
        "_fast_path",
        "_head",
        "_id",
        "_infer_header",
        "_is_begun",
        "_is_over",
        "_model",
        "_request",
        "_response",
        "_writing",
        "disconnected",
        "keep_alive",
        "message_event",
        "response_complete",
        "response_started",
    )  # fmt: skip

    def __init__(
        self,
        fast_path: HttpFastPath,
        head: RequestHead,
        model: Model,
        end_grant: Callable[[int], None],
        dates: Sequence[Header],
        connection: ResponseWriter,
    ) -> None:
        self._fast_path, self._head, self._model, self._end_grant = fast_path, head, model, end_grant
        self._dates, self._connection, self._began_ns = dates, connection, time.monotonic_ns()
        self._id = request_id_of(head.headers.get(REQUEST_ID))
        self._request: InferRequest | None = None
        self._infer_header: InferHeader | None = None
        self._response: bytes | None = None
        self._writing: asyncio.Future[None] | None = None
        self._is_begun = self._is_over = False
        self.disconnected = self.response_started = self.response_complete = False
        self.keep_alive = True
        self.message_event = _DisconnectEvent(self._on_disconnect)

    def begin(self, body: bytes, tenant: str) -> bytes | None:
        """Read the body and submit the request; return the response if it is ready at once."""
        backend = self._fast_path.backend
        self._fast_path.serving.load.n += 1
        backend.enter()
        try:
            regions = regions_of_tenant(backend.shared, tenant)
            request, self._infer_header = self._fast_path.infer_headers.read(
                body, self._head.n_json, self._model, regions
            )
            request.token_usage, request.tenant = TokenUsage(), tenant
            self._request = request
            self._model.submit(request, only_response(self._take_response))
        except StatusError as error:
            self._take_response(None, error)
        except Exception as bug:  # as at the edge: one request ends with it, not the server
            log.exception("request %s: a bug in the server", self._id)
            self._fail(bug)
        self._is_begun = True
        response, self._response = self._response, None
        return response

    # ------------------------------------------------------------------ its end

    def _take_response(self, response: InferResponse | None, error: StatusError | None) -> None:
        """Take the model's response, or the error."""
        if self._is_over:
            return
        try:
            n_bytes = 0 if response is None else memory_bytes(response.outputs.values())
        except Exception as bug:  # a backend may send anything
            log.exception("request %s: a bug in the server", self._id)
            self._fail(bug)
            return
        if response is not None and n_bytes > OFF_LOOP_BODY:
            self._writing = asyncio.ensure_future(self._encode_off_loop(response, n_bytes))
        else:
            self._finish(self._reply(response, error))

    def _fail(self, bug: Exception) -> None:
        """End the request with an internal error."""
        without_frames(bug)
        if not self._is_over:
            self._finish(error_reply(BUG.status, BUG.message))

    async def _encode_off_loop(self, response: InferResponse, n_bytes: int) -> None:
        try:
            reply = await self._fast_path.backend.run_off_loop(lambda: self._reply(response, None), n_bytes)
        except BusyError as busy:
            problem = problem_of(busy, accepting=True)
            reply = error_reply(problem.status, problem.message)
        if self._is_over:
            return
        if len(reply.body) <= PIECE_BYTES:
            self._finish(reply)
            return
        self._end(reply.status)
        await self._connection.send_in_pieces(self, self._head_of(reply), reply.body)

    def _reply(self, response: InferResponse | None, error: StatusError | None) -> HttpReply:
        try:
            if response is not None:
                assert self._request is not None and self._infer_header is not None, "it was read"
                body, n_json = self._infer_header.encode(self._model, self._request, response)
                headers, coding = infer_headers(n_json), self._head.coding
                if coding != "identity":
                    body = compression.compress(body, coding)
                    headers.append((b"content-encoding", coding.encode()))
                return HttpReply(200, body, headers)
        except StatusError as unfit:
            error = unfit
        except Exception as bug:  # as at the edge: one request ends with it, not the server
            log.exception("request %s: a bug in the server", self._id)
            without_frames(bug)
            return error_reply(BUG.status, BUG.message)
        assert error is not None, "there is a response, or an error"
        return error_of(without_frames(error))

    def _finish(self, reply: HttpReply) -> None:
        self._end(reply.status)
        response = self._head_of(reply) + reply.body
        if self._is_begun:
            self._connection.send(self, response)
        else:
            self._response = response

    def _head_of(self, reply: HttpReply) -> bytes:
        return b"".join(
            (
                status_line(reply.status),
                self._fast_path.date_lines(self._dates),
                header_lines(reply.headers),
                b"content-length: %d\r\nx-request-id: %b\r\n\r\n" % (len(reply.body), self._id.encode()),
            )
        )

    def _end(self, status: int) -> None:
        """Release what the request holds, and log it."""
        self._is_over = True
        fast_path, head, took_ms = self._fast_path, self._head, (time.monotonic_ns() - self._began_ns) / 1e6
        fast_path.backend.leave()
        usage = self._request.token_usage if self._request is not None else None
        prompt, generated = (usage.prompt, usage.generated) if usage is not None else (0, 0)
        self._end_grant(prompt + generated)
        if prompt or generated:
            log_request(RequestLog("POST", head.path, self._id, status, took_ms, None, prompt, generated or None))
        else:
            fast_path.backend.log.add("POST", head.path, self._id, status, took_ms)
        fast_path.serving.metrics.count_response(head.route, "POST", status)
        fast_path.serving.load.n -= 1
        self._request = self._infer_header = (
            None  # the connection keeps this, and so would regions of shared memory be kept
        )

    def _on_disconnect(self) -> None:
        """Cancel the request if its client has disconnected."""
        if not self.disconnected or self._is_over:
            return
        request = self._request
        self._end(CLIENT_CLOSED)
        if request is not None:
            self._model.cancel(request)
        if self._writing is not None:
            self._writing.cancel()


def header_lines(headers: Sequence[Header]) -> bytes:
    """Return the lines of an HTTP head, as uvicorn writes them."""
    return b"".join(b"%b: %b\r\n" % (name.lower(), value) for name, value in headers)
