"""POST /v1/responses: OpenAI's newer protocol, whole, as a stream of events, or in the background.

What is stored can be asked for, cancelled and deleted by its id, and gone on from by the next request.
"""

import asyncio
import contextlib
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from millrace.errors import BusyError, RequestError
from millrace.runtime.params import Delta
from millrace.serve.backend import Models
from millrace.serve.blocks import Block, Blocks, Kind, Turn
from millrace.serve.conversation import Conversation, Rendering
from millrace.serve.errors import GenerationFailedError, Problem
from millrace.serve.fields import let_go, terms_of
from millrace.serve.generation import EventStream, Generation, StreamForm, converse, named_event
from millrace.serve.protocol import CalledFunction, Message, ToolCall
from millrace.serve.replies import json_reply
from millrace.serve.responses.input import NAMES, messages_of, params_of, told_of, tools_of_response
from millrace.serve.responses.protocol import (
    CallItem,
    DeletedReply,
    IncompleteDetails,
    InputTokensDetails,
    Item,
    MessageItem,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponseEvent,
    ResponseReply,
    ResponsesRequest,
    ResponseUsage,
)
from millrace.serve.responses.store import Kept, Responses
from millrace.serve.serving import LARGE_BODY
from millrace.serve.text import TextBackend
from millrace.serve.wire import CALL, Call

MAX_BEHIND_BYTES = 2**20  # of events that wait for the reader of a response in the background


async def create(backend: TextBackend, call: Call, asked: ResponsesRequest) -> ASGIApp:
    """The response, or the stream that will be one. raises MillraceError"""
    before = backend.responses.before(asked.previous_response_id, call.tenant) if asked.previous_response_id else None
    if asked.background and asked.store is False:
        raise RequestError(
            "background is true, and store is false",
            "a response that is kept, to be asked for",
            "leave store out",
            "store",
        )
    is_large = call.body_bytes + (len(before.said) if before else 0) > LARGE_BODY
    conversation, said, reply = await backend.off_loop(is_large, partial(_read, asked, before, call.model))
    let_go(asked)
    generation = await converse(backend, call, conversation)
    answer = _Answer(generation, reply)
    kept = _kept(answer, Kept(reply.id, call.tenant, said), backend.responses if reply.store else None)
    if asked.stream and asked.background:
        feed = Feed()
        _in_background(backend, generation, _fed(answer, kept, feed))
        return EventStream(generation, feed.blocks(answer.left_behind), _form(answer), goes_on=True)
    if asked.stream:
        return EventStream(generation, _followed(answer, kept), _form(answer))
    if asked.background:
        _in_background(backend, generation, _answered(answer, kept))
        return json_reply(answer.reply)
    await _answered(answer, kept, raises=True)
    return json_reply(answer.reply)


def _read(asked: ResponsesRequest, before: Kept | None, model: str) -> tuple[Conversation, bytes, ResponseReply]:
    """The conversation, its messages but the system's as JSON, and the reply that will be. raises RequestError"""
    said = [*(before.messages() if before else ()), *messages_of(asked.input)]
    system = [Message("system", asked.instructions)] if asked.instructions else []
    conversation = Conversation(
        messages=[*system, *said], params=params_of(asked), tools=tools_of_response(asked),
        rendering=Rendering(asked.chat_template_kwargs or {}), terms=terms_of(asked),
    )  # fmt: skip
    told = told_of(asked)
    reply = ResponseReply(
        id=f"resp_{uuid.uuid4().hex}", created_at=int(time.time()), model=model, status="in_progress", output=[],
        instructions=asked.instructions, max_output_tokens=asked.max_output_tokens,
        previous_response_id=asked.previous_response_id, temperature=asked.temperature, top_p=asked.top_p,
        text=told["text"], tools=told["tools"], tool_choice=told["tool_choice"], reasoning=told["reasoning"],
        metadata=told["metadata"], parallel_tool_calls=asked.parallel_tool_calls is not False,
        store=asked.store is not False, background=bool(asked.background), user=asked.user,
    )  # fmt: skip
    return conversation, msgspec.json.encode(said) if reply.store else b"[]", reply


async def _answered(answer: "_Answer", kept: AbstractContextManager[None], raises: bool = False) -> None:
    """raises: GenerationFailedError, unless it was cancelled"""
    with contextlib.suppress(*(() if raises else (GenerationFailedError,))), kept:
        async with answer.generation:
            async for deltas in answer.generation:
                if answer.is_cancelled:  # what was said by then is settled
                    break
                answer.take(deltas)


async def _followed(answer: "_Answer", kept: AbstractContextManager[None]) -> AsyncIterator[bytes]:
    with kept:
        async for block in answer.stream():
            yield block
    if answer.reply.status == "cancelled":
        yield answer.last_event()


def _in_background(backend: TextBackend, generation: Generation, work: Coroutine[Any, Any, None]) -> None:
    """raises BusyError, and then nobody answers it"""
    try:
        backend.in_background(work)
    except BusyError:
        generation.handle.cancel()
        raise


async def _fed(answer: "_Answer", kept: AbstractContextManager[None], feed: "Feed") -> None:
    """As `_answered`, with its events for whoever still reads them."""
    try:
        async with answer.generation:
            async for block in _followed(answer, kept):
                feed.put(block)
    except GenerationFailedError:
        feed.put(answer.last_event())
    finally:
        feed.end()


class Feed:
    """Events of an answer that goes on whatever becomes of their reader: one who is too far behind gets no more."""

    def __init__(self) -> None:
        self._blocks, self._n_bytes = deque[bytes](), 0
        self._changed, self._ended, self._left_behind = asyncio.Event(), False, False

    def put(self, block: bytes) -> None:
        if self._ended or self._left_behind:
            return
        if self._n_bytes > MAX_BEHIND_BYTES:
            self._left_behind = True
            self._blocks.clear()
        else:
            self._blocks.append(block)
            self._n_bytes += len(block)
        self._changed.set()

    def end(self) -> None:
        self._ended = True
        self._changed.set()

    async def blocks(self, left_behind: Callable[[], bytes]) -> AsyncIterator[bytes]:
        """left_behind: what is said to one who is too far behind"""
        try:
            while True:
                while self._blocks:
                    block = self._blocks.popleft()
                    self._n_bytes -= len(block)
                    yield block
                if self._left_behind:
                    yield left_behind()
                if self._left_behind or self._ended:
                    return
                self._changed.clear()
                await self._changed.wait()
        finally:  # gone, or at the end: nothing is kept for nobody
            self._left_behind = True
            self._blocks.clear()


@contextlib.contextmanager
def _kept(answer: "_Answer", kept: Kept, store: Responses | None) -> Iterator[None]:
    """While it is being answered, and after: for whoever asks for it by its id. store: None: for nobody"""

    def settle() -> None:
        """Once: whoever cancels it may go on from it at once."""
        answer.end()
        if store is not None and kept.is_under_way:
            kept.cancel = None
            kept.write(answer.reply)
            if answer.has_said:
                kept.add(answer.message)
            store.changed(kept)

    def cancel() -> None:
        answer.cancel()
        settle()

    if store is not None:
        kept.cancel = cancel
        kept.write(answer.reply)
        store.keep(kept)
    try:
        yield
    except GenerationFailedError as error:
        if not answer.is_cancelled:
            answer.fail(error.problem.named(NAMES))
            raise
    finally:
        settle()


def retrieve(models: Models, scope: Scope) -> Response:
    """A stored response, complete or not."""
    return _told(_stored(models, scope))


def cancel(models: Models, scope: Scope) -> Response:
    """End a response that is being answered; one that is complete stays what it is."""
    kept = _stored(models, scope)
    kept.end()
    return _told(kept)


def delete(models: Models, scope: Scope) -> Response:
    response_id = _stored(models, scope).id
    models.serving.responses.delete(response_id)
    return json_reply(DeletedReply(response_id))


def _told(kept: Kept) -> Response:
    return Response(kept.reply, media_type="application/json")


def _stored(models: Models, scope: Scope) -> Kept:
    """The one that is asked for; others' are not there. raises HttpError with 404"""
    call: Call = scope[CALL]
    return models.serving.responses.get(scope["path_params"]["response_id"], call.tenant)


class _Answer:
    """One response under way: its reply is what is known so far."""

    def __init__(self, generation: Generation, reply: ResponseReply) -> None:
        self.generation, self.reply = generation, reply
        self._blocks = Blocks(generation.new_call_id)
        self._n_events, self.is_cancelled = 0, False
        self._item_ids: list[str] = []

    def take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self._blocks.take(self.generation.said(delta))
            if delta.finish_reason is not None:
                self._finish(delta)

    async def stream(self) -> AsyncIterator[bytes]:
        """Blocks of events. raises GenerationFailedError"""
        head = self._event("response.created", response=self.reply) + self._event(
            "response.in_progress", response=self.reply
        )
        if self.reply.background:  # whoever is cut off early has to know its id
            yield head
            head = b""
        async for deltas in self.generation:
            if self.is_cancelled:  # what was said by then is settled
                return
            yield head + b"".join(self._more(deltas))
            head = b""

    def fail(self, problem: Problem) -> None:
        self.reply.status, self.reply.error = "failed", ResponseError(problem.code or "server_error", problem.message)

    def cancel(self) -> None:
        """By a request of its own. Nothing more is taken; one that is complete stays it."""
        self.is_cancelled = True
        self.generation.handle.cancel()

    def end(self) -> None:
        """Nobody answers it any more: where it is not complete, what there is remains."""
        if self.reply.status == "in_progress":
            self.reply.status = "cancelled"
        if self.reply.usage is None:
            self._settle()

    def last_event(self) -> bytes:
        """Of a stream that does not come to a regular end."""
        kind = "failed" if self.reply.status == "failed" else "incomplete"
        return self._event(f"response.{kind}", response=self.reply)

    def left_behind(self) -> bytes:
        """To a reader of a response in the background, which takes too little."""
        message = f"too much was left unread; the answer goes on: ask for /v1/responses/{self.reply.id}"
        return self._event("error", code="reader_too_slow", message=message)

    @property
    def has_said(self) -> bool:
        """Something: a conversation can go on from it."""
        return bool(self._blocks.all) or self.reply.status in ("completed", "incomplete")

    @property
    def message(self) -> Message:
        """As the next request's conversation has it."""
        calls = [ToolCall(CalledFunction(block.name, block.text), block.call_id) for block in self._blocks.calls()]
        text, thoughts = self._blocks.text(Kind.TEXT), self._blocks.text(Kind.REASONING)
        content = text if text or not calls else None
        return Message("assistant", content, tool_calls=calls or None, reasoning_content=thoughts or None)

    def _more(self, deltas: list[Delta]) -> Iterator[bytes]:
        for delta in deltas:
            for happened in self._blocks.add(self.generation.said(delta)):
                yield from self._events(*happened)
            if delta.finish_reason is not None:
                for happened in self._blocks.close():
                    yield from self._events(*happened)
                self._finish(delta)
                yield self._event(f"response.{self.reply.status}", response=self.reply)

    def _finish(self, last: Delta) -> None:
        is_cut_off = self.generation.finish_of(last) == "length"
        self._settle(is_cut_off)
        self.reply.status = "incomplete" if is_cut_off else "completed"
        self.reply.incomplete_details = IncompleteDetails("max_output_tokens") if is_cut_off else None

    def _settle(self, is_cut_off: bool = False) -> None:
        """What there is goes into the reply, with what it took."""
        blocks = self._blocks.all
        self.reply.output = [
            self._item(block, "incomplete" if is_cut_off and block is blocks[-1] else "completed") for block in blocks
        ]
        usage = self.generation.usage
        self.reply.usage = ResponseUsage(
            usage.prompt_tokens, InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens, OutputTokensDetails(usage.completion_tokens_details.reasoning_tokens),
            usage.total_tokens,
        )  # fmt: skip

    def _item(self, block: Block, status: str, text: str | None = None) -> Item:
        """text: another one than the block's"""
        while len(self._item_ids) <= block.index:
            self._item_ids.append(uuid.uuid4().hex)
        own_id, text = self._item_ids[block.index], block.text if text is None else text
        match block.kind:
            case Kind.TEXT:
                return MessageItem(f"msg_{own_id}", [OutputText(text)] if text else [], status)
            case Kind.REASONING:
                return ReasoningItem(f"rs_{own_id}", [ReasoningText(text)] if text else [], status)
            case Kind.CALL:
                return CallItem(f"fc_{own_id}", block.call_id, block.name, text, status)

    def _events(self, turn: Turn, block: Block, text: str) -> Iterator[bytes]:
        item = self._item(
            block, "completed" if turn is Turn.CLOSED else "in_progress", None if turn is Turn.CLOSED else ""
        )
        i, item_id = block.index, item.id
        at = {"output_index": i, "item_id": item_id}
        if block.kind is not Kind.CALL:
            at["content_index"] = 0
        name = {Kind.TEXT: "output_text", Kind.REASONING: "reasoning_text", Kind.CALL: "function_call_arguments"}[
            block.kind
        ]
        part = OutputText if block.kind is Kind.TEXT else ReasoningText
        logprobs = {"logprobs": list[object]()} if block.kind is Kind.TEXT else {}
        match turn:
            case Turn.OPENED:
                yield self._event("response.output_item.added", output_index=i, item=item)
                if block.kind is not Kind.CALL:
                    yield self._event("response.content_part.added", **at, part=part(""))
            case Turn.ADDED:
                yield self._event(f"response.{name}.delta", **at, delta=text, **logprobs)
            case Turn.CLOSED:
                if block.kind is Kind.CALL:
                    yield self._event(f"response.{name}.done", **at, name=block.name, arguments=block.text)
                else:
                    yield self._event(f"response.{name}.done", **at, text=block.text, **logprobs)
                    yield self._event("response.content_part.done", **at, part=part(block.text))
                yield self._event("response.output_item.done", output_index=i, item=item)

    def _event(self, kind: str, **fields: object) -> bytes:
        event = ResponseEvent(type=kind, sequence_number=self._n_events, **fields)  # type: ignore[arg-type]
        self._n_events += 1
        return named_event(kind, event)


def _form(answer: _Answer) -> StreamForm:
    def failed(problem: Problem) -> bytes:
        return answer.last_event()

    return StreamForm(b"text/event-stream; charset=utf-8", failed)
