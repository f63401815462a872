"""The outermost layer: gives every request an id, lets its protocol write every error, writes the log line."""

import logging
import re
import time
import uuid
from collections.abc import Collection

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millrace.errors import MillraceError
from millrace.serve.backend import Models
from millrace.serve.errors import (
    BUG,
    CLIENT_CLOSED,
    ClientGoneError,
    ErrorWriter,
    HttpError,
    Problem,
    problem_of,
)
from millrace.serve.generation import GenerationFailedError
from millrace.serve.logs import RequestLog, log_request
from millrace.serve.management import unknown_path
from millrace.serve.routes import Handler
from millrace.serve.wire import CALL, Call, header

_SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")  # nothing that could break a header or a log line
log = logging.getLogger(__name__)


class Edge:
    """An ASGI application around the routes."""

    def __init__(self, routes: ASGIApp, models: Models, paths: Collection[str], write_error: ErrorWriter) -> None:
        """paths: those of the routes, for whoever asks for another one; write_error: of requests of no protocol"""
        self._routes, self._models, self._paths, self._write_error = routes, models, paths, write_error

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
            self._models.serving.load.n -= 1
            path = getattr(scope.get("route"), "path", "other")
            self._models.serving.metrics.answered(path, scope["method"], call.log.status or CLIENT_CLOSED)

    async def _run(self, scope: Scope, receive: Receive, send: Send, call: Call) -> None:
        headers: dict[str, str] = {}
        try:
            await self._routes(scope, receive, send)
            return
        except ClientGoneError:
            call.log.status = CLIENT_CLOSED
            return
        except GenerationFailedError as error:
            log.error("request %s failed: %s", call.id, error)
            problem = error.problem
        except HTTPException as error:
            problem, headers = self._of_route(scope, error), dict(error.headers or {})
        except MillraceError as error:
            problem = problem_of(error, accepting=self._models.heartbeat.accepting)
            headers = error.headers if isinstance(error, HttpError) else {}
            if problem.status >= 500:
                log.error("request %s: %s", call.id, error)
        except Exception:  # a bug of ours must cost one request and not the server; the log has it all
            log.exception("request %s: a bug in the server", call.id)
            problem = BUG
        call.log.error = problem.brief
        if call.log.status is None:  # otherwise the response is under way, and can only be cut off
            handler = scope.get("endpoint")
            write = handler.protocol.write_error if isinstance(handler, Handler) else self._write_error
            await problem.response(write, headers)(scope, receive, send)

    def _of_route(self, scope: Scope, error: HTTPException) -> Problem:
        path = call_path(scope)
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
            refusal = unknown_path(path, self._paths)
        return problem_of(refusal, accepting=True)


def _ignored_header(call: Call) -> list[tuple[bytes, bytes]]:
    return [(b"x-millrace-ignored", ", ".join(call.ignored).encode())] if call.ignored else []


def call_path(scope: Scope) -> str:
    """The path as it was sent, percent signs and all: ASCII without white space."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw.decode("ascii", "backslashreplace")[:300]


def _call(scope: Scope) -> Call:
    given = header(scope, b"x-request-id") or b""
    request_id = given.decode() if _SANE_ID.fullmatch(given) else uuid.uuid4().hex
    return Call(request_id, time.perf_counter(), RequestLog(scope["method"], call_path(scope), request_id))
