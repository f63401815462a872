"""Protocols as tables of endpoints with their own error format, independent of engines.

An endpoint for POST requests names the kind of Backend it needs; its handler gets the Backend of the requested model:
`async def handler(backend, call, request)`. `api_keys.py` decides who may call it and how often. Another protocol is
another table, passed to the server next to those in `protocols/`. A request is a `Body` with the field `model`, by
which the server finds the Backend.

`AsgiEdge` wraps all of them: it gives every request an id, lets its protocol write every error, and logs the request.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millrace.errors import MillraceError
from millrace.model_repository.execution.tracebacks import without_frames
from millrace.serve.backend import Backend, Models
from millrace.serve.http.api_keys import ApiKeys
from millrace.serve.http.disconnects import run_until_disconnect
from millrace.serve.http.errors import (
    BUG,
    CLIENT_CLOSED,
    ClientGoneError,
    ErrorWriter,
    GenerationFailedError,
    HttpError,
    HttpProblem,
    problem_of,
)
from millrace.serve.http.http_request import (
    CALL,
    RequestContext,
    RequestLog,
    check_content_type,
    header,
    log_request,
    request_id_of,
)
from millrace.serve.http.openapi import Operation
from millrace.serve.http.request_bodies import BodyLimiter, read_body
from millrace.serve.llm.request_decoding import pop_ignored_fields, read_request
from millrace.serve.llm.request_types import Body
from millrace.serve.ops.management_api import not_found_error
from millrace.serve.ops.otel_genai import trace

# the first: the endpoint's kind of Backend; the last: the struct that its requests are
PostHandler = Callable[[Any, RequestContext, Any], Awaitable[ASGIApp]]
GetHandler = Callable[[Models, Scope], Response]


@dataclass(frozen=True, slots=True)
class HttpEndpoint:
    """One route: its handler and its documentation.

    names: our field names mapped to those that its clients know, for errors
    """

    operation: Operation
    post_handler: PostHandler | None = None
    backend: type[Backend] | None = None  # with `post_handler`: the kind of backend that can answer
    get_handler: GetHandler | None = None  # one of the two
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return self.operation.path

    def alias(self, method: str, path: str) -> "HttpEndpoint":
        """Return the same endpoint under another path, as other servers have it."""
        summary = f"The same as {self.path}"
        operation = replace(self.operation, method=method, path=path, summary=summary, same_as=self.path)
        return replace(self, operation=operation)


@dataclass(frozen=True, slots=True)
class Protocol:
    """One protocol: a table of endpoints and an error format.

    any_type: web pages, too, may send bodies with a content type other than JSON
    below: prefix of the paths that belong to it, including paths that do not exist
    lists_at: the path that lists the models
    header: sent by its clients with every request, also to paths of other protocols; b"": none
    """

    endpoints: tuple[HttpEndpoint, ...]
    write_error: ErrorWriter
    any_type: bool = False
    below: str = ""
    lists_at: str = "/v1/models"
    header: bytes = b""

    def owns(self, path: str) -> bool:
        """Return whether a path belongs to the protocol; /v1 below it comes from an OpenAI client's wrong base URL."""
        return bool(self.below) and f"{path}/".startswith(f"{self.below}/") and not path.startswith(f"{self.below}/v1/")


def get(path: str, handler: GetHandler, summary: str, reply: type | None, protected: bool = False) -> HttpEndpoint:
    return HttpEndpoint(Operation("GET", path, summary, protected, None, reply), get_handler=handler)


@dataclass(frozen=True, slots=True, eq=False)
class Handler:
    """ASGI application of one endpoint: checks the key, reads the body, finds the model, answers."""

    endpoint: HttpEndpoint
    protocol: Protocol
    models: Models
    keys: ApiKeys | None  # None: anyone may ask
    bodies: BodyLimiter
    all_endpoints: Sequence[HttpEndpoint]  # suggested if a model does not support this one

    def route(self) -> Route:
        path = self.endpoint.path.replace("{model}", "{model:path}")  # names of models may have slashes
        return Route(path, self, methods=[self.endpoint.operation.method])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.keys is not None and self.endpoint.operation.protected:
            self.keys.admit(scope)
        if self.endpoint.get_handler is not None:
            await self.endpoint.get_handler(self.models, scope)(scope, receive, send)
        else:
            with ExitStack() as admitted:
                request = await self._read(scope, receive, admitted)
                await run_until_disconnect(receive, self._answer(request, scope, receive, send))

    async def _read(self, scope: Scope, receive: Receive, admitted: ExitStack) -> Body:
        """Read and check the request, and admit it. Its body is released, because an answer may take minutes."""
        kind, call = self.endpoint.operation.request, scope[CALL]
        assert kind is not None, self.endpoint.path
        if header(scope, b"origin") is not None and not self.protocol.any_type:
            check_content_type(scope)  # a browser asks whether the page may send JSON; a form it would just send
        with self.bodies.receiving((scope.get("client") or ("",))[0]) as incoming:
            body = await read_body(scope, receive, self.bodies, incoming)
            admitted.enter_context(self.models.serving.admission.admitted())
            call.body_bytes = len(body)
            try:
                request, unknown = await self.models.serving.decode_off_loop(
                    partial(read_request, body, kind), len(body)
                )
            except HttpError:
                check_content_type(scope)  # a form was sent, and not JSON under another name
                raise
        call.ignored = pop_ignored_fields(request, kind, unknown)
        call.names = self.endpoint.names  # until now errors were about names as the client wrote them
        return request

    async def _answer(self, request: Any, scope: Scope, receive: Receive, send: Send) -> None:
        call: RequestContext = scope[CALL]
        backend = self._backend(request.model)
        call.model = call.log.model = request.model or backend.model.name
        assert self.endpoint.post_handler is not None, self.endpoint.path
        await (await self.endpoint.post_handler(backend, call, request))(scope, receive, send)

    def _backend(self, name: str | None) -> Backend:
        """Return the model of a name, which must support this endpoint; None: the first that does.

        raises HttpError: 404 for an unknown name, 400 naming the endpoints that the model supports
        """
        kind = self.endpoint.backend
        assert kind is not None, self.endpoint.path
        able = self.models.of_kind(kind)
        backend = able[0] if name is None and able else self.models.get(name, self.protocol.lists_at)
        if backend in able:
            return backend
        able_to = [e for e in self.all_endpoints if e.backend is not None and isinstance(backend, e.backend)]
        own = [e for e in able_to if e in self.protocol.endpoints]
        can = [e.path for e in own or able_to]
        another = f"another model: {', '.join(b.model.name for b in able)}" if able else "a server of another model"
        fix = f"choose {another}" if able or not backend.other_endpoints else backend.other_endpoints
        raise HttpError(
            400,
            "model_cannot",
            f'the model "{name or backend.model.name}" is {backend.kind_name}, and cannot answer {self.endpoint.path}',
            f"a request to {' or '.join(can[:3])}" if can else "a model that can",
            f"ask it there, or {fix}" if can else fix,
        ).about("model")


log = logging.getLogger(__name__)


class AsgiEdge:
    """ASGI application around the routes."""

    def __init__(self, routes: ASGIApp, models: Models, protocols: Sequence[Protocol]) -> None:
        """The first protocol writes the errors of requests that belong to none."""
        self._routes, self._models, self._protocols = routes, models, protocols
        self._paths = {endpoint.path for protocol in protocols for endpoint in protocol.endpoints}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", scope["type"]  # the server speaks neither websockets nor lifespan
        call = _call(scope)
        scope[CALL] = call
        scope["app"] = self  # Starlette's routes then raise for a wrong method instead of answering
        id_header = (b"x-request-id", call.id.encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.log.status = message["status"]
                message["headers"] = [*message.get("headers", ()), id_header, *_ignored_header(call)]
            await send(message)

        self._models.serving.load.n += 1
        try:
            await self._run(scope, receive, send_with_id, call)
        finally:
            call.log.ignored = ",".join(call.ignored) or None
            call.log.total_ms = (time.perf_counter() - call.arrived_s) * 1e3
            log_request(call.log)
            if call.ended is not None:
                call.ended((call.log.prompt_tokens or 0) + (call.log.generated_tokens or 0))
            serving = self._models.serving
            if serving.tracer.is_on:
                trace(serving.tracer, call, scope)
            serving.load.n -= 1
            path = getattr(scope.get("route"), "path", "other")
            serving.metrics.count_response(path, scope["method"], call.log.status or CLIENT_CLOSED)

    async def _run(self, scope: Scope, receive: Receive, send: Send, call: RequestContext) -> None:
        headers: dict[str, str] = {}
        try:
            await self._routes(scope, receive, send)
            return
        except ClientGoneError:
            call.log.status = CLIENT_CLOSED
            return
        except GenerationFailedError as error:
            log.log(error.log_level, "request %s failed: %s", call.id, error)
            problem = without_frames(error).problem
        except HTTPException as error:
            problem, headers = self._route_problem(scope, error), dict(error.headers or {})
        except MillraceError as error:
            problem = problem_of(without_frames(error), accepting=self._models.heartbeat.accepting)
            headers = error.headers if isinstance(error, HttpError) else {}
            if problem.status >= 500:
                log.error("request %s: %s", call.id, error)
        except Exception as error:  # a bug of ours must cost one request and not the server; the log has it all
            log.exception("request %s: a bug in the server", call.id)
            without_frames(error)
            problem = BUG
        call.log.error = problem.brief
        if call.log.status is None:  # otherwise the response is under way, and can only be cut off
            await problem.with_field_names(call.names).response(self._writer(scope), headers)(scope, receive, send)

    def _writer(self, scope: Scope) -> ErrorWriter:
        """Return the error writer of the protocol that a request uses."""
        handler = scope.get("endpoint")
        if isinstance(handler, Handler) and handler.endpoint.path.startswith(handler.protocol.lists_at):
            sent = (p for p in self._protocols if p.header and header(scope, p.header) is not None)
            return next(sent, handler.protocol).write_error
        if isinstance(handler, Handler):
            return handler.protocol.write_error
        path = raw_path(scope)
        return next((p for p in self._protocols if p.owns(path)), self._protocols[0]).write_error

    def _route_problem(self, scope: Scope, error: HTTPException) -> HttpProblem:
        path = raw_path(scope)
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "")
            refusal = HttpError(
                405,
                "method_not_allowed",
                f"{path} does not know {scope['method']}",
                f"one of {allowed}",
                "use that method",
            )
        else:
            refusal = not_found_error(path, self._paths)
        return problem_of(refusal, accepting=True)


def _ignored_header(call: RequestContext) -> list[tuple[bytes, bytes]]:
    return [(b"x-millrace-ignored", ", ".join(call.ignored).encode())] if call.ignored else []


def raw_path(scope: Scope) -> str:
    """Return the path as it was sent, still percent-encoded: ASCII without white space."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw.decode("ascii", "backslashreplace")[:300]


def _call(scope: Scope) -> RequestContext:
    request_id = request_id_of(header(scope, b"x-request-id"))
    return RequestContext(request_id, time.perf_counter(), RequestLog(scope["method"], raw_path(scope), request_id))
