"""POST /v1/embeddings and the backends of encoders; texts of all clients are batched in the same steps."""

import asyncio
import binascii
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from starlette.responses import Response
from starlette.types import ASGIApp

from millrace.checkpoint.tokenizer.pair_template import PairTemplate
from millrace.checkpoint.tokenizer.tokenizer import Tokenizer
from millrace.engine.encoder_inputs import Ids
from millrace.errors import BusyError, MillraceError, RequestError
from millrace.prometheus import MetricFamily
from millrace.runtime.encoder_loop import (
    MAX_INPUTS,
    EncoderLoop,
    EncoderStats,
    Vectors,
    check_ids,
    truncate_ids,
    truncation,
)
from millrace.runtime.service import RETRY_HIGH_S, RETRY_LOW_S, ServiceOptions, stop_within
from millrace.serve.backend import Backend, ServedModel
from millrace.serve.http.http_request import RequestContext
from millrace.serve.http.server_context import OFF_LOOP_ITEMS, ServerContext
from millrace.serve.llm.encoder_requests import EmbeddingRequest
from millrace.serve.llm.language_model import TextProcessor
from millrace.serve.llm.matryoshka import Matryoshka, check_dimensions, shorten
from millrace.serve.llm.request_decoding import TextsOrIds, drop_large_fields, texts_or_ids
from millrace.serve.llm.response_types import Embedding, EmbeddingReply, EmbeddingUsage
from millrace.serve.ops.metrics import counter, gauge

MAX_WAITING_TOKENS = 4 * 2**20  # of all requests; a request of at most SMALL_TOKENS is admitted above that
SMALL_TOKENS = 16 * 2**10
FLOAT_BYTES = 24  # of a number in JSON with its comma, at most
FORMATS = ("float", "base64")


@dataclass(frozen=True, kw_only=True)
class EncoderModel(ServedModel):
    """A text encoder. The server starts and stops `loop`; whatever loaded the model closes it."""

    loop: EncoderLoop
    tokenizer: Tokenizer
    tokenizer_folder: Path | None = None  # where a process for long texts finds it; None: they go to a thread
    pairs: PairTemplate | None = None  # of a cross-encoder, which reads two texts at once
    matryoshka: Matryoshka | None = None  # None: vectors of one length
    max_queued: int = ServiceOptions().max_queued  # requests that may wait, of MAX_INPUTS texts each

    def backend(self, serving: ServerContext) -> "EncoderBackend":
        return EmbeddingBackend(self, serving) if self.pairs is None else CrossEncoderBackend(self, self.pairs, serving)


class EncoderBackend(Backend):
    """A text encoder with its tokenisation and queue limits. Its kinds are the classes below."""

    def __init__(self, model: EncoderModel, serving: ServerContext) -> None:
        super().__init__(model, serving)
        self.model: EncoderModel = model
        self.limits = model.loop.limits
        self.unsent, self.off_loop = serving.unsent, serving.off_loop
        self.texts = TextProcessor(
            model.tokenizer, None, serving.settings.max_preparing, model.max_context, model.tokenizer_folder
        )
        self._stuck = False
        self._n_running = 0  # requests

    async def vectors(self, texts: Sequence[Ids], n_first: Sequence[int] | None = None) -> Vectors:
        """Return the vectors of checked texts, in order; cancelling the task removes them from the queue.

        n_first: as in EncoderLoop.submit
        raises BusyError if too many are waiting or the server ends, EngineError if a step failed
        """
        stats = self.health()
        n_tokens, most = sum(map(len, texts)), self.model.max_queued
        if stats.requests >= most:
            message, expected = f"{stats.requests} requests are waiting", f"less than {most}"
        elif n_tokens > SMALL_TOKENS and stats.waiting_tokens + n_tokens > MAX_WAITING_TOKENS and stats.requests:
            message, expected = f"{stats.waiting_tokens} tokens are waiting", f"at most {MAX_WAITING_TOKENS} with these"
        else:
            message = expected = ""
        if message:
            raise BusyError(message, expected, "come back later", _retry_after_s(stats))
        job = self.model.loop.submit(texts, n_first)
        self._n_running += 1
        try:
            return await asyncio.wrap_future(job.future)
        finally:
            self._n_running -= 1

    def start(self) -> None:
        self.model.loop.start()

    async def warm_up(self) -> str | None:
        """Encode one text from its characters to its vector; return an error message, or None."""
        try:
            (ids,) = await self.texts.encode(["Hi"], add_special_tokens=True)
            await self.vectors([check_ids(ids[: self.limits.max_context], self.limits, "the text")])
        except MillraceError as error:
            return str(error)
        return None

    def health(self) -> EncoderStats:
        return self.model.loop.stats()

    def collect(self) -> Iterator[MetricFamily]:
        stats, model = self.health(), self.model.name
        yield gauge(model, "vllm:num_requests_running", "Requests whose vectors are not all there", self._n_running)
        yield gauge(model, "vllm:num_requests_waiting", "Texts that wait for their step", stats.waiting)
        yield counter(model, "vllm:prompt_tokens", "Prompt tokens computed", stats.tokens_total)
        yield counter(model, "millrace:embeddings", "Texts that became vectors", stats.texts_total)
        yield counter(model, "millrace:encoder_steps", "Steps of the encoder", stats.steps_total)
        yield counter(model, "millrace:encoder_busy_seconds", "That its steps took together", stats.busy_s)
        yield gauge(model, "millrace:engine_healthy", "1 while the engine loop runs", stats.healthy)
        silent_s = 0.0 if stats.idle else stats.last_step_s
        yield gauge(model, "millrace:engine_silent_seconds", "Since the last step; 0 when idle", silent_s)

    async def abort(self, within_s: float) -> None:
        if not await stop_within(self.model.loop.stop, within_s):
            self._stuck = True
            self.model.loop.abandon()
        self.texts.close()

    def close(self) -> None:
        self.texts.close()

    @property
    def stuck(self) -> bool:
        return self._stuck


class EmbeddingBackend(EncoderBackend):
    """An encoder that gives a vector for each text."""

    kind_name = "an encoder"


class CrossEncoderBackend(EncoderBackend):
    """An encoder that gives a score for two texts."""

    kind_name = "a cross-encoder"

    def __init__(self, model: EncoderModel, pairs: PairTemplate, serving: ServerContext) -> None:
        super().__init__(model, serving)
        self.pairs = pairs


async def embeddings(backend: EmbeddingBackend, call: RequestContext, request: EmbeddingRequest) -> ASGIApp:
    """Return one vector for each text of the request, in order. raises MillraceError"""
    _check(request, backend)
    special, cut = request.add_special_tokens is not False, request.truncate_prompt_tokens
    texts = await token_ids(backend, request.input, "input", special, cut)
    in_base64 = request.encoding_format == "base64"
    drop_large_fields(request)
    n_tokens = sum(map(len, texts))
    call.log.prompt_tokens = n_tokens
    lease = backend.unsent.lease()
    try:
        lease.add(len(texts) * backend.limits.width * FLOAT_BYTES)
        vectors = shorten(await backend.vectors(texts), request.dimensions)
        reply = EmbeddingReply(f"embd-{call.id}", int(time.time()), call.model, [], EmbeddingUsage(n_tokens, n_tokens))

        def encode_reply() -> bytes:
            reply.data = [Embedding(i, _base64(v) if in_base64 else v.tolist()) for i, v in enumerate(vectors)]
            return msgspec.json.encode(reply)

        content = await backend.off_loop(vectors.size > OFF_LOOP_ITEMS, encode_reply)
    finally:
        lease.release()
    return finish_reply(backend, call, content)


def finish_reply(backend: EncoderBackend, call: RequestContext, content: bytes) -> Response:
    backend.metrics.e2e.observe(time.perf_counter() - call.arrived_s)
    backend.metrics.prompt_tokens.observe(call.log.prompt_tokens or 0)
    return Response(content, media_type="application/json")


def _base64(vector: np.ndarray[tuple[int], np.dtype[np.float32]]) -> str:
    return binascii.b2a_base64(vector.astype("<f4").tobytes(), newline=False).decode()


def _check(request: EmbeddingRequest, backend: EmbeddingBackend) -> None:
    """Check the fields that do not depend on the texts. raises RequestError"""
    if request.encoding_format not in (None, *FORMATS):
        raise RequestError(
            f"encoding_format is {request.encoding_format!r:.60}", '"float" or "base64"', "choose one of them",
            "encoding_format",
        )  # fmt: skip
    check_dimensions(request.dimensions, backend.limits.width, backend.model.matryoshka)


async def token_ids(
    backend: EncoderBackend, value: TextsOrIds, field: str, special: bool = True, truncate: int | None = None
) -> list[Ids]:
    """Return the checked token ids of each text. field: its name in errors. raises RequestError, BusyError"""
    limits = backend.limits
    max_tokens = truncation(truncate, limits.max_context)
    inputs = texts_or_ids(value, field)
    check_number(len(inputs), field)
    texts = [text for text in inputs if isinstance(text, str)]
    encoded = await backend.texts.encode(texts, special) if texts else [ids for ids in inputs if isinstance(ids, list)]

    around = backend.model.tokenizer.special_around if texts and special else (0, 0)

    def check_all() -> list[Ids]:
        checked_ids_of_texts: list[Ids] = []
        for i, ids in enumerate(encoded):
            cut = ids if max_tokens is None else truncate_ids(ids, max_tokens, around)
            checked_ids_of_texts.append(
                check_ids(cut, limits, f"{field} {i}" if len(encoded) > 1 else f"the {field}", field)
            )
        return checked_ids_of_texts

    n_ids = sum(map(len, encoded))
    return await backend.off_loop(n_ids > OFF_LOOP_ITEMS, check_all)


def check_number(n_texts: int, field: str) -> None:
    """Check the number of texts of a request. raises RequestError"""
    if n_texts > MAX_INPUTS:
        raise RequestError(f"{field} has {n_texts} texts", f"at most {MAX_INPUTS}", "send several requests", field)


def _retry_after_s(stats: EncoderStats) -> float:
    """Return the seconds until the waiting tokens are done, at the mean speed of all steps so far."""
    rate = stats.tokens_total / stats.busy_s if stats.busy_s else 0.0
    return min(max(stats.waiting_tokens / rate if rate else 0.0, RETRY_LOW_S), RETRY_HIGH_S)
