"""BLS calls (`exec`, `async_exec`): responses of other models, for threads and event loops."""

import asyncio
import contextlib
import queue
from collections.abc import AsyncIterator, Callable, Iterator

from .host_interface import BlsRequest, Host, ModelResponse
from .responses import InferenceResponse, to_inference_response


class BlsCall:
    """One request to another model, submitted on creation and read by one reader."""

    def __init__(self, host: Host, request: BlsRequest) -> None:
        self._arrived: queue.SimpleQueue[tuple[ModelResponse | None, bool]] = queue.SimpleQueue()
        self._wake: Callable[[], None] | None = None  # wakes a waiting event loop
        self.is_over = False
        self._client = host.call_model(request, self._receive)

    def _receive(self, answer: ModelResponse | None, final: bool) -> None:
        """Receive a response, on another thread."""
        self._arrived.put((answer, final))
        wake = self._wake
        if wake is not None:
            wake()

    def next(self) -> ModelResponse | None:
        """Wait for the next response; None if only the end arrived."""
        return self._unpack(self._arrived.get())

    async def next_async(self) -> ModelResponse | None:
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(changed.set)

        self._wake = wake
        while self._arrived.empty():
            changed.clear()
            if self._arrived.empty():
                await changed.wait()
        self._wake = None
        return self._unpack(self._arrived.get())

    def cancel(self) -> None:
        self._client.cancel()

    def _unpack(self, arrived: tuple[ModelResponse | None, bool]) -> ModelResponse | None:
        answer, self.is_over = arrived
        if answer is not None:
            self._client.on_response_read()
        return answer

    async def single_response(self) -> InferenceResponse:
        """Return the single response; cancel the call if the waiting task is cancelled."""
        try:
            return to_inference_response(await self.next_async())
        finally:
            if not self.is_over:
                self.cancel()


class ResponseIterator:
    """The responses of a decoupled model. The last may be empty, if the model only signalled its end.

    As in Triton, responses are kept: a loop after a completed loop starts again, after an unfinished one it continues.
    """

    def __init__(self, call: BlsCall) -> None:
        self._call, self._responses, self._at = call, list[InferenceResponse](), 0

    def __iter__(self) -> Iterator[InferenceResponse]:
        self._begin()
        return self

    def __next__(self) -> InferenceResponse:
        if self._is_to_come():
            if self._call.is_over:
                raise StopIteration
            self._responses.append(to_inference_response(self._call.next()))
        return self._next()

    def __aiter__(self) -> AsyncIterator[InferenceResponse]:
        self._begin()
        return self

    async def __anext__(self) -> InferenceResponse:
        if self._is_to_come():
            if self._call.is_over:
                raise StopAsyncIteration
            self._responses.append(to_inference_response(await self._call.next_async()))
        return self._next()

    def _is_to_come(self) -> bool:
        return self._at == len(self._responses)

    def _begin(self) -> None:
        if self._call.is_over and self._is_to_come():
            self._at = 0

    def _next(self) -> InferenceResponse:
        self._at += 1
        return self._responses[self._at - 1]

    def cancel(self) -> None:
        """Cancel the call; it ends with an error of code CANCELLED."""
        self._call.cancel()

    def __del__(self) -> None:
        if not self._call.is_over:
            self._call.cancel()


async def start_iterator(call: BlsCall) -> ResponseIterator:
    """Wait for the first response and return an iterator, so that a plain loop does not block the event loop for it."""
    iterator = ResponseIterator(call)
    iterator._responses.append(to_inference_response(await call.next_async()))
    return iterator
