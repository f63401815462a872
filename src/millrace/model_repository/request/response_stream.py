"""What a model answers to one request, one response after the other; whoever stops reading cancels it."""

import asyncio
from collections import deque
from typing import Protocol

from millrace.model_repository.models.model_version import Model
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.model_repository.request.tensors import held_bytes

MOST_UNREAD_BYTES = 64 << 20  # of one model
FREE_BYTES = 1 << 20  # of each request, whatever others leave unread
_EACH_BYTES = 1024  # about what a response without tensors takes


class ResponseSidecar(Protocol):
    """Another count of the same responses, such as of all that a client leaves."""

    def add(self, n_bytes: int) -> None:
        """raises StatusError where it is too much"""

    def take_off(self, n_bytes: int) -> None: ...

    def close(self) -> None: ...


class UnreadBytes:
    """Responses to one request that wait for their reader, by their bytes; the model's together are bounded."""

    def __init__(self, model: Model, beside: ResponseSidecar | None = None) -> None:
        self._model, self._beside, self._n_bytes = model, beside, 0

    def add(self, request: InferRequest, response: InferResponse | None) -> int:
        """How much it is, to be taken off when it is read. raises StatusError where it is too much"""
        n_bytes = _EACH_BYTES + (held_bytes(response.outputs.values()) if response is not None else 0)
        if self._n_bytes > FREE_BYTES and self._model.unread_bytes + n_bytes > MOST_UNREAD_BYTES:
            what = f"{request.named}responses of {self._model.unread_bytes} bytes wait for their readers"
            raise StatusError(Code.UNAVAILABLE, what)
        if self._beside is not None:
            self._beside.add(n_bytes)
        self._count(n_bytes)
        return n_bytes

    def take_off(self, n_bytes: int) -> None:
        if self._beside is not None:
            self._beside.take_off(n_bytes)
        self._count(-n_bytes)

    def close(self) -> None:
        """Nobody reads any more."""
        if self._beside is not None:
            self._beside.close()
        self._count(-self._n_bytes)

    def _count(self, n_bytes: int) -> None:
        self._n_bytes += n_bytes
        self._model.unread_bytes += n_bytes


class Responses:
    """To be iterated over once, by one reader; an error that is not the last word leaves the rest to be read."""

    def __init__(self, model: Model, request: InferRequest) -> None:
        """Submits it. raises StatusError"""
        self._model, self._request = model, request
        self._unread: deque[tuple[InferResponse | StatusError, int]] = deque()
        self._waiting = UnreadBytes(model)
        self._is_over = False
        self._changed = asyncio.Event()
        model.submit(request, self._receive)

    def __aiter__(self) -> "Responses":
        return self

    async def __anext__(self) -> InferResponse:
        """raises StatusError where the model answers with one, or answers much faster than anybody reads"""
        while not self._unread:
            if self._is_over:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        found, n_bytes = self._unread.popleft()
        self._waiting.take_off(n_bytes)
        if isinstance(found, StatusError):
            raise found
        return found

    async def next(self) -> InferResponse | None:
        """None: there is no more. raises as iterating does"""
        return await anext(self, None)

    def close(self) -> None:
        """Nobody reads any more."""
        self._unread.clear()
        self._waiting.close()
        if not self._is_over:
            self._is_over = True
            self._model.cancel(self._request)

    def _receive(self, response: InferResponse | None, error: StatusError | None, final: bool) -> None:
        if self._is_over:  # what comes after the end of reading
            return
        found = response if error is None else error
        if found is not None:
            try:
                n_bytes = self._waiting.add(self._request, response)
            except StatusError as too_much:
                self.close()
                found, n_bytes = too_much, 0
            self._unread.append((found, n_bytes))
        self._is_over = self._is_over or final
        self._changed.set()
