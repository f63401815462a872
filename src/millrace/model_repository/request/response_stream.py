"""Stream of a model's responses to one request, with a bound on unread bytes; closing it cancels the request."""

import asyncio
from collections import deque
from typing import Protocol

from millrace.model_repository.models.model_version import Model
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.model_repository.request.tensors import memory_bytes

MAX_UNREAD_BYTES = 64 << 20  # of one model
UNCOUNTED_RESPONSE_BYTES = 1 << 20  # per request, whatever other requests leave unread
_EACH_BYTES = 1024  # approximate size of a response without tensors


class ResponseSidecar(Protocol):
    """Another counter of the same responses, for example per client."""

    def add(self, n_bytes: int) -> None:
        """Add bytes. raises StatusError if there are too many"""

    def take_off(self, n_bytes: int) -> None: ...

    def close(self) -> None: ...


class UnreadBytes:
    """Bytes of unread responses to one request; the sum over a model's requests is bounded."""

    def __init__(self, model: Model, sidecar: ResponseSidecar | None = None) -> None:
        self._model, self._sidecar, self._n_bytes = model, sidecar, 0

    def add(self, request: InferRequest, response: InferResponse | None) -> int:
        """Add a response and return its bytes, for `take_off` once read. raises StatusError if there are too many"""
        n_bytes = _EACH_BYTES + (memory_bytes(response.outputs.values()) if response is not None else 0)
        if self._n_bytes > UNCOUNTED_RESPONSE_BYTES and self._model.unread_bytes + n_bytes > MAX_UNREAD_BYTES:
            message = f"{request.error_prefix}responses of {self._model.unread_bytes} bytes wait for their readers"
            raise StatusError(Code.UNAVAILABLE, message)
        if self._sidecar is not None:
            self._sidecar.add(n_bytes)
        self._count(n_bytes)
        return n_bytes

    def take_off(self, n_bytes: int) -> None:
        if self._sidecar is not None:
            self._sidecar.take_off(n_bytes)
        self._count(-n_bytes)

    def close(self) -> None:
        """Stop reading and release the unread responses."""
        if self._sidecar is not None:
            self._sidecar.close()
        self._count(-self._n_bytes)

    def _count(self, n_bytes: int) -> None:
        self._n_bytes += n_bytes
        self._model.unread_bytes += n_bytes


class ResponseStream:
    """Responses, to be iterated over once by one reader; after an error that is not final, reading may continue."""

    def __init__(self, model: Model, request: InferRequest) -> None:
        """Submit the request. raises StatusError"""
        self._model, self._request = model, request
        self._unread: deque[tuple[InferResponse | StatusError, int]] = deque()
        self._waiting = UnreadBytes(model)
        self._is_over = False
        self._changed = asyncio.Event()
        model.submit(request, self._receive)

    def __aiter__(self) -> "ResponseStream":
        return self

    async def __anext__(self) -> InferResponse:
        """Return the next response. raises StatusError if the model sent one, or if too many responses are unread"""
        while not self._unread:
            if self._is_over:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        item, n_bytes = self._unread.popleft()
        self._waiting.take_off(n_bytes)
        if isinstance(item, StatusError):
            raise item
        return item

    async def next(self) -> InferResponse | None:
        """Return the next response, or None at the end. raises as iterating does"""
        return await anext(self, None)

    def close(self) -> None:
        """Stop reading and release the unread responses."""
        self._unread.clear()
        self._waiting.close()
        if not self._is_over:
            self._is_over = True
            self._model.cancel(self._request)

    def _receive(self, response: InferResponse | None, error: StatusError | None, final: bool) -> None:
        if self._is_over:  # responses after the stream was closed
            return
        item = response if error is None else error
        if item is not None:
            try:
                n_bytes = self._waiting.add(self._request, response)
            except StatusError as too_much:
                self.close()
                item, n_bytes = too_much, 0
            self._unread.append((item, n_bytes))
        self._is_over = self._is_over or final
        self._changed.set()
