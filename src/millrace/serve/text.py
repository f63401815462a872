"""Language models behind their endpoints: chat, completions, and text to tokens and back."""

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from prometheus_client.core import Metric

from millrace import __version__
from millrace.checkpoint.chat import ChatTemplate
from millrace.checkpoint.tokenizer import Tokenizer
from millrace.errors import MillraceError
from millrace.runtime.loop import LoopStats
from millrace.runtime.params import FinishReason, SamplingParams
from millrace.runtime.service import AsyncEngine
from millrace.serve.backend import Backend, ServedModel
from millrace.serve.lanes import Lane
from millrace.serve.metrics import engine_metrics
from millrace.serve.protocol import Message
from millrace.serve.serving import Serving
from millrace.serve.texts import Texts

T = TypeVar("T")
WARM_UP_TOKENS = 2
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TextModel(ServedModel):
    """A language model. The server starts and closes `engine`; its executor's owner closes that."""

    engine: AsyncEngine
    tokenizer: Tokenizer
    tokenizer_folder: Path | None = None  # where a process for long texts finds it; None: they go to a thread
    chat_template: ChatTemplate | None

    def backend(self, serving: Serving) -> "TextBackend":
        return TextBackend(self, serving)


class TextBackend(Backend):
    """A language model, its texts, and how it is named in answers."""

    what = "a language model"

    def __init__(self, model: TextModel, serving: Serving) -> None:
        super().__init__(model, serving)
        self.model: TextModel = model
        self.unsent, self.off_loop = serving.unsent, serving.off_loop
        self.texts = Texts(
            model.tokenizer, model.chat_template, serving.settings.max_preparing, model.max_context,
            model.tokenizer_folder,
        )  # fmt: skip
        self._answers = Lane("answers", self.capacity)  # those of the engine, which are not lost for want of a place

    @property
    def capacity(self) -> int:
        """Sequences that may wait or run at a time."""
        engine = self.model.engine
        return engine.options.max_queued + engine.limits.max_sequences

    @property
    def defaults(self) -> Mapping[str, object]:
        of_model = asdict(self.model.engine.loop.defaults)
        return {name: value for name, value in of_model.items() if value is not None}

    @cached_property
    def fingerprint(self) -> str:
        """Of this release, the model's first name, its engine and its precision: where it is equal, so are answers.

        The same model under another name has another one.
        """
        metadata = self.model.metadata
        parts = [__version__, self.model.name, metadata.get("engine"), metadata.get("precision")]
        return "fp_" + hashlib.blake2b(json.dumps(parts, default=str).encode(), digest_size=5).hexdigest()

    async def written(self, is_large: bool, work: Callable[[], T]) -> T:
        """`off_loop` for what the engine has computed: there is a place for every answer."""
        return await self._answers.run(work) if is_large else work()

    def start(self) -> None:
        self.model.engine.start()

    async def warm_up(self) -> str | None:
        """A request and a chat, side by side."""
        trouble, _ = await asyncio.gather(self._warm_up_engine(), self._warm_up_template())
        return trouble

    def pulse(self) -> LoopStats:
        return self.model.engine.stats()

    def collect(self) -> Iterator[Metric]:
        return engine_metrics(self.model.name, self.model.engine.stats(), self.model.engine.limits)

    async def drain(self, timeout_s: float) -> bool:
        return await self.model.engine.drain(timeout_s)

    async def abort(self) -> None:
        await self.model.engine.close()
        self.texts.close()

    def close(self) -> None:
        self.texts.close()
        self._answers.close()

    @property
    def stuck(self) -> bool:
        return self.model.engine.stuck

    async def _warm_up_engine(self) -> str | None:
        engine, tokenizer = self.model.engine, self.model.tokenizer
        token = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id or 0
        n_tokens = max(1, min(WARM_UP_TOKENS, self.model.max_context - 1))
        params = SamplingParams(max_tokens=n_tokens, temperature=0.0, ignore_eos=True, seed=0)
        try:
            async with engine.submit([[token]], [params], "warm-up") as handle:
                async for deltas in handle:
                    for delta in deltas:
                        if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                            return delta.error or "it was aborted"
        except MillraceError as error:
            return str(error)
        return None

    async def _warm_up_template(self) -> None:
        if self.model.chat_template is None:
            return
        try:
            await self.texts.encode_chat([Message(role="user", content="Hi")])
        except MillraceError as error:  # completions work all the same, and every chat is told
            log.warning("the chat template does not render a greeting: %s", error)
