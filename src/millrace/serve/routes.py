"""A protocol is a table of endpoints with its own way to write errors; it knows no engine.

An endpoint that a client posts to names the kind of Backend that it takes; its handler gets the one that the request
names: `async def handler(backend, call, request)`. A second protocol is a second table, listed in `app.py`.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from millrace.serve.auth import Keys
from millrace.serve.backend import Backend, Models
from millrace.serve.errors import ErrorWriter
from millrace.serve.fields import decode, take_ignored
from millrace.serve.openapi import Operation
from millrace.serve.wire import CALL, Bodies, Call, read_body, unless_gone

# the first: the endpoint's kind of Backend; the last: the struct that its requests are
Posted = Callable[[Any, Call, Any], Awaitable[ASGIApp]]
Asked = Callable[[Models, Scope], Response]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One route: what it does, and what the documentation says about it."""

    operation: Operation
    posted: Posted | None = None
    backend: type[Backend] | None = None  # with `posted`: the models that can answer
    asked: Asked | None = None  # one of the two

    @property
    def path(self) -> str:
        return self.operation.path

    def also(self, method: str, path: str) -> "Endpoint":
        """The same under another path, as other servers have it."""
        summary = f"The same as {self.path}"
        operation = replace(self.operation, method=method, path=path, summary=summary, same_as=self.path)
        return replace(self, operation=operation)


@dataclass(frozen=True, slots=True)
class Protocol:
    endpoints: tuple[Endpoint, ...]
    write_error: ErrorWriter


def get(path: str, handler: Asked, summary: str, reply: type | None, protected: bool = False) -> Endpoint:
    return Endpoint(Operation("GET", path, summary, protected, None, reply), asked=handler)


@dataclass(frozen=True, slots=True, eq=False)
class Handler:
    """An endpoint as the application of its route: key, body, model, answer."""

    endpoint: Endpoint
    protocol: Protocol
    models: Models
    keys: Keys
    bodies: Bodies
    all_endpoints: Sequence[Endpoint]  # for whoever asks a model for what it cannot do

    def route(self) -> Route:
        path = self.endpoint.path.replace("{model}", "{model:path}")  # names of models may have slashes
        return Route(path, self, methods=[self.endpoint.operation.method])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.endpoint.operation.protected:
            self.keys.check(scope)
        if self.endpoint.asked is not None:
            await self.endpoint.asked(self.models, scope)(scope, receive, send)
        else:
            request = await self._read(scope, receive)
            await unless_gone(receive, self._answer(request, scope, receive, send))

    async def _read(self, scope: Scope, receive: Receive) -> msgspec.Struct:
        """The request, checked; its body is let go of: an answer may take minutes."""
        kind, call = self.endpoint.operation.request, scope[CALL]
        assert kind is not None, self.endpoint.path
        with self.bodies.receiving((scope.get("client") or ("",))[0]) as incoming:
            body = await read_body(scope, receive, self.bodies, incoming)
            call.body_bytes = len(body)
            request = await self.models.serving.decoded(partial(decode, body, kind), len(body))
        call.ignored = take_ignored(request, kind)
        return request

    async def _answer(self, request: Any, scope: Scope, receive: Receive, send: Send) -> None:
        call: Call = scope[CALL]
        backend = self.models.able(request.model, self.endpoint, self.all_endpoints)
        call.model = call.log.model = request.model or backend.model.name
        assert self.endpoint.posted is not None, self.endpoint.path
        await (await self.endpoint.posted(backend, call, request))(scope, receive, send)
