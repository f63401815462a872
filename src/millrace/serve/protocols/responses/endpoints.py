"""POST /v1/responses: OpenAI's newer protocol, complete, as a stream of events, or in the background.

Stored responses can be retrieved, cancelled and deleted by id, and continued by the next request.
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
from urllib.parse import parse_qsl

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from millrace.errors import BusyError, RequestError
from millrace.serve.backend import Models
from millrace.serve.http.errors import GenerationFailedError, HttpProblem
from millrace.serve.http.http_request import CALL, EVENT_STREAM, RequestContext
from millrace.serve.http.server_context import OFF_LOOP_BODY
from millrace.serve.llm.conversation import Conversation, Rendering, prefixed_by
from millrace.serve.llm.event_stream import EventStream, StreamFraming
from millrace.serve.llm.generation_stream import GenerationStream, ignore_thinking, start_chat_generation
from millrace.serve.llm.language_model import TextBackend
from millrace.serve.llm.logprobs import CHAT_BYTES
from millrace.serve.llm.reasoning import thinking_of
from millrace.serve.llm.request_decoding import drop_large_fields, request_options
from millrace.serve.llm.request_types import Message
from millrace.serve.llm.response_types import json_reply
from millrace.serve.protocols.responses.answer import N_CLOSING, ActiveResponse
from millrace.serve.protocols.responses.input import echoed_fields, messages_of, params_of, tools_of_response
from millrace.serve.protocols.responses.protocol import DeletedReply, ResponseReply, ResponsesRequest
from millrace.serve.protocols.responses.store import MAX_STORED_BYTES, ResponseStore, StoredResponse

MAX_BEHIND_BYTES = 2**20  # of events that wait for the reader of a background response


async def create(backend: TextBackend, call: RequestContext, request: ResponsesRequest) -> ASGIApp:
    """Return the response, or the stream. raises MillraceError"""
    previous = (
        backend.responses.previous(request.previous_response_id, call.tenant) if request.previous_response_id else None
    )
    if request.background and request.store is False:
        raise RequestError(
            "background is true, and store is false",
            "a response that is kept, to be asked for",
            "leave store out",
            "store",
        )
    ignore_thinking(backend, call, request)
    is_large = call.body_bytes + (len(previous.messages_json) if previous else 0) > OFF_LOOP_BODY
    conversation, messages_json, reply = await backend.off_loop(is_large, partial(_read, request, previous, call.model))
    drop_large_fields(request)
    own = StoredResponse(reply.id, call.tenant, messages_json)
    _check_storable(own, reply)
    generation = await start_chat_generation(backend, call, conversation)
    answer = ActiveResponse(backend, generation, reply)
    stored = _storing(answer, own, backend.responses if reply.store else None)
    if request.stream and request.background:
        feed = EventBroadcast()
        _in_background(backend, call, generation, _broadcast(answer, stored, feed))
        return EventStream(
            generation, feed.blocks(answer.reader_too_slow_event), _form(answer), outlives_connection=True
        )
    if request.stream:
        return EventStream(generation, _stream_events(answer, stored), _form(answer))
    if request.background:
        _in_background(backend, call, generation, _run(answer, stored))
        return json_reply(answer.reply)
    await _run(answer, stored, raises=True)
    return json_reply(answer.reply)


def _check_storable(stored: StoredResponse, reply: ResponseReply) -> None:
    """Do not store a response that is too large before its answer. raises RequestError for a background response"""
    if not reply.store:
        return
    stored.write(reply)
    if stored.fits:
        return
    if reply.background:
        raise RequestError(
            f"background is true, and the response has {stored.n_bytes} bytes before its answer, too many to be kept",
            f"at most {MAX_STORED_BYTES} with it", "shorten the conversation, or leave background out", "background",
        )  # fmt: skip
    reply.store = False


def _read(
    request: ResponsesRequest, previous: StoredResponse | None, model: str
) -> tuple[Conversation, bytes, ResponseReply]:
    """Return the conversation, its messages without the system's as JSON, and the initial reply. raises RequestError"""
    messages = [*(previous.messages() if previous else ()), *messages_of(request.input)]
    system = [Message("system", request.instructions)] if request.instructions else []
    continued = bool(prefixed_by(messages))
    for message in messages:
        message.prefix = message.partial = None  # as it is stored, it is a message like others
    conversation = Conversation(
        messages=[*system, *messages], params=params_of(request), tools=tools_of_response(request),
        rendering=Rendering(
            request.chat_template_kwargs or {}, not continued, continued, thinking=thinking_of(request)
        ),
        options=request_options(request),
        whole_bytes=CHAT_BYTES * (N_CLOSING if request.stream else 1), capped=True,
    )  # fmt: skip
    echoed = echoed_fields(request)
    reply = ResponseReply(
        id=f"resp_{uuid.uuid4().hex}", created_at=int(time.time()), model=model, status="in_progress", output=[],
        instructions=request.instructions, max_output_tokens=request.max_output_tokens,
        previous_response_id=request.previous_response_id, temperature=request.temperature, top_p=request.top_p,
        top_logprobs=request.top_logprobs or 0, text=echoed["text"], tools=echoed["tools"],
        tool_choice=echoed["tool_choice"], reasoning=echoed["reasoning"],
        metadata=echoed["metadata"], parallel_tool_calls=request.parallel_tool_calls is not False,
        store=request.store is not False, background=bool(request.background), user=request.user,
    )  # fmt: skip
    return conversation, msgspec.json.encode(messages) if reply.store else b"[]", reply


async def _run(answer: ActiveResponse, stored: AbstractContextManager[None], raises: bool = False) -> None:
    """Compute a response to its end. raises: raise GenerationFailedError, unless it was cancelled"""
    with contextlib.suppress(*(() if raises else (GenerationFailedError,))), stored:
        async with answer.generation:
            async for deltas in answer.generation:
                if answer.is_cancelled:  # what was said by then is settled
                    break
                await answer.take(deltas)


async def _stream_events(answer: ActiveResponse, stored: AbstractContextManager[None]) -> AsyncIterator[bytes]:
    with stored:
        async for block in answer.stream():
            yield block
    if answer.reply.status == "cancelled":
        yield answer.last_event()


def _in_background(
    backend: TextBackend, call: RequestContext, generation: GenerationStream, work: Coroutine[Any, Any, None]
) -> None:
    """Run the work after the call has ended; until its end it counts as a request of its API key.

    raises BusyError, and then the work is not run
    """
    ended, call.ended = call.ended, None

    async def counted() -> None:
        try:
            await work
        finally:
            if ended is not None:
                ended(generation.handle.n_prompt + generation.n_generated)

    try:
        backend.in_background(counted())
    except BusyError:
        work.close()
        call.ended = ended
        generation.handle.cancel()
        raise


async def _broadcast(answer: ActiveResponse, stored: AbstractContextManager[None], feed: "EventBroadcast") -> None:
    """Compute a response to its end, and broadcast its events."""
    try:
        async with answer.generation:
            async for block in _stream_events(answer, stored):
                feed.put(block)
    except GenerationFailedError:
        feed.put(answer.last_event())
    finally:
        feed.end()


class EventBroadcast:
    """Events of a background answer for its reader, which gets no more of them if it is too slow."""

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

    async def blocks(self, too_slow_event: Callable[[], bytes]) -> AsyncIterator[bytes]:
        """Yield the events. too_slow_event: returns the last event for a reader that is too slow"""
        try:
            while True:
                while self._blocks:
                    block = self._blocks.popleft()
                    self._n_bytes -= len(block)
                    yield block
                if self._left_behind:
                    yield too_slow_event()
                if self._left_behind or self._ended:
                    return
                self._changed.clear()
                await self._changed.wait()
        finally:  # the reader is gone, or has everything
            self._left_behind = True
            self._blocks.clear()


@contextlib.contextmanager
def _storing(answer: ActiveResponse, stored: StoredResponse, store: ResponseStore | None) -> Iterator[None]:
    """Store a response while it is being answered, and afterwards. store: None: do not store it"""

    def settle() -> None:
        """Store the final state; done once, so that a cancelled response can be continued at once."""
        answer.end()
        if store is not None and stored.is_under_way:
            stored.cancel = None
            stored.write(answer.reply)
            if answer.has_output:
                stored.add(answer.message)
            if not store.update(stored):  # it is too large
                answer.reply.store = False
                stored.write(answer.reply)

    def cancel() -> None:
        answer.cancel()
        settle()

    answer.on_finish = settle
    if store is not None:
        stored.cancel = cancel
        store.add(stored)
    try:
        yield
    except GenerationFailedError as error:
        if not answer.is_cancelled:
            answer.fail(error.problem.with_field_names(ResponsesRequest.NAMES))
            raise
    finally:
        settle()
        answer.on_finish = None  # they would know each other, and stay until the interpreter looks for such


def retrieve(models: Models, scope: Scope) -> Response:
    """Return a stored response, complete or not. raises RequestError for unsupported query parameters"""
    for name, value in parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True):
        if (name, value) != ("stream", "false"):
            raise RequestError(
                f"{name:.60}={value:.60} is asked of a stored response", "the response as it is",
                "leave it out: a response is streamed while it is created, and told whole afterwards", name[:60],
            )  # fmt: skip
    return _stored_reply(_find_stored(models, scope))


def cancel(models: Models, scope: Scope) -> Response:
    """Cancel a response that is being answered; a complete one stays as it is."""
    stored = _find_stored(models, scope)
    stored.end()
    return _stored_reply(stored)


def delete(models: Models, scope: Scope) -> Response:
    response_id = _find_stored(models, scope).id
    models.serving.responses.delete(response_id)
    return json_reply(DeletedReply(response_id))


def _stored_reply(stored: StoredResponse) -> Response:
    return Response(stored.reply, media_type="application/json")


def _find_stored(models: Models, scope: Scope) -> StoredResponse:
    """Return the requested response of the caller's tenant. raises HttpError with 404"""
    call: RequestContext = scope[CALL]
    return models.serving.responses.get(scope["path_params"]["response_id"], call.tenant)


def _form(answer: ActiveResponse) -> StreamFraming:
    def failed(problem: HttpProblem) -> bytes:
        return answer.last_event()

    return StreamFraming(EVENT_STREAM, failed)
