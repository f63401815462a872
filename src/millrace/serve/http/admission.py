"""Admission of requests while a server drains, and the bound on bytes of collected answers."""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from millrace.errors import BusyError
from millrace.runtime.service import schedule_on_loop
from millrace.serve.http.errors import HttpError


def shutting_down() -> BusyError:
    return BusyError("the server is shutting down", "a running server", "try again", 5.0)


@dataclass(slots=True)
class RequestsInFlight:
    """Number of requests of all kinds that are being answered."""

    n: int = 0


class Admission:
    """Admission of model requests: open until the server drains, which waits for the admitted ones.

    A request counts from the moment it is complete until its answer is handed to the connection: its work, in any
    executor or engine, is not cancelled before the time to drain is over.
    """

    def __init__(self) -> None:
        self._n, self.is_draining = 0, False
        self._none_left = asyncio.Event()
        self._none_left.set()

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Admit one request for the duration of a block. raises BusyError"""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> None:
        """Admit one request, until `leave`. raises BusyError"""
        if self.is_draining:
            raise shutting_down()
        self._n += 1
        self._none_left.clear()

    def leave(self) -> None:
        """End an admitted request."""
        self._n -= 1
        if not self._n:
            self._none_left.set()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the admitted ones; return False if some were not answered in time."""
        self.is_draining = True
        return await schedule_on_loop(self._none_left, timeout_s)


class UnsentBytes:
    """Bytes of log probabilities of all collected (non-streamed) answers, with a common bound."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.n_bytes = max_bytes, 0

    def lease(self) -> "UnsentBytesLease":
        return UnsentBytesLease(self)


class UnsentBytesLease:
    """The bytes of one answer."""

    def __init__(self, pool: UnsentBytes) -> None:
        self._pool, self._n_bytes = pool, 0

    def add(self, n_bytes: int) -> None:
        """Count more bytes. raises HttpError with 503 if all answers together exceed the bound"""
        self._n_bytes += n_bytes
        self._pool.n_bytes += n_bytes
        if self._pool.n_bytes > self._pool.max_bytes and self._pool.n_bytes > self._n_bytes:
            what = "the answers that are being computed for others take all the memory for answers"
            fix = "come back later, or set stream to true"
            error = HttpError(503, "too_many_answers", what, "fewer large answers at a time", fix)
            error.headers["retry-after"] = "5"
            raise error

    def release(self) -> None:
        self._pool.n_bytes -= self._n_bytes
        self._n_bytes = 0
