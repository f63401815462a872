"""Request bodies, received within bounds of size, time and memory."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from starlette.types import Receive, Scope

from millrace.machine.process_info import release_free_memory
from millrace.model_repository.request.concatenation import LARGE, concatenate
from millrace.serve.http.errors import ClientGoneError, HttpError
from millrace.serve.http.http_request import header

UNCOUNTED_BODY_BYTES = 64 * 1024  # of each body that are not counted: short requests are not affected by large ones
RELEASE_AFTER_S = 1.0  # delay until memory of a large body is returned to the system


@dataclass(slots=True, eq=False)
class IncomingBody:
    """One body that is being received."""

    client: str  # its address
    n_bytes: int = 0
    counted_bytes: int = 0
    gave_way: bool = False


class BodyLimiter:
    """Bounds of each body, and of the bytes of all bodies that are being received and decoded.

    If all together are too large, the client with most bytes loses the body that it began first, so that slow senders
    do not keep other clients out.
    """

    def __init__(self, max_bytes: int, timeout_s: float, max_receiving_bytes: int) -> None:
        self.max_bytes, self.timeout_s = max_bytes, timeout_s
        self._left_bytes = max_receiving_bytes
        self._arriving: dict[IncomingBody, asyncio.Timeout] = {}  # in the order in which they began
        self.thread = ThreadPoolExecutor(1, "millrace-bodies")  # copies large bodies off the event loop
        self._n_large, self._is_release_due = 0, False  # bodies so far, whose memory may be free now

    @contextmanager
    def receiving(self, client: str) -> Iterator[IncomingBody]:
        """Account for a body while it is in memory."""
        incoming = IncomingBody(client)
        try:
            yield incoming
        finally:
            self._left_bytes += incoming.counted_bytes
            if incoming.n_bytes >= LARGE:
                self._n_large += 1
                if not self._is_release_due:
                    self._release_later()

    def _release_later(self) -> None:
        """Return the memory of large bodies to the system, because their pieces are scattered in the heap.

        At most once every RELEASE_AFTER_S, so that consecutive bodies reuse the same memory.
        """

        def release(n_large: int) -> None:
            self.thread.submit(release_free_memory)
            self._is_release_due = False
            if self._n_large > n_large:  # what came later may not have been freed yet
                self._release_later()

        self._is_release_due = True
        asyncio.get_running_loop().call_later(RELEASE_AFTER_S, release, self._n_large)

    @asynccontextmanager
    async def arriving(self, incoming: IncomingBody) -> AsyncIterator[None]:
        """Account for a body while it arrives. raises HttpError: 408 if that takes too long, 503 if it was evicted"""
        try:
            async with asyncio.timeout(self.timeout_s) as end:
                self._arriving[incoming] = end
                yield
        except TimeoutError:
            if incoming.gave_way:
                raise _too_many() from None
            what = f"the body was not complete after {self.timeout_s:g} s"
            raise HttpError(408, "body_timeout", what, "the whole request", "send it again") from None
        finally:
            self._arriving.pop(incoming, None)

    def count(self, incoming: IncomingBody, n_bytes: int) -> None:
        """Count received bytes. raises HttpError with 413 or 503 if they are too many"""
        incoming.n_bytes += n_bytes
        if incoming.n_bytes > self.max_bytes:
            raise _too_large("too many bytes", self.max_bytes)
        more = max(0, incoming.n_bytes - UNCOUNTED_BODY_BYTES) - incoming.counted_bytes
        while not incoming.gave_way and more > self._left_bytes:
            self._evict_largest_client(incoming, more)
        if incoming.gave_way:
            raise _too_many()
        self._left_bytes -= more
        incoming.counted_bytes += more

    def count_decompressed(self, incoming: IncomingBody, n_bytes: int) -> None:
        """Count the decompressed bytes of a complete body. raises HttpError with 503 if they are too many

        No other body is evicted for them: highly compressed data would cost its sender nothing.
        """
        incoming.n_bytes += n_bytes
        more = max(0, incoming.n_bytes - UNCOUNTED_BODY_BYTES) - incoming.counted_bytes
        if more > self._left_bytes:
            raise _too_many()
        self._left_bytes -= more
        incoming.counted_bytes += more

    def _evict_largest_client(self, incoming: IncomingBody, n_bytes: int) -> None:
        """Evict the oldest body of the client with most bytes; it may be `incoming` itself."""
        held_bytes = Counter({incoming.client: n_bytes})
        for body in self._arriving:
            held_bytes[body.client] += body.counted_bytes
        largest = max(held_bytes.values())
        holding = (one for one in self._arriving if one.counted_bytes or one is incoming)
        first = next(one for one in holding if held_bytes[one.client] == largest)
        self._left_bytes += first.counted_bytes
        first.counted_bytes, first.gave_way = 0, True
        self._arriving.pop(first).reschedule(0)


async def read_body(scope: Scope, receive: Receive, bodies: BodyLimiter, incoming: IncomingBody) -> bytes:
    """Read a whole body of any content type. A body that is too large is refused before it is in memory.

    raises HttpError with 413, 415, 408 or 503; ClientGoneError
    """
    announced = header(scope, b"content-length")
    if announced is not None and int(announced) > bodies.max_bytes:  # the HTTP parser lets only digits through
        raise _too_large(f"{int(announced)} bytes", bodies.max_bytes)
    parts: list[bytes] = []
    async with bodies.arriving(incoming):
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            parts.append(message.get("body", b""))
            bodies.count(incoming, len(parts[-1]))
            more = message.get("more_body", False)
    if incoming.n_bytes < LARGE:
        return b"".join(parts)
    return await asyncio.get_running_loop().run_in_executor(bodies.thread, concatenate, parts)


def _too_many() -> HttpError:
    error = HttpError(
        503,
        "too_many_bodies",
        "all bodies that are being received take too much memory",
        "fewer large requests at a time",
        "come back later",
    )
    error.headers["retry-after"] = "5"
    return error


def _too_large(what: str, limit: int) -> HttpError:
    return HttpError(
        413,
        "body_too_large",
        f"the body has {what}",
        f"at most {limit}",
        "send less, or raise the server's --max-body-bytes",
    )
