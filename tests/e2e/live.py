"""The whole product in a thread of this process: engine folder, native executor, loop and uvicorn, nothing faked."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import openai

from millrace.checkpoint.chat.chat_template import ChatLimits, ChatTemplate
from millrace.cli.serve.run import _text_model
from millrace.engine.artifact.engine import Engine
from millrace.runtime.loop_stats import LoopStats
from millrace.runtime.open_engine import RunningModel, open_engine
from millrace.runtime.service import AsyncEngine, ServiceOptions
from millrace.runtime.settings import RunSettings
from millrace.serve.settings import ServerSettings
from tests.support.server import in_thread, wait_until_idle

MODEL = "served"
JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Live:
    """A server that answers at `url`."""

    url: str
    opened: RunningModel
    engine: AsyncEngine

    def client(self, api_key: str = "none needed") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=60)

    def post(self, path: str, body: object) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60)

    def stats(self) -> LoopStats:
        return self.engine.stats()

    def wait_until_idle(self, timeout_s: float = 20.0) -> LoopStats:
        return wait_until_idle(self.engine, timeout_s)


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
    with serving(opened, settings, options) as server:
        yield server


@contextmanager
def serving(
    opened: RunningModel, settings: ServerSettings | None = None, options: ServiceOptions | None = None
) -> Iterator[Live]:  # fmt: skip
    """As `live`, of a model that was opened; closed at the end."""
    async_engine = AsyncEngine(opened.loop(), options)
    model = _text_model(opened, async_engine, (MODEL,))
    try:
        with in_thread(model, settings, start_s=60, stop_s=30) as served:
            yield Live(served.url, opened, async_engine)
    finally:
        opened.close()
