"""POST /v1/chat/completions: the answer to a conversation, complete or as a stream of events."""

import time
from collections.abc import AsyncIterator, Sequence
from functools import partial

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp

from millrace.checkpoint.tool_calls.answer_parser import CallPart, ParsedDelta
from millrace.runtime.request.sampling_params import Delta, TokenLogprobs
from millrace.serve.http.http_request import RequestContext
from millrace.serve.http.server_context import OFF_LOOP_BODY
from millrace.serve.llm.answer_blocks import BlockKind, Blocks
from millrace.serve.llm.conversation import Conversation, rendering_of
from millrace.serve.llm.event_stream import EventStream, StreamUsage, TextDeltaEncoder, encode_events
from millrace.serve.llm.generation_stream import GenerationStream, ignore_thinking, start_chat_generation
from millrace.serve.llm.language_model import TextBackend
from millrace.serve.llm.logprobs import CHAT_BYTES, CollectedChatLogprobs, chat_logprobs
from millrace.serve.llm.non_streaming import CollectedChoice, collect_answer
from millrace.serve.llm.request_decoding import chat_params, drop_large_fields, request_options, requests_receipt
from millrace.serve.llm.request_types import ChatRequest
from millrace.serve.llm.response_types import ChatLogprobs
from millrace.serve.llm.tools import tools_of
from millrace.serve.protocols.openai.replies import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatReply,
    FunctionDelta,
    FunctionReply,
    ToolCallDelta,
    ToolCallReply,
)


async def chat_completions(backend: TextBackend, call: RequestContext, request: ChatRequest) -> ASGIApp:
    """Return the response, or the stream. raises MillraceError"""
    ignore_thinking(backend, call, request)
    conversation = await backend.off_loop(call.body_bytes > OFF_LOOP_BODY, partial(_conversation, request))
    drop_large_fields(request)
    with_receipt = requests_receipt(request)
    generation = await start_chat_generation(backend, call, conversation)
    if with_receipt:
        generation.keep_receipt()
    answer = _ChatCompletion(backend, generation, f"chatcmpl-{call.id}", call.model)
    if request.stream:
        return EventStream(generation, answer.stream(StreamUsage(request.stream_options, generation)))
    return await answer.response()


def _conversation(request: ChatRequest) -> Conversation:
    """Return the conversation of a request. raises RequestError"""
    has_tools = request.tools is not None or request.tool_choice is not None
    return Conversation(
        messages=request.messages, params=chat_params(request), options=request_options(request),
        rendering=rendering_of(request),
        tools=tools_of(request.tools, request.tool_choice, request.parallel_tool_calls) if has_tools else None,
        whole_bytes=None if request.stream else CHAT_BYTES,
    )  # fmt: skip


class _ChatCompletion:
    """One chat completion in progress."""

    def __init__(self, backend: TextBackend, generation: GenerationStream, answer_id: str, model: str) -> None:
        self._backend, self._generation = backend, generation
        self._id, self._model, self._created = answer_id, model, int(time.time())

    async def response(self) -> Response:
        """Return the complete response. raises GenerationFailedError"""
        logprobs = [CollectedChatLogprobs() for _ in range(self._generation.n_choices)]

        def encode_logprobs(delta: Delta) -> int:
            piece = self._logprobs(delta.logprobs or ())
            return 0 if piece is None else logprobs[delta.index].add(piece)

        async with self._generation:
            choices = await collect_answer(self._generation, self._backend, encode_logprobs)
            content = await self._backend.encode_off_loop(
                self._generation.has_many_logprobs, lambda: msgspec.json.encode(self._reply(choices, logprobs))
            )
        return Response(content, media_type="application/json")

    def _reply(self, choices: list[CollectedChoice], logprobs: list[CollectedChatLogprobs]) -> ChatReply:
        return ChatReply(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[
                ChatChoice(
                    index=i,
                    message=_message(choice.blocks),
                    logprobs=None if self._generation.params.logprobs is None else logprobs[i].finish(),
                    finish_reason=self._generation.finish_of(choice.end),
                    stop_reason=choice.end.stop_reason,
                )
                for i, choice in enumerate(choices)
            ],
            usage=self._generation.usage,
            system_fingerprint=self._backend.fingerprint,
            millrace=self._generation.seed_echo,
        )

    async def stream(self, usage: StreamUsage) -> AsyncIterator[bytes]:
        """Yield blocks of events. raises GenerationFailedError"""
        roles = [
            ChatChunkChoice(index=i, delta=ChatDelta(role="assistant", content=""))
            for i in range(self._generation.params.n)
        ]
        first = self._chunk(roles, usage)
        first.millrace = self._generation.seed_echo
        head = encode_events([first])  # sent with the first token, so that clients do not take it for the first token
        is_plain = self._generation.params.logprobs is None and not usage.always
        plain = TextDeltaEncoder(b'"content"', partial(self._empty, usage)) if is_plain else None
        async for deltas in self._generation:
            if self._generation.is_expensive_to_encode(deltas):
                yield head + await self._backend.encode_off_loop(True, partial(self._block, deltas, usage, None))
            else:
                yield head + self._block(deltas, usage, plain)
            head = b""
        if usage.at_end:
            last = ChatChunk(self._id, self._created, self._model, self._backend.fingerprint, [])
            last.usage = self._generation.usage
            yield encode_events([last])

    def _block(self, deltas: list[Delta], usage: StreamUsage, plain: TextDeltaEncoder | None) -> bytes:
        """Encode the events of deltas. plain: the encoder of events with nothing but text, if these may occur"""
        events = []
        for delta in deltas:
            parsed = self._generation.parse_delta(delta)
            if plain is not None and parsed.content and not (parsed.reasoning or parsed.calls or delta.finish_reason):
                events.append(plain.event(delta.index, parsed.content))
            elif (choice := self._choice(delta, parsed)) is not None:
                events.append(encode_events([self._chunk([choice], usage)]))
        return b"".join(events)

    def _empty(self, usage: StreamUsage, choice: int) -> ChatChunk:
        """Return an event in the middle of a stream with an empty text."""
        return self._chunk([ChatChunkChoice(choice, ChatDelta(content=""))], usage)

    def _chunk(self, choices: list[ChatChunkChoice], usage: StreamUsage) -> ChatChunk:
        chunk = ChatChunk(self._id, self._created, self._model, self._backend.fingerprint, choices)
        chunk.usage = usage.for_choice(choices[0].index)
        return chunk

    def _choice(self, delta: Delta, parsed: ParsedDelta) -> ChatChunkChoice | None:
        """Return the choice of a delta; None if it is empty: half a character, or the beginning of a mark."""
        choice = ChatChunkChoice(delta.index, ChatDelta())
        if parsed.content:
            choice.delta.content = parsed.content
        if parsed.reasoning:
            choice.delta.reasoning_content = parsed.reasoning
        if parsed.calls:
            choice.delta.tool_calls = [self._call(part) for part in parsed.calls]
        choice.logprobs = self._logprobs(delta.logprobs or ())
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = self._generation.finish_of(delta), delta.stop_reason
        is_empty = not (parsed.content or parsed.reasoning or parsed.calls or delta.logprobs or delta.finish_reason)
        return None if is_empty else choice

    def _call(self, part: CallPart) -> ToolCallDelta:
        if part.name is None:
            return ToolCallDelta(part.index, FunctionDelta(part.arguments))
        function = FunctionDelta(part.arguments, part.name)
        return ToolCallDelta(part.index, function, self._generation.new_call_id(), "function")

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        if self._generation.params.logprobs is None:
            return None
        return chat_logprobs(self._backend.model.tokenizer, tokens)


def _message(blocks: Blocks) -> AssistantMessage:
    text, calls, thoughts = blocks.text(BlockKind.TEXT), blocks.calls(), blocks.text(BlockKind.REASONING)
    message = AssistantMessage(text or (None if calls else ""))
    if thoughts:
        message.reasoning_content = thoughts
    if calls:
        message.tool_calls = [ToolCallReply(call.call_id, FunctionReply(call.name, call.text)) for call in calls]
    return message
