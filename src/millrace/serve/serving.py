"""What all models of one server share: its bounds, its threads for large work, its metrics."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from millrace.serve.errors import HttpError
from millrace.serve.lanes import Lane
from millrace.serve.metrics import Metrics
from millrace.serve.settings import ServerSettings

T = TypeVar("T")
LARGE_BODY = 64 * 1024  # bytes of JSON: half a millisecond of the event loop
LARGE = 8192  # tokens of an answer, characters of stop strings: a few milliseconds
LARGE_STEP = 512  # log probabilities of an answer that is held until it is complete: about a millisecond


@dataclass(slots=True)
class Load:
    """Requests that are being answered, of every kind."""

    n: int = 0


class Unsent:
    """Bytes of the log probabilities of all answers that are held until they are complete; bounded together."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.n_bytes = max_bytes, 0

    def share(self) -> "Share":
        return Share(self)


class Share:
    """That of one answer."""

    def __init__(self, of: Unsent) -> None:
        self._of, self._n_bytes = of, 0

    def add(self, n_bytes: int) -> None:
        """raises HttpError with 503 where that is too much beside others"""
        self._n_bytes += n_bytes
        self._of.n_bytes += n_bytes
        if self._of.n_bytes > self._of.max_bytes and self._of.n_bytes > self._n_bytes:
            error = HttpError(
                503,
                "too_many_answers",
                "the answers that are being computed for others take all the memory for answers",
                "fewer large answers at a time",
                "come back later, or set stream to true",
            )
            error.headers["retry-after"] = "5"
            raise error

    def release(self) -> None:
        self._of.n_bytes -= self._n_bytes
        self._n_bytes = 0


class Serving:
    """One server, whatever models it has."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.load = Load()
        self.metrics = Metrics()
        self.unsent = Unsent(settings.max_unread_bytes)
        self._bodies = Lane("bodies", settings.max_preparing)
        self._replies = Lane("replies", settings.max_preparing)

    async def decoded(self, work: Callable[[], T], n_bytes: int) -> T:
        """`work()` on a body of so many bytes, in a thread where they are many. raises as `off_loop`"""
        return await self._bodies.run(work, n_bytes) if n_bytes > LARGE_BODY else work()

    async def off_loop(self, is_large: bool, work: Callable[[], T]) -> T:
        """`work()` for a reply, in a thread where it is large. raises BusyError, and whatever `work` raises"""
        return await self._replies.run(work) if is_large else work()

    def close(self) -> None:
        """Nobody waits for a large body or reply any more."""
        self._bodies.close()
        self._replies.close()
