"""A protocol is a table of endpoints with its own way to write errors; it knows no engine.

An endpoint that a client posts to names the kind of Backend that it takes; its handler gets the one that the request
names: `async def handler(backend, call, request)`. Keys say who may ask; they are compared in constant time, and with
every key, so that the time tells nothing. A second protocol is a second table, listed in `app.py`.
"""

import codecs
import hmac
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from millrace.errors import ConfigError
from millrace.serve.backend import Backend, Models
from millrace.serve.errors import ErrorWriter, HttpError
from millrace.serve.fields import decode, take_ignored
from millrace.serve.openapi import Operation
from millrace.serve.wire import CALL, Bodies, Call, header, read_body, unless_gone

_BEARER = b"bearer "
_MAX_BYTES = 1 << 20


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys of a file, one a line; empty lines and lines that begin with # are skipped. raises ConfigError"""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if data.startswith(
            (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        ):  # it would be part of the first key
            raise ConfigError(
                f"{path} begins with a byte order mark", "UTF-8 without one", 'save it as "UTF-8", not "UTF-8 with BOM"'
            )
        if len(data) > _MAX_BYTES:
            raise ConfigError(f"{path} has more than {_MAX_BYTES} bytes", "one key a line", "name another file")
        lines = data.decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the API keys of {path}: {error}", "a text file", "name another file") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not keys:
        raise ConfigError(f"{path} holds no API key", "one key a line", "add a key, or start without the file")
    return keys


class Keys:
    """`Authorization: Bearer <key>`, for the routes that are protected."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._keys = [key.encode() for key in keys]

    def check(self, scope: Scope) -> None:
        """raises HttpError with 401"""
        if not self._keys:
            return
        given = header(scope, b"authorization") or b""
        token = given[len(_BEARER) :].strip() if given[: len(_BEARER)].lower() == _BEARER else b""
        if not any([hmac.compare_digest(token, key) for key in self._keys]):  # a list: all of them, always
            what = "the API key is wrong" if given else "the API key is missing"
            error = HttpError(
                401, "invalid_api_key", what, "Authorization: Bearer <key>", "send a key that the server was given"
            )
            error.headers["www-authenticate"] = "Bearer"
            raise error


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
