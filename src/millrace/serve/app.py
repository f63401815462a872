"""The ASGI application: routes of all protocols, their documentation, and the edge around them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol as Interface

import msgspec
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from millrace.serve.backend import Backend, Models
from millrace.serve.http.fast_path import FastPath
from millrace.serve.http.openapi import ServerDescription, openapi_document
from millrace.serve.http.request_bodies import BodyLimiter
from millrace.serve.http.routes import AsgiEdge, Handler, HttpEndpoint, Protocol
from millrace.serve.ops.metrics_port import MetricsListener
from millrace.serve.protocols.anthropic.endpoints import ANTHROPIC
from millrace.serve.protocols.kserve.http.asgi_app import KSERVE, KServe
from millrace.serve.protocols.kserve.http.fast_path import HttpFastPath
from millrace.serve.protocols.kserve.repository_backend import RepositoryBackend
from millrace.serve.protocols.kserve.routes import V2_PREFIX, openapi_paths, openapi_schemas
from millrace.serve.protocols.ollama.endpoints import OLLAMA
from millrace.serve.protocols.openai.endpoints import OPENAI
from millrace.serve.settings import ServerSettings

PROTOCOLS: tuple[Protocol, ...] = (OPENAI, ANTHROPIC, OLLAMA)  # the first writes errors of requests to unknown paths
# a page's script and style are in the page; it may fetch from this server and from nowhere else
_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"  # a page that takes an API key must not be framed
)


def create_app(models: Models, protocols: Sequence[Protocol] = PROTOCOLS) -> ASGIApp:
    """Create the ASGI application. `server.py` starts the engines."""
    settings = models.serving.settings
    keys, bodies = models.keys, _bodies(settings)
    endpoints = [endpoint for protocol in protocols for endpoint in protocol.endpoints]
    keys_or_none = None if keys.stay_open else keys
    routes = [
        Handler(endpoint, protocol, models, keys_or_none, bodies, endpoints).route()
        for protocol in protocols
        for endpoint in protocol.endpoints
    ]
    app: ASGIApp = Router([*routes, *_documentation(models, endpoints)], redirect_slashes=False, default=_not_found)
    for repository in models.of_kind(RepositoryBackend):
        app, protocols = _route_v2(app, KServe(models, repository, keys)), (*protocols, KSERVE)
    app = AsgiEdge(app, models, protocols)
    return _with_cors(app, settings.cors_origins) if settings.cors_origins else app


class Listener(Interface):
    """A listener in addition to HTTP. name, url: as announced once it is open"""

    name: str
    url: str

    async def open(self) -> None:
        """Listen, in the running event loop. raises ConfigError"""

    async def close(self, within_s: float) -> None:
        """Accept no more requests, and wait for responses to be sent. May be called twice, or without `open`."""


def create_listeners(models: Models) -> list[Listener]:
    """Create the configured listeners; they are not open yet."""
    settings = models.serving.settings
    listeners: list[Listener] = []
    if settings.metrics_port is not None:
        listeners.append(MetricsListener(settings, models.serving.metrics))
    repositories = [r for r in models.of_kind(RepositoryBackend) if r.repository.flags.grpc_port is not None]
    if not repositories:
        return listeners
    from millrace.serve.protocols.kserve.grpc.server import GrpcServer  # an extra

    return [*listeners, *(GrpcServer(models, r, models.keys) for r in repositories)]


def create_fast_path(models: Models) -> FastPath | None:
    """Return the fast path of the served tensor models; None if there are none."""
    for repository in models.of_kind(RepositoryBackend):
        if not repository.http_guard.leaves_inference_alone:  # headers may say something else the next time
            return None
        return HttpFastPath(repository, models.keys, models.serving)
    return None


def _route_v2(app: ASGIApp, tensors: ASGIApp) -> ASGIApp:
    """Route /v2 first, because tensor models have thousands of short requests a second."""

    async def either(scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        await (tensors if path == V2_PREFIX or path.startswith(f"{V2_PREFIX}/") else app)(scope, receive, send)

    return either


def _bodies(settings: ServerSettings) -> BodyLimiter:
    together = max(settings.max_receiving_bytes, settings.max_body_bytes)  # a lone body of the largest size fits
    return BodyLimiter(settings.max_body_bytes, settings.body_timeout_s, together)


def _documentation(models: Models, endpoints: Sequence[HttpEndpoint]) -> list[Route]:
    """Return the documentation of this server's endpoints: /openapi.json, /docs to read it, and / to try it."""
    takers = {e.path: models.of_kind(e.backend or Backend) for e in endpoints}
    names = {path: able[0].model.name for path, able in takers.items() if able}
    defaults = {name: value for backend in models.backends for name, value in backend.defaults.items()}
    about = ServerDescription(names, defaults, not models.keys.are_open)
    described = openapi_document([e.operation for e in endpoints if e.path in names], about)
    if models.of_kind(RepositoryBackend):
        described["info"]["description"] += " KServe's protocol, v2, as Triton has it."
        described["paths"] |= openapi_paths(about.needs_key)
        described["components"]["schemas"] |= openapi_schemas()
    schema = msgspec.json.encode(described)
    return [
        Route("/openapi.json", Response(schema, media_type="application/json"), methods=["GET"]),
        Route("/docs", _page("docs.html"), methods=["GET"]),
        Route("/", _page("playground.html"), methods=["GET"]),
    ]


def _page(name: str) -> Response:
    headers = {"content-type": "text/html; charset=utf-8", "content-security-policy": _PAGE_POLICY}
    return Response((Path(__file__).parent / "ops" / name).read_bytes(), headers=headers)


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    raise HTTPException(404)


def _with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "x-millrace-ignored", "retry-after"],
    )
