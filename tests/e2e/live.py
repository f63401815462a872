"""The whole product in a thread of this process: engine folder, native executor, loop and uvicorn, nothing faked."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import openai
import uvloop

from millrace.checkpoint.chat import ChatLimits, ChatTemplate
from millrace.engine.engine import Engine
from millrace.errors import MillraceError
from millrace.runtime.open import Opened, RunSettings, open_engine
from millrace.runtime.service import AsyncEngine, ServiceOptions
from millrace.runtime.stats import LoopStats
from millrace.serve.server import Server
from millrace.serve.settings import ServedModel, ServerSettings

MODEL = "served"
JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Live:
    """A server that answers at `url`."""

    url: str
    opened: Opened
    engine: AsyncEngine

    def client(self, api_key: str = "none needed") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=60)

    def post(self, path: str, body: object) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60)

    def stats(self) -> LoopStats:
        return self.engine.stats()

    def wait_until_idle(self, timeout_s: float = 20.0) -> LoopStats:
        """Everything that was cancelled has left, and every page is back."""
        until_s = time.monotonic() + timeout_s
        while not (stats := self.stats()).idle or stats.pages_used:
            assert time.monotonic() < until_s, stats
            time.sleep(0.005)
        return stats


@contextmanager
def live(
    engine: Path,
    settings: ServerSettings | None = None,
    options: ServiceOptions | None = None,
    template: str | None = None,
) -> Iterator[Live]:
    """Serve on a free port. Afterwards the server must end by itself, with every page given back.

    template: in place of the model's own, with 2 s for a rendering
    """
    opened = open_engine(MODEL, Engine.open(engine), RunSettings())
    if template is not None:
        opened = replace(opened, chat_template=ChatTemplate(template, {}, ChatLimits(timeout_s=2.0)))
    async_engine = AsyncEngine(opened.loop(), options)
    model = ServedModel(
        name=MODEL,
        engine=async_engine,
        tokenizer=opened.tokenizer,
        tokenizer_folder=opened.tokenizer_folder,
        chat_template=opened.chat_template,
        created=1_700_000_000,
        max_context=opened.engine.manifest.max_context,
    )
    ready, urls, failures = threading.Event(), list[str](), list[MillraceError]()

    def announce(url: str) -> None:
        urls.append(url)
        ready.set()

    server = Server(model, settings or ServerSettings(port=0), announce)

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
    assert ready.wait(60) and urls, failures
    try:
        yield Live(urls[0], opened, async_engine)
    finally:
        server.stop()
        server.stop()
        thread.join(30)
        opened.close()
        stats = async_engine.stats()
        assert not thread.is_alive()
        assert stats.pages_used == 0 and stats.running == stats.waiting == 0, stats
