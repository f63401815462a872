"""A `Server` in a thread of this process, and the end that each must come to."""

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import uvloop

from millrace.errors import MillraceError
from millrace.runtime.loop_stats import LoopStats
from millrace.runtime.service import AsyncEngine
from millrace.serve.app import PROTOCOLS
from millrace.serve.backend import ServedModel
from millrace.serve.http.routes import Protocol
from millrace.serve.llm.language_model import TextModel
from millrace.serve.server import Server
from millrace.serve.settings import ServerSettings


@dataclass(frozen=True)
class Threaded:
    url: str
    grpc_url: str
    metrics_url: str
    server: Server
    thread: threading.Thread


@contextmanager
def in_thread(
    model: ServedModel,
    settings: ServerSettings | None,
    *,
    start_s: float,
    stop_s: float,
    wait: bool = True,
    protocols: Sequence[Protocol] = PROTOCOLS,
) -> Iterator[Threaded]:
    """Serve on a free port. Afterwards the server must end by itself, with every page given back.

    wait: until it is ready; otherwise the settings name a port
    """
    ready, urls, failures = threading.Event(), list[str](), list[MillraceError]()

    def announce(url: str, grpc_url: str = "", metrics_url: str = "") -> None:
        urls.extend((url, grpc_url, metrics_url))
        ready.set()

    chosen = settings or ServerSettings(port=0)
    server = Server([model], chosen, announce, protocols)

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(server.run())
        except MillraceError as error:
            failures.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="server-under-test")
    thread.start()
    try:
        if wait:
            assert ready.wait(start_s) and urls, failures
        url, grpc_url, metrics_url = urls if wait else (f"http://127.0.0.1:{chosen.port}", "", "")
        yield Threaded(url, grpc_url, metrics_url, server, thread)
    finally:
        server.stop()
        server.stop()
        thread.join(stop_s)
        assert not thread.is_alive()
        if isinstance(model, TextModel):
            stats = model.engine.stats()
            assert stats.pages_used == 0 and stats.running == stats.waiting == 0, stats


def wait_until_idle(engine: AsyncEngine, timeout_s: float) -> LoopStats:
    """Everything that was cancelled has left, and every page is back."""
    until_s = time.monotonic() + timeout_s
    while not (stats := engine.stats()).idle or stats.pages_used:
        assert time.monotonic() < until_s, stats
        time.sleep(0.005)
    return stats
