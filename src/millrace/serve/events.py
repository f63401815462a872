"""An answer as a stream of events: one write for each step of the engine, however many tokens and choices it has."""

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType
from starlette.types import Receive, Scope, Send

from millrace.serve.errors import GenerationFailedError, Problem
from millrace.serve.generation import Generation
from millrace.serve.protocol import StreamOptions
from millrace.serve.replies import Usage
from millrace.serve.wire import EVENT_STREAM, UNHELD


class StreamUsage:
    """What a stream says of its usage: nothing, or null until its last event, or the numbers so far in every event."""

    def __init__(self, asked: StreamOptions | None, generation: Generation) -> None:
        self.at_end = asked is not None and bool(asked.include_usage)
        self.always = self.at_end and asked is not None and bool(asked.continuous_usage_stats)
        self._generation = generation

    def of(self, choice: int) -> Usage | UnsetType | None:
        """For an event about that choice."""
        if not self.at_end:
            return UNSET
        return self._generation.usage_so_far(choice) if self.always else None


@dataclass(frozen=True, slots=True)
class StreamForm:
    """How a protocol writes a stream. failed: of an answer that cannot be finished; end: behind everything"""

    content_type: bytes
    failed: Callable[[Problem], bytes]
    end: bytes = b""


EVENTS = StreamForm(EVENT_STREAM, lambda problem: b"data: " + problem.body() + b"\n\n", b"data: [DONE]\n\n")
_ENCODER = msgspec.json.Encoder()
log = logging.getLogger(__name__)


def events(replies: Iterable[msgspec.Struct]) -> bytes:
    """Each reply as one event."""
    return b"".join(b"data: " + _ENCODER.encode(reply) + b"\n\n" for reply in replies)


class TextEvents:
    """Events of a stream that differ in their text alone, so that it is all that is encoded of them."""

    def __init__(self, field: bytes, empty: Callable[[int], msgspec.Struct]) -> None:
        """field: the text's, with its value where that is empty; empty: such a reply about a choice"""
        self._field, self._empty = field + b':""', empty
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def event(self, choice: int, text: str) -> bytes:
        around = self._around.get(choice)
        if around is None:  # within a string of JSON no quote stands without a backslash: the first is the field
            before, _, after = events([self._empty(choice)]).partition(self._field)
            around = self._around[choice] = before + self._field[:-2], after
        return around[0] + _ENCODER.encode(text) + around[1]


def named_event(name: str, reply: msgspec.Struct) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _ENCODER.encode(reply) + b"\n\n"


class EventStream:
    """A response that writes `blocks` as they come, and cancels `generation` when it ends early.

    A generation that fails after the status line was sent becomes an error event. A reader that takes nothing loses its
    connection (`connections.py`), and so the generation ends as for any client that goes away.
    """

    def __init__(
        self, generation: Generation, blocks: AsyncIterator[bytes], form: StreamForm = EVENTS, *, goes_on: bool = False
    ) -> None:
        """goes_on: somebody else sees to the generation, whatever becomes of this connection"""
        self._generation, self._blocks, self._form, self._goes_on = generation, blocks, form, goes_on

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(body: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        headers = [(b"content-type", self._form.content_type), *UNHELD]
        async with contextlib.nullcontext() if self._goes_on else self._generation:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            try:
                async for block in self._blocks:
                    if block:
                        await send({"type": "http.response.body", "body": block, "more_body": True})
            except GenerationFailedError as error:
                log.log(error.log_level, "answer %s failed: %s", self._generation.handle.request_id, error)
                await write(self._form.failed(error.problem))
        await write(self._form.end, more=False)
