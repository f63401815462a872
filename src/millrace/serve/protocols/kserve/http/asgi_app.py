"""ASGI application of KServe's routes: API keys, body bounds, cancellation on disconnect."""

import asyncio
import time
from dataclasses import dataclass
from functools import partial

from starlette.types import Receive, Scope, Send

from millrace.model_repository.request.status_code import StatusError
from millrace.serve.backend import Models
from millrace.serve.http.api_keys import ApiKeys
from millrace.serve.http.disconnects import run_until_disconnect
from millrace.serve.http.errors import HttpError, HttpProblem
from millrace.serve.http.http_request import CALL, PIECE_BYTES, RequestContext, combine_duplicate_headers, header
from millrace.serve.http.request_bodies import read_body
from millrace.serve.http.routes import Protocol
from millrace.serve.protocols.kserve.http.compression import load_too_large, raw_too_large, too_large
from millrace.serve.protocols.kserve.http.frontend import STATUS, HttpCall, HttpFrontend, HttpReply, error_reply
from millrace.serve.protocols.kserve.http.infer_request import HEADER
from millrace.serve.protocols.kserve.http.infer_response import encode_error
from millrace.serve.protocols.kserve.repository_backend import RepositoryBackend
from millrace.serve.protocols.kserve.restricted_apis import group_of_path, headers_as_text
from millrace.serve.protocols.kserve.routes import PUBLIC_PATHS, V2_PREFIX, pattern_of

_CONTROL = "/v2/repository/"  # always admitted, so that a model that hangs can be unloaded


def write_error(problem: HttpProblem) -> bytes:
    """Encode an error that occurs before one of KServe's routes is reached, such as a missing key or body."""
    return encode_error(problem.message)


KSERVE = Protocol((), write_error, below=V2_PREFIX)


@dataclass(frozen=True, slots=True)
class _Route:
    """The route's name in the metrics."""

    path: str


class KServe:
    """An ASGI application for the paths below /v2."""

    def __init__(self, models: Models, backend: RepositoryBackend, keys: ApiKeys) -> None:
        repository = backend.repository
        most = repository.flags.http_max_input_size
        self._guard = backend.http_guard
        self._backend, self._bodies, self._keys, self._max_bytes = backend, backend.bodies, keys, most
        self._front = HttpFrontend(
            repository,
            lambda: backend.is_ready(models.heartbeat),
            backend.run_off_loop,
            backend.shared,
            self._guard,
        )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["raw_path"].decode("latin-1")
        if path not in PUBLIC_PATHS:
            self._keys.admit(scope)
        scope["route"] = _Route(pattern_of(path))
        restricting = (
            self._guard.missing_header(group_of_path(path), headers_as_text(scope["headers"]))
            if self._guard.rules
            else None
        )
        if restricting is not None:
            reply = error_reply(403, f"This API is restricted, expecting header '{restricting}'")
        elif scope["method"] == "GET":
            reply = await self._front.answer(_set_tenant(HttpCall("GET", path, {}, b""), scope[CALL]))
        else:
            reply = await self._answer_post(scope, receive, send, path)
        if reply.events is not None:
            return  # they were sent while they came
        headers = [*reply.headers, (b"content-length", b"%d" % len(reply.body))]
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        at, end = 0, len(reply.body)
        while end - at > PIECE_BYTES:  # as the client takes them: what it has not taken is copied
            await send({"type": "http.response.body", "body": reply.body[at : at + PIECE_BYTES], "more_body": True})
            await asyncio.sleep(0)  # a client that takes it at once would hold up all others
            at += PIECE_BYTES
        await send({"type": "http.response.body", "body": reply.body[at:]})

    async def _answer_post(self, scope: Scope, receive: Receive, send: Send, path: str) -> HttpReply:
        call, arrived_ns = scope[CALL], time.monotonic_ns()
        with self._bodies.receiving((scope.get("client") or ("",))[0]) as incoming:
            try:
                body = await read_body(scope, receive, self._bodies, incoming)
            except HttpError as error:
                if error.status != 413:
                    raise
                return error_reply(400, _too_large(scope, path, self._max_bytes).message)
            call.body_bytes = len(body)
            headers = combine_duplicate_headers(scope["headers"], b",")
            request = HttpCall(
                scope["method"], path, headers, body, partial(self._bodies.count_decompressed, incoming), arrived_ns
            )
            _set_tenant(request, call)
            try:
                with self._backend.admitted(path.startswith(_CONTROL)):
                    return await run_until_disconnect(receive, self._answer(request, send))
            except StatusError as full:  # the front has answers to its own
                return error_reply(STATUS[full.code], full.message)
            finally:  # the call's end charges them
                usage = request.token_usage
                call.log.prompt_tokens, call.log.generated_tokens = usage.prompt or None, usage.generated or None

    async def _answer(self, request: HttpCall, send: Send) -> HttpReply:
        """Answer a request, and send its events if it has any; a disconnect cancels the inference."""
        reply = await self._front.answer(request)
        if reply.events is not None:
            try:
                await send({"type": "http.response.start", "status": reply.status, "headers": reply.headers})
                async for event in reply.events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
            finally:
                reply.events.close()
        return reply


def _set_tenant(request: HttpCall, call: RequestContext) -> HttpCall:
    """Set the tenant and the owner of a request, and return it."""
    request.tenant, request.owner = call.tenant, "" if call.is_admin else call.tenant
    return request


def _too_large(scope: Scope, path: str, limit: int) -> StatusError:
    announced = header(scope, b"content-length")
    n = announced.decode() if announced else f"more than {limit}"
    if path.startswith(_CONTROL):
        return load_too_large(n, limit)
    if header(scope, HEADER.lower().encode()) == b"0":
        return raw_too_large(n, limit)
    return too_large("request JSON size", n, limit)
