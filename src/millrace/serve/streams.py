"""Server-sent events: one write for each step of the engine, whatever the number of its tokens and choices."""

import logging
from collections.abc import AsyncIterator, Iterable

import msgspec
from msgspec import UNSET, UnsetType
from starlette.types import Receive, Scope, Send

from millrace.serve.generation import Generation, GenerationFailedError
from millrace.serve.protocol import StreamOptions
from millrace.serve.replies import Usage


class StreamUsage:
    """What a stream says of its usage: nothing, or null until its last event, or the numbers so far in every event."""

    def __init__(self, asked: StreamOptions | None, generation: Generation) -> None:
        self.at_end = asked is not None and bool(asked.include_usage)
        self._always = self.at_end and asked is not None and bool(asked.continuous_usage_stats)
        self._generation = generation

    def of(self, choice: int) -> Usage | UnsetType | None:
        """For an event about that choice."""
        if not self.at_end:
            return UNSET
        return self._generation.usage_so_far(choice) if self._always else None


DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]
_ENCODER = msgspec.json.Encoder()
log = logging.getLogger(__name__)


def events(replies: Iterable[msgspec.Struct]) -> bytes:
    """Each reply as one event."""
    return b"".join(b"data: " + _ENCODER.encode(reply) + b"\n\n" for reply in replies)


class EventStream:
    """A response that writes `blocks` as they come, and cancels `generation` when it ends early.

    A generation that fails after the status line was sent becomes an error event. A reader that takes nothing loses its
    connection (`connections.py`), and so the generation ends as for any client that goes away.
    """

    def __init__(self, generation: Generation, blocks: AsyncIterator[bytes]) -> None:
        self._generation, self._blocks = generation, blocks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(body: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        async with self._generation:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            try:
                async for block in self._blocks:
                    if block:
                        await write(block)
            except GenerationFailedError as error:
                log.error("answer %s failed: %s", self._generation.handle.request_id, error)
                await write(b"data: " + error.problem.body() + b"\n\n")
        await write(DONE, more=False)
