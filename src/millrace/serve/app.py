"""The table of routes, and the application made of it; the OpenAPI document comes from the same table."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from millrace.serve import management
from millrace.serve.auth import Keys
from millrace.serve.chat import chat_completions
from millrace.serve.completions import completions
from millrace.serve.edge import Edge
from millrace.serve.fields import decode, take_ignored
from millrace.serve.openapi import About, Operation, document
from millrace.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from millrace.serve.replies import (
    ChatChunk,
    ChatReply,
    CompletionReply,
    DetokenizeReply,
    EngineVersionReply,
    HealthReply,
    LoadReply,
    MetadataReply,
    ModelCard,
    ModelList,
    TokenizeReply,
    TokenizerInfoReply,
    VersionReply,
)
from millrace.serve.serving import Serving
from millrace.serve.tokens import detokenize, tokenize
from millrace.serve.wire import CALL, Bodies, Call, read_body, unless_gone

Posted = Callable[[Serving, Call, Any], Awaitable[ASGIApp]]  # the last: the struct that the endpoint's requests are
Asked = Callable[[Serving, Scope], Response]
# the page's script and style are in the page; it may fetch this server's own document and nothing else
_DOCS_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One route: what it does, and what the documentation says about it."""

    operation: Operation
    posted: Posted | None = None
    asked: Asked | None = None  # one of the two


def _post(
    path: str, handler: Posted, summary: str, request: type[msgspec.Struct], reply: type, event: type | None = None
) -> Endpoint:
    return Endpoint(Operation("POST", path, summary, True, request, reply, event), posted=handler)


def _get(path: str, handler: Asked, summary: str, reply: type | None, protected: bool = False) -> Endpoint:
    return Endpoint(Operation("GET", path, summary, protected, None, reply), asked=handler)


# Protected: whatever costs time or says which model this is. Health, metrics and versions stay open, as in vLLM, for
# load balancers and Prometheus.
_MAIN: tuple[Endpoint, ...] = (
    _post("/v1/chat/completions", chat_completions, "Answer a conversation", ChatRequest, ChatReply, ChatChunk),
    _post("/v1/completions", completions, "Continue a text", CompletionRequest, CompletionReply, CompletionReply),
    _post("/tokenize", tokenize, "Text or messages to token ids", TokenizeRequest, TokenizeReply),
    _post("/detokenize", detokenize, "Token ids to text", DetokenizeRequest, DetokenizeReply),
    _get("/tokenizer_info", management.tokenizer_info, "Special tokens and template", TokenizerInfoReply, True),
    _get("/v1/models", management.models, "The model and its aliases", ModelList, protected=True),
    _get("/v1/models/{model}", management.model, "One model", ModelCard, protected=True),
    _get("/v1/metadata", management.metadata, "Model, engine and licence", MetadataReply, protected=True),
    _get("/v1/health/live", management.live, "Does the process answer?", HealthReply),
    _get("/v1/health/ready", management.ready, "May requests be sent? 503: not now", HealthReply),
    _get("/health", management.health, "Does the engine work? 503: no", None),
    _get("/load", management.load, "Requests that are being answered", LoadReply),
    _get("/v1/metrics", management.metrics, "Prometheus metrics", None),
    _get("/v1/version", management.version, "Release and API version", VersionReply),
    _get("/version", management.engine_version, "Release, in vLLM's shape", EngineVersionReply),
)
# the same under another path, as other servers have it
_ALSO: tuple[tuple[str, str, str], ...] = (
    ("POST", "/v1/tokenize", "/tokenize"),
    ("POST", "/v1/detokenize", "/detokenize"),
    ("GET", "/ping", "/health"),
    ("POST", "/ping", "/health"),
    ("GET", "/metrics", "/v1/metrics"),
)


def _also(method: str, path: str, same_as: str) -> Endpoint:
    original = next(endpoint for endpoint in _MAIN if endpoint.operation.path == same_as)
    summary = f"The same as {same_as}"
    return replace(
        original, operation=replace(original.operation, method=method, path=path, summary=summary, same_as=same_as)
    )


ENDPOINTS = (*_MAIN, *(_also(*other) for other in _ALSO))


def create_app(serving: Serving) -> ASGIApp:
    """The ASGI application. It does not start the engine: `server.py` does."""
    keys = Keys(serving.settings.api_keys)
    settings = serving.settings
    together = max(settings.max_receiving_bytes, settings.max_body_bytes)  # a lone body of the largest size fits
    bodies = Bodies(settings.max_body_bytes, settings.body_timeout_s, together)
    routes = [_route(endpoint, serving, keys, bodies) for endpoint in ENDPOINTS]
    schema = msgspec.json.encode(document([endpoint.operation for endpoint in ENDPOINTS], _about(serving)))
    page = Path(__file__).with_name("docs.html").read_bytes()
    routes.append(_fixed("/openapi.json", schema, {"content-type": "application/json"}))
    headers = {"content-type": "text/html; charset=utf-8", "content-security-policy": _DOCS_POLICY}
    routes.append(_fixed("/docs", page, headers))
    paths = {endpoint.operation.path for endpoint in ENDPOINTS}
    app: ASGIApp = Edge(Router(routes, redirect_slashes=False, default=_nothing_there), serving, paths)
    if serving.settings.cors_origins:
        app = _with_cors(app, serving.settings.cors_origins)
    return app


def _about(serving: Serving) -> About:
    of_model = asdict(serving.model.engine.loop.defaults)
    return About(
        serving.model.name,
        {name: value for name, value in of_model.items() if value is not None},
        bool(serving.settings.api_keys),
    )


def _route(endpoint: Endpoint, serving: Serving, keys: Keys, bodies: Bodies) -> Route:
    operation, posted, asked = endpoint.operation, endpoint.posted, endpoint.asked

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if operation.protected:
            keys.check(scope)
        if asked is not None:
            await asked(serving, scope)(scope, receive, send)
        if posted is not None:
            kind, call = operation.request, scope[CALL]
            assert kind is not None
            with bodies.receiving((scope.get("client") or ("",))[0]) as incoming:
                body = await read_body(scope, receive, bodies, incoming)
                call.body_bytes = len(body)
                request = await serving.decoded(partial(decode, body, kind), len(body))
                del body  # an answer may take minutes
            call.ignored = take_ignored(request, kind)
            await unless_gone(receive, _answer(posted(serving, call, request), scope, receive, send))

    path = operation.path.replace("{model}", "{model:path}")  # names of models may have slashes
    return Route(path, _Asgi(app), methods=[operation.method])


async def _answer(response: Awaitable[ASGIApp], scope: Scope, receive: Receive, send: Send) -> None:
    await (await response)(scope, receive, send)


def _fixed(path: str, body: bytes, headers: dict[str, str]) -> Route:
    async def get(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(body, headers=headers)(scope, receive, send)

    return Route(path, _Asgi(get), methods=["GET"])


class _Asgi:
    """Starlette takes an object as an ASGI application, and a plain function as a handler of Requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


async def _nothing_there(scope: Scope, receive: Receive, send: Send) -> None:
    raise HTTPException(404)


def _with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "x-millrace-ignored", "retry-after"],
    )
