"""Chat templates and tokenisation, kept off the event loop: a long text must not hold up anybody's stream."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from millrace.checkpoint.chat import ChatTemplate
from millrace.checkpoint.tokenizer import Tokenizer, check_unicode
from millrace.checkpoint.tokenizer_process import TokenizerProcess
from millrace.errors import BusyError
from millrace.serve.errors import HttpError

T = TypeVar("T")
SHORT_CHARACTERS = 512  # tokenised at once: that takes less time than the way to a thread and back
LONG_CHARACTERS = 8192  # in a process of its own, which is started for the first such text
# Their priority is that of all threads: a nice one that held the interpreter's lock would be waited for by the engine.
N_THREADS = 2


class Texts:
    """Text to tokens and back, and messages to text. At most `max_pending` calls wait or run at a time."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, max_pending: int, folder: Path | None = None
    ) -> None:
        """folder: of the tokenizer's files; with it, long texts are tokenised in a process of their own"""
        self.tokenizer = tokenizer
        self._process = TokenizerProcess(folder) if folder else None
        self._template = template
        self._max_pending = max_pending
        self._n_pending = 0
        self._encoding = ThreadPoolExecutor(N_THREADS, thread_name_prefix="millrace-text")
        # templates take turns anyway, and one that loops must not hold up completions as well
        self._rendering = ThreadPoolExecutor(1, thread_name_prefix="millrace-template")

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """raises RequestError for what is no Unicode text, BusyError"""
        if len(text) <= SHORT_CHARACTERS:
            return self.tokenizer.encode(text, add_special_tokens)
        return await self._run(self._encoding, lambda: self._encode_long(text, add_special_tokens))

    def _encode_long(self, text: str, add_special_tokens: bool) -> list[int]:
        if self._process is None or len(text) < LONG_CHARACTERS:
            return self.tokenizer.encode(text, add_special_tokens)
        check_unicode(text)
        return self._process.encode(text, add_special_tokens)

    async def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """raises BusyError"""
        if len(ids) <= SHORT_CHARACTERS:
            return self.tokenizer.decode(ids, skip_special_tokens)
        return await self._run(self._encoding, lambda: self.tokenizer.decode(ids, skip_special_tokens))

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool,
        extra: Mapping[str, object],
        add_special_tokens: bool,
    ) -> list[int]:
        """Render and encode. raises HttpError without a template, and what ChatTemplate.render raises; BusyError"""
        template = self._template
        if template is None:
            raise HttpError(
                400,
                "no_chat_template",
                "this model has no chat template",
                "a request to /v1/completions",
                "send the whole prompt as text, or serve a model that has a chat template",
            )

        def render() -> str:
            return template.render(messages, add_generation_prompt=add_generation_prompt, extra=extra)

        return await self.encode(await self._run(self._rendering, render), add_special_tokens)

    def close(self) -> None:
        for threads in (self._encoding, self._rendering):
            threads.shutdown(wait=False, cancel_futures=True)
        for process in (self._template, self._process):
            if process is not None:
                process.close()

    async def _run(self, threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        if self._n_pending >= self._max_pending:
            raise BusyError(f"{self._n_pending} requests are being prepared", "fewer at a time", "come back later", 1.0)
        self._n_pending += 1
        future = threads.submit(work)
        # counted until the thread is done with it, not until its client lost patience
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: _later(loop, self._done))
        return await asyncio.wrap_future(future)

    def _done(self) -> None:
        self._n_pending -= 1


def _later(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)
