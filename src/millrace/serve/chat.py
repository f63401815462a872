"""POST /v1/chat/completions: messages to an answer, whole or as a stream of events."""

import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Literal, cast

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp

from millrace.runtime.params import Delta, FinishReason, TokenLogprobs, check_context
from millrace.serve.fields import cache_options, chat_params
from millrace.serve.generation import EventStream, Generation, StreamUsage, Whole, events, start
from millrace.serve.logprobs import CHAT_BYTES, WholeChat, chat_logprobs
from millrace.serve.protocol import ChatRequest
from millrace.serve.replies import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatReply,
)
from millrace.serve.text import TextBackend
from millrace.serve.wire import Call

Finish = Literal["stop", "length"]


async def chat_completions(backend: TextBackend, call: Call, asked: ChatRequest) -> ASGIApp:
    """The response, or the stream that will be one. raises MillraceError"""
    model = call.model
    params, cache = chat_params(asked), cache_options(asked)
    prompt = await backend.texts.encode_chat(
        asked.messages,
        body_bytes=call.body_bytes,
        add_generation_prompt=asked.add_generation_prompt is not False,
        extra=asked.chat_template_kwargs,
        add_special_tokens=bool(asked.add_special_tokens),
    )
    asked.messages = []  # they may be many times the body, and the answer may take minutes
    check_context(len(prompt), params.max_tokens, backend.model.max_context, "messages")
    whole_bytes = None if asked.stream else CHAT_BYTES
    generation = await start(backend, [prompt], params, call, whole_bytes=whole_bytes, cache=cache)
    answer = _Answer(backend, generation, f"chatcmpl-{call.id}", model)
    if asked.stream:
        return EventStream(generation, answer.stream(StreamUsage(asked.stream_options, generation)))
    return await answer.whole()


class _Answer:
    """One chat completion under way."""

    def __init__(self, backend: TextBackend, generation: Generation, answer_id: str, model: str) -> None:
        self._backend, self._generation = backend, generation
        self._id, self._model, self._created = answer_id, model, int(time.time())

    async def whole(self) -> Response:
        """raises GenerationFailedError"""
        logprobs = [WholeChat() for _ in range(self._generation.n_choices)]

        def named(delta: Delta) -> int:
            piece = self._logprobs(delta.logprobs or ())
            return 0 if piece is None else logprobs[delta.index].add(piece)

        async with self._generation:
            choices = await self._generation.whole(named, self._backend)
            content = await self._backend.written(
                self._generation.is_large, lambda: msgspec.json.encode(self._reply(choices, logprobs))
            )
        return Response(content, media_type="application/json")

    def _reply(self, choices: list[Whole], logprobs: list[WholeChat]) -> ChatReply:
        return ChatReply(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[
                ChatChoice(
                    index=i,
                    message=AssistantMessage(choice.text),
                    logprobs=None if self._generation.params.logprobs is None else logprobs[i].whole(),
                    finish_reason=finish_of(choice.last),
                    stop_reason=None if choice.last is None else choice.last.stop_reason,
                )
                for i, choice in enumerate(choices)
            ],
            usage=self._generation.usage,
            system_fingerprint=self._backend.fingerprint,
            millrace=self._generation.asked,
        )

    async def stream(self, usage: StreamUsage) -> AsyncIterator[bytes]:
        """Blocks of events. raises GenerationFailedError"""
        roles = [
            ChatChunkChoice(index=i, delta=ChatDelta(role="assistant", content=""))
            for i in range(self._generation.params.n)
        ]
        first = self._chunk(roles, usage)
        first.millrace = self._generation.asked
        head = events([first])  # goes out with the first token: whoever takes the first event for it is not misled
        async for deltas in self._generation:
            is_much = self._generation.is_much(deltas)
            yield head + await self._backend.written(is_much, partial(self._block, deltas, usage))
            head = b""
        if usage.at_end:
            last = ChatChunk(self._id, self._created, self._model, self._backend.fingerprint, [])
            last.usage = self._generation.usage
            yield events([last])

    def _block(self, deltas: list[Delta], usage: StreamUsage) -> bytes:
        choices = [self._choice(delta) for delta in deltas if _says_something(delta)]
        return events(self._chunk([choice], usage) for choice in choices)

    def _chunk(self, choices: list[ChatChunkChoice], usage: StreamUsage) -> ChatChunk:
        chunk = ChatChunk(self._id, self._created, self._model, self._backend.fingerprint, choices)
        chunk.usage = usage.of(choices[0].index)
        return chunk

    def _choice(self, delta: Delta) -> ChatChunkChoice:
        choice = ChatChunkChoice(delta.index, ChatDelta(content=delta.text) if delta.text else ChatDelta())
        choice.logprobs = self._logprobs(delta.logprobs or ())
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = finish_of(delta), delta.stop_reason
        return choice

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        if self._generation.params.logprobs is None:
            return None
        return chat_logprobs(self._backend.model.tokenizer, tokens)


def finish_of(delta: Delta | None) -> Finish:
    """Of a choice's last delta; errors and aborts have been raised before."""
    assert delta is not None and delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), delta
    return cast(Finish, delta.finish_reason.value)


def _says_something(delta: Delta) -> bool:
    """Half a character alone is kept until its other half has come."""
    return bool(delta.text or delta.logprobs or delta.finish_reason)
