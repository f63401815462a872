"""A separate port that serves only /metrics, for monitoring without access to the API."""

import asyncio
import contextlib

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from millrace.prometheus import CONTENT_TYPE
from millrace.serve.http.sockets import bind, url_of
from millrace.serve.http.uvicorn_server import UvicornServer
from millrace.serve.ops.metrics import ServerMetrics
from millrace.serve.settings import ServerSettings

_MAX_CONNECTIONS = 32


class MetricsListener:
    """A listener that serves only /metrics. url: with the path"""

    name = "metrics_url"

    def __init__(self, settings: ServerSettings, metrics: ServerMetrics) -> None:
        self._settings, self._metrics, self.url = settings, metrics, ""
        self._web: UvicornServer | None = None
        self._ends: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Listen. raises ConfigError"""
        assert self._settings.metrics_port is not None
        sock = bind(self._settings.host, self._settings.metrics_port, "--metrics-port")
        self.url = f"{url_of(sock, self._settings)}/metrics"
        self._web = UvicornServer.from_settings(self._app, self._settings, _MAX_CONNECTIONS)
        self._ends = asyncio.get_running_loop().create_task(self._web.serve(sockets=[sock]))

    async def close(self, within_s: float) -> None:
        web, self._web = self._web, None
        if web is not None and self._ends is not None:
            await web.end(self._ends, within_s)
            with contextlib.suppress(asyncio.CancelledError):
                await self._ends

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].rstrip("/") != "/metrics":
            response = Response("only /metrics is here\n", 404, media_type="text/plain")
        elif scope["method"] not in ("GET", "HEAD"):
            response = Response("GET /metrics\n", 405, {"allow": "GET"}, media_type="text/plain")
        else:
            response = Response(self._metrics.text(), headers={"content-type": CONTENT_TYPE})
        await response(scope, receive, send)
