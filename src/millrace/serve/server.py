"""The serving process: socket, event loop, warm-up, signals, and a graceful shutdown.

listening -> warming up -> ready -> (first signal) draining: new requests get 503, running ones finish
          -> shortly before the timeout, or at the second signal, what is left is aborted -> connections close -> end
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from millrace.runtime.service import STOP_S, use_short_switch_interval
from millrace.serve.app import PROTOCOLS, Listener, create_app, create_fast_path, create_listeners
from millrace.serve.backend import Backend, Models, ServedModel
from millrace.serve.http.routes import Protocol
from millrace.serve.http.server_context import ServerContext
from millrace.serve.http.sockets import listening
from millrace.serve.http.uvicorn_server import MIN_FLUSH_S, UvicornServer
from millrace.serve.ops.health import Phase
from millrace.serve.ops.logs import Logging
from millrace.serve.settings import ServerSettings

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
MIN_STOP_S = 1.0  # time for a step in progress, even if the time to drain is shorter
MAX_FLUSH_S = 5.0  # time at the end for complete answers to reach their clients
log = logging.getLogger(__name__)

Announce = Callable[..., None]  # called with the base URL, and with the URLs of further listeners


def serve(
    models: Sequence[ServedModel],
    settings: ServerSettings,
    announce: Announce | None = None,
    protocols: Sequence[Protocol] = PROTOCOLS,
    last: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return. Starts and closes the models' engines.

    protocols: the endpoints; the first writes the errors of requests to unknown paths
    announce: called with the base URL once the server is ready, and with the URLs of further listeners by name
        (grpc_url, metrics_url); it may raise BrokenPipeError
    last: the process ends afterwards, so both signals stay ignored: one more during the exit is no failure
    raises ConfigError if it cannot listen
    """
    import uvloop

    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def announce_ready(url: str, **also: str) -> None:
        gc.freeze()  # what exists now stays: later collections need not look at it
        if announce is not None:
            announce(url, **also)

    server = Server(models, settings, announce_ready, protocols)
    with (
        Logging(settings.log_format),
        use_short_switch_interval(),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_with_signals(server))
        if server.stuck:  # releasing memory now would pull it away from the running step
            log.critical("the process ends without waiting for the engine")
            os._exit(1)
    for number in () if last else _SIGNALS:
        signal.signal(number, before[number])
    gc.unfreeze()


class Server:
    """One server. Use `serve` to run it; tests run it in a thread."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        settings: ServerSettings,
        announce: Announce | None = None,
        protocols: Sequence[Protocol] = PROTOCOLS,
    ) -> None:
        self._served, self._settings, self._announce, self._protocols = models, settings, announce, protocols
        self.stuck = False  # an engine's step did not end: its memory must not be given back
        self._stopping, self._abort_requested = asyncio.Event(), asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self) -> None:
        """Listen, warm up, serve; returns after `stop`, when everything is finished or aborted. raises ConfigError"""
        self._loop = asyncio.get_running_loop()
        with listening(self._settings) as (sock, url):
            await self._run(sock, url)

    async def _run(self, sock: socket.socket, url: str) -> None:
        models = Models(ServerContext(self._settings), self._served)
        settings = models.serving.settings
        app, fast_path = create_app(models, self._protocols), create_fast_path(models)
        web, listeners = (
            UvicornServer.from_settings(app, settings, settings.max_connections, fast_path),
            create_listeners(models),
        )
        try:
            for listener in listeners:
                await listener.open()
            async with contextlib.AsyncExitStack() as started:
                for backend in models.backends:
                    backend.start()
                    started.push_async_callback(backend.abort, STOP_S)
                started.pop_all()  # from here on `_serve` does that
            await self._serve(models, web, sock, url, listeners)
        finally:
            await asyncio.gather(*(listener.close(0) for listener in listeners))
            models.close()

    async def _serve(
        self, models: Models, web: UvicornServer, sock: socket.socket, url: str, listeners: Sequence[Listener]
    ) -> None:  # fmt: skip
        web_ends = asyncio.create_task(web.serve(sockets=[sock]))
        warming = asyncio.create_task(
            self._get_ready(models, web, url, {listener.name: listener.url for listener in listeners})
        )
        for task in (web_ends, warming):
            task.add_done_callback(self._stop_on_bug)
        try:
            await self._stopping.wait()
            await self._drain(models)
        finally:
            warming.cancel()
            hurrying, until_s = self._abort_requested.is_set(), time.monotonic() + self._flush_s
            await self._abort(models, STOP_S if hurrying else max(MIN_STOP_S, self._flush_s))
            flush_s = MIN_FLUSH_S if hurrying else max(MIN_FLUSH_S, until_s - time.monotonic())
            await asyncio.gather(web.end(web_ends, flush_s), *(listener.close(flush_s) for listener in listeners))
            await asyncio.wait((warming, web_ends))
        for task in (warming, web_ends):
            if not task.cancelled():
                task.result()

    def stop(self) -> None:
        """Begin to drain; the second call stops waiting. May be called from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.stop_here)

    def stop_here(self) -> None:
        """Do as `stop`, from the event loop's thread."""
        (self._abort_requested if self._stopping.is_set() else self._stopping).set()

    def _stop_on_bug(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._stopping.set()  # `run` raises it

    async def _abort(self, models: Models, within_s: float) -> None:
        """Abort all backends, so that every stream ends, and close the executors."""
        await asyncio.gather(*(backend.abort(within_s) for backend in models.backends))
        self.stuck = any(backend.stuck for backend in models.backends)
        models.serving.close()

    async def _get_ready(self, models: Models, web: UvicornServer, url: str, listener_urls: Mapping[str, str]) -> None:
        heartbeat = models.heartbeat
        troubles = await asyncio.gather(*(b.warm_up() for b in models.backends))
        while not web.started:
            await asyncio.sleep(0.002)
        if heartbeat.phase is not Phase.WARMING:
            return
        failed = {backend: trouble for backend, trouble in zip(models.backends, troubles, strict=True) if trouble}
        if failed:
            heartbeat.phase, heartbeat.trouble = Phase.BROKEN, partial(_troubles, failed)
            if trouble := heartbeat.trouble():  # it may be fixed while another model warms up
                log.error("this server is not ready: %s", trouble)
            are_recovered = await asyncio.gather(*(backend.wait_until_recovered() for backend in failed))
            if not all(are_recovered) or heartbeat.phase is not Phase.BROKEN:
                return
        heartbeat.phase = Phase.SERVING
        log.info("serving %s at %s", ", ".join(b.model.name for b in models.backends), url)
        if self._announce is not None:
            try:
                self._announce(url, **listener_urls)
            except BrokenPipeError:  # `millrace serve | head -1`
                log.warning("whoever read this server's output has gone; it serves all the same")

    @property
    def _flush_s(self) -> float:
        """Return the last part of the time to drain, in which steps end and complete answers reach their clients."""
        return min(MAX_FLUSH_S, max(MIN_FLUSH_S, self._settings.drain_timeout_s / 10))

    async def _drain(self, models: Models) -> None:
        models.heartbeat.phase = Phase.DRAINING
        timeout_s = max(0.0, self._settings.drain_timeout_s - self._flush_s)
        log.info("draining: running requests have %g s to finish", timeout_s)
        draining = asyncio.create_task(models.serving.admission.drain(timeout_s))
        hurrying = asyncio.create_task(self._abort_requested.wait())
        await asyncio.wait((draining, hurrying), return_when=asyncio.FIRST_COMPLETED)
        if not draining.done() or not draining.result():
            log.warning("draining was cut short: unfinished requests are aborted")
        draining.cancel()
        hurrying.cancel()
        await asyncio.wait((draining, hurrying))


def _troubles(failed: Mapping[Backend, str]) -> str:
    """Return what is wrong now. failed: backends whose warm-up failed, with its messages"""
    now = ((backend, backend.current_failure(at_first)) for backend, at_first in failed.items())
    return "; ".join(f"{backend.failure_text}: {trouble}" for backend, trouble in now if trouble)


async def _with_signals(server: Server) -> None:
    loop = asyncio.get_running_loop()
    # Not loop.add_signal_handler: removing its handler restores the default one, and the next signal ends the process.
    for number in _SIGNALS:
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(server.stop_here))
    try:
        await server.run()
    finally:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
