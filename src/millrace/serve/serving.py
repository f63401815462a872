"""What the handlers share: the model, its texts, its metrics, and how it is named in answers."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from millrace import __version__
from millrace.runtime.service import AsyncEngine
from millrace.serve.errors import HttpError
from millrace.serve.health import Heartbeat
from millrace.serve.lanes import Lane
from millrace.serve.metrics import Metrics
from millrace.serve.settings import ServedModel, ServerSettings
from millrace.serve.texts import Texts

T = TypeVar("T")
LARGE_BODY = 64 * 1024  # bytes of JSON: half a millisecond of the event loop
LARGE = 8192  # tokens of an answer, characters of stop strings: a few milliseconds
LARGE_STEP = 512  # log probabilities of an answer that is held until it is complete: about a millisecond


@dataclass(slots=True)
class Load:
    """Requests that are being answered, of every kind."""

    n: int = 0


class Unsent:
    """Bytes of the log probabilities of all answers that are held until they are complete; bounded together."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.n_bytes = max_bytes, 0

    def share(self) -> "Share":
        return Share(self)


class Share:
    """That of one answer."""

    def __init__(self, of: Unsent) -> None:
        self._of, self._n_bytes = of, 0

    def add(self, n_bytes: int) -> None:
        """raises HttpError with 503 where that is too much beside others"""
        self._n_bytes += n_bytes
        self._of.n_bytes += n_bytes
        if self._of.n_bytes > self._of.max_bytes and self._of.n_bytes > self._n_bytes:
            error = HttpError(
                503,
                "too_many_answers",
                "the answers that are being computed for others take all the memory for answers",
                "fewer large answers at a time",
                "come back later, or set stream to true",
            )
            error.headers["retry-after"] = "5"
            raise error

    def release(self) -> None:
        self._of.n_bytes -= self._n_bytes
        self._n_bytes = 0


@dataclass(frozen=True, kw_only=True)
class Serving:
    """One model being served."""

    model: ServedModel
    settings: ServerSettings
    texts: Texts
    bodies: Lane  # large ones are decoded here
    replies: Lane  # and written here
    answers: Lane  # those of the engine, which are not lost for want of a place
    unsent: Unsent
    metrics: Metrics
    heartbeat: Heartbeat
    load: Load = field(default_factory=Load)

    @cached_property
    def fingerprint(self) -> str:
        """Of this release, the model's first name, its engine and its precision: where it is equal, so are answers.

        The same model under another name has another one.
        """
        metadata = self.model.metadata
        parts = [__version__, self.model.name, metadata.get("engine"), metadata.get("precision")]
        return "fp_" + hashlib.blake2b(json.dumps(parts, default=str).encode(), digest_size=5).hexdigest()

    async def decoded(self, work: Callable[[], T], n_bytes: int) -> T:
        """`work()` on a body of so many bytes, in a thread where they are many. raises as `off_loop`"""
        return await self.bodies.run(work, n_bytes) if n_bytes > LARGE_BODY else work()

    async def off_loop(self, is_large: bool, work: Callable[[], T]) -> T:
        """`work()` for a reply, in a thread where it is large. raises BusyError, and whatever `work` raises"""
        return await self.replies.run(work) if is_large else work()

    async def written(self, is_large: bool, work: Callable[[], T]) -> T:
        """`off_loop` for what the engine has computed: there is a place for every answer."""
        return await self.answers.run(work) if is_large else work()

    def close(self) -> None:
        """Nobody waits for a text any more; what the engine has answered is still written, until `answers` closes."""
        self.texts.close()
        self.bodies.close()
        self.replies.close()

    def check_model(self, name: str | None) -> str:
        """The name to answer with: the one asked for, or the first. raises HttpError with 404"""
        if name is None:
            return self.model.name
        if name in self.model.names:
            return name
        raise HttpError(
            404,
            "model_not_found",
            f'the model "{name}" does not exist',
            "one of " + ", ".join(f'"{known}"' for known in self.model.names),
            "correct the model's name; /v1/models lists them",
        ).about("model")


def capacity(engine: AsyncEngine) -> int:
    """Sequences that may wait or run at a time."""
    return engine.options.max_queued + engine.limits.max_sequences


def make_serving(model: ServedModel, settings: ServerSettings) -> Serving:
    return Serving(
        model=model,
        settings=settings,
        texts=Texts(
            model.tokenizer, model.chat_template, settings.max_preparing, model.max_context, model.tokenizer_folder
        ),
        bodies=Lane("bodies", settings.max_preparing),
        replies=Lane("replies", settings.max_preparing),
        answers=Lane("answers", capacity(model.engine)),
        unsent=Unsent(settings.max_unread_bytes),
        metrics=Metrics(model.name, model.engine.stats, model.engine.limits),
        heartbeat=Heartbeat(model.engine.stats, settings.stall_timeout_s),
    )
