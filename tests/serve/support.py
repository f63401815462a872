"""A real server in a thread: uvicorn, AsyncEngine and EngineLoop are the real ones, the executor is the runtime's fake.

The tokenizer is trained in the test. The fake model draws ids below 97, which are "!" .. "~" and three single bytes.
"""

import asyncio
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import httpx
import uvloop

from millrace.checkpoint.chat import ChatLimits, ChatTemplate
from millrace.checkpoint.tokenizer import Tokenizer, open_tokenizer
from millrace.engine.executor import ExecutorLimits, StepInputs
from millrace.errors import MillraceError
from millrace.runtime.budget import TokenBudget
from millrace.runtime.loop import EngineLoop
from millrace.runtime.service import AsyncEngine, ServiceOptions
from millrace.runtime.stats import LoopStats
from millrace.serve.server import Server
from millrace.serve.settings import ServedModel, ServerSettings
from tests.runtime.fakes import FakeExecutor, limits
from tests.support.vocabularies import CHATML, save_byte_level

MODEL = "fake"
VOCABULARY = 700
ROOMY = limits(vocab_size=VOCABULARY, max_context=512, n_pages=1024, max_step_tokens=64, page_tokens=4)


@cache
def tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        save_byte_level(Path(folder), VOCABULARY)
        return open_tokenizer(Path(folder))


@dataclass(frozen=True, kw_only=True)
class Fake:
    """What to serve."""

    limits: ExecutorLimits = ROOMY
    options: ServiceOptions = field(default_factory=ServiceOptions)
    before_run: Callable[[StepInputs], None] | None = None
    template: str | None = CHATML
    aliases: tuple[str, ...] = ()

    def model(self) -> ServedModel:
        size = self.limits.max_step_tokens  # whole prompts at once: as many sequences as can be, so that pages run out
        budget = TokenBudget(size, chunk_low=size)
        executor = FakeExecutor(self.limits, self.before_run)
        loop = EngineLoop(executor, tokenizer(), clock=time.perf_counter, budget=budget)
        return ServedModel(
            name=MODEL,
            aliases=self.aliases,
            engine=AsyncEngine(loop, self.options),
            tokenizer=tokenizer(),
            chat_template=None if self.template is None else ChatTemplate(self.template, {}, ChatLimits(timeout_s=2.0)),
            created=1_700_000_000,
            metadata={
                "license": "apache-2.0",
                "engine": "0123abcd",
                "source": "made up",
                "precision": {"weights": "w4"},
            },
            max_context=self.limits.max_context,
        )


@dataclass(frozen=True)
class Running:
    url: str
    server: Server
    model: ServedModel
    thread: threading.Thread

    @property
    def openai(self) -> str:
        return f"{self.url}/v1"

    def stats(self) -> LoopStats:
        return self.model.engine.stats()

    def wait_until_idle(self, timeout_s: float = 10.0) -> LoopStats:
        """Everything that was cancelled has left, and every page is back."""
        until_s = time.monotonic() + timeout_s
        while not (stats := self.stats()).idle or stats.pages_used:
            assert time.monotonic() < until_s, stats
            time.sleep(0.005)
        return stats


@contextmanager
def running(fake: Fake | None = None, settings: ServerSettings | None = None, wait: bool = True) -> Iterator[Running]:
    """Serve on a free port; afterwards the server must end by itself, and nothing may be left in the engine.

    wait: until it is ready; otherwise the settings name a port
    """
    model = (fake or Fake()).model()
    ready, urls, failures = threading.Event(), list[str](), list[MillraceError]()

    def announce(url: str) -> None:
        urls.append(url)
        ready.set()

    chosen = settings or ServerSettings(port=0)
    server = Server(model, chosen, announce)

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(server.run())
        except MillraceError as error:
            failures.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="test-server")
    thread.start()
    if wait:
        assert ready.wait(20) and urls, failures
    handle = Running(urls[0] if wait else f"http://127.0.0.1:{chosen.port}", server, model, thread)
    try:
        yield handle
    finally:
        server.stop()
        server.stop()
        thread.join(20)
        assert not thread.is_alive()
        stats = model.engine.stats()
        assert stats.pages_used == 0 and stats.running == stats.waiting == 0


def post(url: str, path: str, body: object, **headers: str) -> httpx.Response:
    return httpx.post(url + path, json=body, headers=headers, timeout=20)
