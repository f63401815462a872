"""Streamed responses: server-sent events of an answer, one write for each step of the engine."""

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType
from starlette.types import Receive, Scope, Send

from millrace.serve.http.errors import GenerationFailedError, HttpProblem
from millrace.serve.http.http_request import EVENT_STREAM, UNBUFFERED
from millrace.serve.llm.generation_stream import GenerationStream
from millrace.serve.llm.request_types import StreamOptions
from millrace.serve.llm.response_types import Usage


@dataclass(frozen=True, slots=True)
class StreamFraming:
    """The framing of a protocol's stream. failed: encodes the error of an unfinished answer; end: the last bytes"""

    content_type: bytes
    failed: Callable[[HttpProblem], bytes]
    end: bytes = b""


EVENTS = StreamFraming(EVENT_STREAM, lambda problem: b"data: " + problem.body() + b"\n\n", b"data: [DONE]\n\n")
_ENCODER = msgspec.json.Encoder()
log = logging.getLogger(__name__)


class StreamUsage:
    """The usage in a stream's events: absent, null until the last event, or the numbers so far in every event."""

    def __init__(self, options: StreamOptions | None, generation: GenerationStream) -> None:
        self.at_end = options is not None and bool(options.include_usage)
        self.always = self.at_end and options is not None and bool(options.continuous_usage_stats)
        self._generation = generation

    def for_choice(self, choice: int) -> Usage | UnsetType | None:
        """Return the usage field of an event about a choice."""
        if not self.at_end:
            return UNSET
        return self._generation.usage_so_far(choice) if self.always else None


def encode_events(replies: Iterable[msgspec.Struct]) -> bytes:
    """Encode each reply as one server-sent event."""
    return b"".join(b"data: " + _ENCODER.encode(reply) + b"\n\n" for reply in replies)


class TextDeltaEncoder:
    """Encoder of events that differ only in their text, so that only the text is encoded each time."""

    def __init__(self, field: bytes, empty: Callable[[int], msgspec.Struct]) -> None:
        """field: the JSON name of the text field; empty: returns a reply about a choice with an empty text"""
        self._field, self._empty = field + b':""', empty
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def event(self, choice: int, text: str) -> bytes:
        around = self._around.get(choice)
        if around is None:  # within a string of JSON no quote stands without a backslash: the first is the field
            before, _, after = encode_events([self._empty(choice)]).partition(self._field)
            around = self._around[choice] = before + self._field[:-2], after
        return around[0] + _ENCODER.encode(text) + around[1]


def encode_named_event(name: str, reply: msgspec.Struct) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _ENCODER.encode(reply) + b"\n\n"


class EventStream:
    """A response that writes `blocks` as they come and cancels `generation` if it ends early.

    A generation that fails after the status line was sent becomes an error event. A client that reads nothing loses
    its connection (`connection.py`), which cancels the generation as any disconnect does.
    """

    def __init__(
        self,
        generation: GenerationStream,
        blocks: AsyncIterator[bytes],
        framing: StreamFraming = EVENTS,
        *,
        outlives_connection: bool = False,
    ) -> None:
        """outlives_connection: the generation runs in the background and is not cancelled with this connection"""
        self._generation, self._blocks, self._framing, self._outlives_connection = (
            generation,
            blocks,
            framing,
            outlives_connection,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(body: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        headers = [(b"content-type", self._framing.content_type), *UNBUFFERED]
        async with contextlib.nullcontext() if self._outlives_connection else self._generation:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            try:
                async for block in self._blocks:
                    if block:
                        await send({"type": "http.response.body", "body": block, "more_body": True})
            except GenerationFailedError as error:
                log.log(error.log_level, "answer %s failed: %s", self._generation.handle.request_id, error)
                await write(self._framing.failed(error.problem))
        await write(self._framing.end, more=False)
