"""A real server in a thread: uvicorn, AsyncEngine and EngineLoop are the real ones, the executor is the runtime's fake.

The tokenizer is trained in the test. The fake model draws ids below 97, which are "!" .. "~" and three single bytes.
"""

import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from millrace.checkpoint.chat.chat_template import ChatLimits, ChatTemplate
from millrace.checkpoint.config.generation_config import read_generation
from millrace.checkpoint.tokenizer.tokenizer import Tokenizer
from millrace.checkpoint.tokenizer.tokenizer_files import open_tokenizer
from millrace.engine.executor import ExecutorLimits, StepInputs
from millrace.runtime.loop import EngineLoop
from millrace.runtime.loop_stats import LoopStats
from millrace.runtime.scheduling.token_budget import TokenBudget
from millrace.runtime.service import AsyncEngine, ServiceOptions
from millrace.serve.llm.language_model import TextModel
from millrace.serve.server import Server
from millrace.serve.settings import ServerSettings
from tests.runtime.fakes import FakeExecutor, fake_tier, limits
from tests.support.server import in_thread, wait_until_idle
from tests.support.vocabularies import CHATML, save_byte_level

MODEL = "fake"
VOCABULARY = 700
START = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
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
    template: str | Mapping[str, str] | None = CHATML
    template_timeout_s: float = 2.0
    aliases: tuple[str, ...] = ()
    folder: Path | None = None  # of the tokenizer's files, for processes of long texts
    tier: Path | None = None  # the KV offload file
    ends: bool = False  # the model has an end-of-text token; else answers end by their length, or at a stop
    words: Tokenizer | None = None  # in place of the one above
    executor: Callable[[ExecutorLimits, Callable[[StepInputs], None] | None], FakeExecutor] = FakeExecutor
    prefix_cache: bool = True
    clock: Callable[[], float] = time.perf_counter  # of the engine
    sampling: Mapping[str, object] = field(default_factory=dict)  # generation_config.json

    def model(self) -> TextModel:
        size = self.limits.max_step_tokens  # whole prompts at once: as many sequences as can be, so that pages run out
        budget = TokenBudget(size, chunk_low=size)
        executor, words = self.executor(self.limits, self.before_run), self.words or tokenizer()
        tier = None if self.tier is None else fake_tier(executor, self.tier)
        ends = [words.eos_token_id] if self.ends else []
        defaults = replace(read_generation(self.sampling), eos_token_ids=tuple(end for end in ends if end is not None))
        loop = EngineLoop(executor, words, defaults, self.clock, budget, self.prefix_cache, tier=tier)
        return TextModel(
            name=MODEL,
            aliases=self.aliases,
            engine=AsyncEngine(loop, self.options),
            tokenizer=words,
            tokenizer_folder=self.folder,
            chat_template=None
            if self.template is None
            else ChatTemplate(self.template, {}, ChatLimits(timeout_s=self.template_timeout_s)),
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
    model: TextModel
    thread: threading.Thread

    @property
    def openai(self) -> str:
        return f"{self.url}/v1"

    def stats(self) -> LoopStats:
        return self.model.engine.stats()

    def wait_until_idle(self, timeout_s: float = 10.0) -> LoopStats:
        return wait_until_idle(self.model.engine, timeout_s)


@contextmanager
def running(fake: Fake | None = None, settings: ServerSettings | None = None, wait: bool = True) -> Iterator[Running]:
    """Serve on a free port; afterwards the server must end by itself, and nothing may be left in the engine.

    wait: until it is ready; otherwise the settings name a port
    """
    model = (fake or Fake()).model()
    with in_thread(model, settings, start_s=20, stop_s=20, wait=wait) as served:
        yield Running(served.url, served.server, model, served.thread)


def post(url: str, path: str, body: object, **headers: str) -> httpx.Response:
    return httpx.post(url + path, json=body, headers=headers, timeout=20)


@contextmanager
def serving_with(fake: Fake | None = None, **settings: object) -> Iterator[Running]:
    with running(fake, ServerSettings(port=0, **settings)) as server:  # type: ignore[arg-type]
        yield server


def http_requests(server: Running, path: str, status: int) -> float:
    """How many were answered so."""
    for family in text_string_to_metric_families(httpx.get(server.url + "/metrics").text):
        for sample in family.samples:
            if sample.name == "millrace:http_requests_total" and sample.labels == {"path": path, "status": str(status)}:
                return sample.value
    return 0.0


def connect(server: Running, receive_bytes: int | None = None) -> socket.socket:
    raw = socket.socket()
    if receive_bytes is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    raw.settimeout(10)
    raw.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    return raw


def until(happened: Callable[[], object], timeout_s: float = 20) -> None:
    until_s = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < until_s, "it did not come to that"
        time.sleep(0.005)


def everything(raw: socket.socket) -> bytes:
    """What the server says until it closes."""
    parts = []
    while part := raw.recv(65536):
        parts.append(part)
    return b"".join(parts)
