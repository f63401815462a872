"""Asking other models (`exec`, `async_exec`): what comes back, for threads and for event loops."""

import asyncio
import contextlib
import queue
from collections.abc import AsyncIterator, Callable, Iterator

from .host_interface import Answer, BlsRequest, Host
from .responses import InferenceResponse, response_of


class Call:
    """One request to another model, which begins at once. Read by one reader."""

    def __init__(self, host: Host, asked: BlsRequest) -> None:
        self._arrived: queue.SimpleQueue[tuple[Answer | None, bool]] = queue.SimpleQueue()
        self._wake: Callable[[], None] | None = None  # of an event loop that waits
        self.is_over = False
        self._asking = host.ask(asked, self._receive)

    def _receive(self, answer: Answer | None, final: bool) -> None:
        """From another thread."""
        self._arrived.put((answer, final))
        wake = self._wake
        if wake is not None:
            wake()

    def next(self) -> Answer | None:
        """Blocks. None: nothing but the end came"""
        return self._taken(self._arrived.get())

    async def next_async(self) -> Answer | None:
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there
                loop.call_soon_threadsafe(changed.set)

        self._wake = wake
        while self._arrived.empty():
            changed.clear()
            if self._arrived.empty():
                await changed.wait()
        self._wake = None
        return self._taken(self._arrived.get())

    def cancel(self) -> None:
        self._asking.cancel()

    def _taken(self, arrived: tuple[Answer | None, bool]) -> Answer | None:
        answer, self.is_over = arrived
        if answer is not None:
            self._asking.taken()
        return answer

    async def only(self) -> InferenceResponse:
        """The one response; the model is told where nobody waits for it any more."""
        try:
            return response_of(await self.next_async())
        finally:
            if not self.is_over:
                self.cancel()


class ResponseIterator:
    """The responses of a decoupled model. The last may be one without tensors: the model only said that it ends.

    As Triton's, it keeps them: a loop after one that came to the end begins anew, after one that was left goes on.
    """

    def __init__(self, call: Call) -> None:
        self._call, self._kept, self._at = call, list[InferenceResponse](), 0

    def __iter__(self) -> Iterator[InferenceResponse]:
        self._begin()
        return self

    def __next__(self) -> InferenceResponse:
        if self._is_to_come():
            if self._call.is_over:
                raise StopIteration
            self._kept.append(response_of(self._call.next()))
        return self._next()

    def __aiter__(self) -> AsyncIterator[InferenceResponse]:
        self._begin()
        return self

    async def __anext__(self) -> InferenceResponse:
        if self._is_to_come():
            if self._call.is_over:
                raise StopAsyncIteration
            self._kept.append(response_of(await self._call.next_async()))
        return self._next()

    def _is_to_come(self) -> bool:
        return self._at == len(self._kept)

    def _begin(self) -> None:
        if self._call.is_over and self._is_to_come():
            self._at = 0

    def _next(self) -> InferenceResponse:
        self._at += 1
        return self._kept[self._at - 1]

    def cancel(self) -> None:
        """Nobody wants the rest; it ends with an error of code CANCELLED."""
        self._call.cancel()

    def __del__(self) -> None:
        if not self._call.is_over:
            self._call.cancel()


async def begun(call: Call) -> ResponseIterator:
    """Once the first response is there: a plain loop over the iterator does not hold up an event loop for it."""
    found = ResponseIterator(call)
    found._kept.append(response_of(await call.next_async()))
    return found
