"""uvicorn with limited connections, without its signal handlers, and with a shutdown in bounded time."""

import asyncio
import contextlib
import functools
import math
import socket
from collections.abc import Iterator
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from millrace.serve.http.connection import Connection
from millrace.serve.http.connection_limits import ConnectionLimits, number_of_connections
from millrace.serve.http.connection_table import Connections
from millrace.serve.http.fast_path import FastPath
from millrace.serve.settings import ServerSettings

TICK_S = 0.1
SWEEP_TICKS = 5
FIRST_CHECK_S = 0.001  # delay before connections are checked for closure: most are gone at once
MIN_FLUSH_S = 0.25  # time at the end for complete answers to reach their clients


class UvicornServer(uvicorn.Server):
    """uvicorn without signal handling: it would raise signals again after shutdown, for an exit status other than 0."""

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self._all_connections, self._ending = connections, asyncio.Event()

    @classmethod
    def from_settings(
        cls, app: ASGIApp, settings: ServerSettings, max_connections: int | None,
        fast_path: FastPath | None = None,
    ) -> "UvicornServer":  # fmt: skip
        """max_connections: None for as many as there are files for; fast_path: asked before the app"""
        connections = Connections(
            ConnectionLimits(
                max_connections=number_of_connections(max_connections), header_timeout_s=settings.header_timeout_s,
                keep_alive_s=settings.keep_alive_s, write_timeout_s=settings.write_timeout_s,
                max_unread_bytes=settings.max_unread_bytes,
            )
        )  # fmt: skip
        http = functools.partial(Connection, connections, fast_path)
        config = uvicorn.Config(
            app, interface="asgi3", loop="none", http=cast(type[asyncio.Protocol], http),  # uvicorn only calls it
            ws="none", lifespan="off", log_config=None, access_log=False, server_header=False, proxy_headers=False,
            timeout_keep_alive=math.ceil(settings.keep_alive_s), ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
        )  # fmt: skip
        return cls(config, connections)

    async def main_loop(self) -> None:
        """Run uvicorn's main loop, but wake up at once at the end instead of at the next tick."""
        counter = 0
        while not await self.on_tick(counter):
            counter += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), TICK_S)

    async def on_tick(self, counter: int) -> bool:
        if counter % SWEEP_TICKS == 0:
            self._all_connections.sweep()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down as uvicorn does, without its pause of 0.1 s if nothing is left to close.

        There is no lifespan to end: `from_settings` turns that off.
        """
        for listener in (*self.servers, *(sockets or ())):
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        pause_s = FIRST_CHECK_S
        while (self.server_state.connections or self.server_state.tasks) and not self.force_exit:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, TICK_S)
        for server in self.servers:
            await server.wait_closed()

    async def end(self, listening: asyncio.Task[None], flush_s: float) -> None:
        """Close idle and incomplete connections, wait for complete answers to be read, and abort the rest.

        listening: the task that runs `serve`; flush_s: how long to wait
        """
        self.should_exit = True
        self._ending.set()
        await asyncio.wait((listening,), timeout=flush_s)
        self._all_connections.abort()
        await asyncio.wait((listening,), timeout=MIN_FLUSH_S)
        self.force_exit = True  # whatever does not end by itself is left alone

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
