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
    """Requests that are being answered, of every kind."""

    n: int = 0


class Admission:
    """Requests to models: they are taken until the server drains, and those that were taken are waited for.

    From the moment that the whole request is there until its answer is handed to the connection: nothing of what is
    done for it, in whatever lane or engine, is given up before the time to drain is over.
    """

    def __init__(self) -> None:
        self._n, self.is_draining = 0, False
        self._none_left = asyncio.Event()
        self._none_left.set()

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """raises BusyError"""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> None:
        """Take one request, until `remove`. raises BusyError"""
        if self.is_draining:
            raise shutting_down()
        self._n += 1
        self._none_left.clear()

    def leave(self) -> None:
        """It is answered."""
        self._n -= 1
        if not self._n:
            self._none_left.set()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new ones, and wait for those that are there; False: some were not answered in time."""
        self.is_draining = True
        return await schedule_on_loop(self._none_left, timeout_s)


class UnsentBytes:
    """Bytes of the log probabilities of all answers that are held until they are complete; bounded together."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.n_bytes = max_bytes, 0

    def lease(self) -> "UnsentBytesLease":
        return UnsentBytesLease(self)


class UnsentBytesLease:
    """That of one answer."""

    def __init__(self, pool: UnsentBytes) -> None:
        self._pool, self._n_bytes = pool, 0

    def add(self, n_bytes: int) -> None:
        """raises HttpError with 503 where that is too much beside others"""
        self._n_bytes += n_bytes
        self._pool.n_bytes += n_bytes
        if self._pool.n_bytes > self._pool.max_bytes and self._pool.n_bytes > self._n_bytes:
            what = "the answers that are being computed for others take all the memory for answers"
            mend = "come back later, or set stream to true"
            error = HttpError(503, "too_many_answers", what, "fewer large answers at a time", mend)
            error.headers["retry-after"] = "5"
            raise error

    def release(self) -> None:
        self._pool.n_bytes -= self._n_bytes
        self._n_bytes = 0
