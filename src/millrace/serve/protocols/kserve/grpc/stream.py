"""ModelStreamInfer: many requests on one stream, each with as many responses as its model gives.

Requests are computed concurrently. Responses of models that are not decoupled come in the order of their requests,
those of decoupled models as soon as they are ready, as in Triton. An error is a message; the stream continues.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from millrace.errors import MillraceError
from millrace.model_repository.execution.tracebacks import without_frames
from millrace.model_repository.models.model_version import Model
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.response_stream import ResponseSidecar, UnreadBytes
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.serve.http.api_keys import Grant
from millrace.serve.http.errors import problem_of
from millrace.serve.http.request_bodies import UNCOUNTED_BODY_BYTES
from millrace.serve.protocols.kserve.grpc.calls import GrpcCallContext, GrpcFrontend
from millrace.serve.protocols.kserve.grpc.stream_responses import Deadline, StreamResponses, error_answer

MAX_OPEN_REQUESTS = 256  # of a stream; the next request is read when one of them has ended
Begin = Callable[[], Awaitable[None]]
Read = Callable[[], Awaitable[bytes | None]]
Write = Callable[[bytes], Awaitable[None]]
Admit = Callable[[int], AbstractContextManager[None]]


class _StreamMessage(NamedTuple):
    """One message to be written: a response, an error, or neither, if only the end is reported."""

    response: InferResponse | None
    error: StatusError | None
    final: bool


@dataclass(slots=True, eq=False)
class _OpenRequest:
    """A request that was read.

    proto: the message as it came; answer: an answer that waits for those of earlier requests, and its bytes
    """

    proto: Any
    admitted: ExitStack
    model: Model | None = None
    inference: InferRequest | None = None
    answers: StreamResponses | None = None
    empty_final: bool = False
    task: "asyncio.Task[None] | None" = None
    answer: tuple[_StreamMessage, int] | None = None
    unread: UnreadBytes | None = None
    is_over: bool = False  # nothing more is written about it


class Stream:
    """One ModelStreamInfer call, to be used in the event loop; `run` serves it to its end."""

    def __init__(
        self, frontend: GrpcFrontend, admit: Admit, lease: Callable[[], ResponseSidecar], write_s: float,
        ends_with_error: bool,
        caller: GrpcCallContext, grant: Grant | None = None,
    ) -> None:  # fmt: skip
        """admit: admits a request by its size in bytes, until it is answered
        lease: returns the counter of one request's unread responses
        write_s: timeout for the client to read a response
        ends_with_error: the first error ends the stream with its status, as a client may request
        grant: charged when a request has ended, because a stream may never end"""
        self._frontend, self._admit, self._write_s, self._ends_with_error = frontend, admit, write_s, ends_with_error
        self._lease, self._caller, self._grant = lease, caller, grant
        self._open: set[_OpenRequest] = set()
        self._in_order: deque[_OpenRequest] = deque()  # those of models that are not decoupled
        self._ready = deque[tuple[_OpenRequest, _StreamMessage, int] | None]()  # None: the end
        self._waiting: asyncio.Future[None] | None = None  # for the next of them
        self._write: Write
        self._deadline: Deadline
        self._is_writing = False  # what `_write_at_once` began
        self.n_writing = 0  # bytes of an answer that is on its way, but for a short one's
        self._room = asyncio.Semaphore(MAX_OPEN_REQUESTS)
        self._all_read = self._is_beginning = self.stopped = False
        self._reading: asyncio.Task[None] | None = None
        self._error: BaseException | None = None  # it ends with it, once the answer that is being written is

    async def run(self, begin: Begin, read: Read, write: Write) -> None:
        """Serve the stream. begin: called before the first response; read: returns the next request, None at the end

        raises StatusError if the stream ends with it, and gRPC's error of a call that is over
        """
        self._reading = asyncio.ensure_future(self._read_all(read))
        try:
            await self._write_all(begin, write)
            if self._error is not None:
                raise self._error
        finally:
            self._reading.cancel()
            self._cancel_all()  # first: while this waits gRPC may cancel it, of which a write may have told before
            await asyncio.wait((self._reading,))

    def stop(self) -> None:
        """Stop reading; requests that were read are answered."""
        self.stopped = True
        if self._is_beginning:  # what is large is read in a thread
            return
        if self._reading is not None:
            self._reading.cancel()
        self._read_to_the_end()

    def _cancel_all(self) -> None:
        """Cancel all open requests."""
        for request in list(self._open):
            self._end_request(request)
            if request.task is not None:
                request.task.cancel()
            elif request.model is not None and request.inference is not None:
                request.model.cancel(request.inference)

    # ------------------------------------------------------------------ requests

    async def _read_all(self, read: Read) -> None:
        try:
            while not self.stopped:
                await self._room.acquire()
                data = await read()
                if data is None:
                    break
                self._is_beginning = True
                await self._begin(data)
                self._is_beginning = False
        except Exception as error:  # noqa: BLE001  a bug of ours ends the stream, which would wait for ever
            self._fail(error)
        self._read_to_the_end()

    def _read_to_the_end(self) -> None:
        self._all_read = True
        self._end_if_done()

    async def _begin(self, data: bytes) -> None:
        request = _OpenRequest(None, ExitStack())
        self._open.add(request)
        try:
            request.proto, cut = await self._frontend.decode_infer(data)  # first, for a refusal has its id
            if self._grant is not None and (above := self._grant.limit_reached):
                raise StatusError(Code.UNAVAILABLE, above)
            request.admitted.enter_context(self._admit(len(data)))
            model = self._frontend.model(request.proto)
            if model.is_decoupled:
                request.model = model
            request.inference, read = await self._frontend.check_infer(data, request.proto, cut, model, self._caller)
            request.answers, request.empty_final = (
                StreamResponses(request.proto, model, request.inference, read.output_options),
                read.output_options.empty_final,
            )
            if model.is_decoupled:
                model.submit(request.inference, lambda *answer: self._put(request, _StreamMessage(*answer)))
            else:
                request.model = model
                self._in_order.append(request)
                request.task = asyncio.ensure_future(self._infer(request, model, request.inference))
        except (StatusError, MillraceError) as error:
            request.inference = request.answers = None
            if request.model is None:  # of a model that is not decoupled, or of none: its turn comes, too
                self._in_order.append(request)
                self._put_in_order(request, _StreamMessage(None, as_status(error), True))
            else:
                self._put(request, _StreamMessage(None, as_status(error), True))

    async def _infer(self, request: _OpenRequest, model: Model, inference: InferRequest) -> None:
        try:
            answer = _StreamMessage(await model.infer(inference), None, True)
        except StatusError as error:
            answer = _StreamMessage(None, as_status(error), True)
        except Exception as error:  # noqa: BLE001  as above
            self._fail(error)
            return
        self._put_in_order(request, answer)

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
            if self._reading is not None:
                self._reading.cancel()  # or what it begins would not be given up
            self._cancel_all()
            self._queue_message(None)

    def _put_in_order(self, request: _OpenRequest, answer: _StreamMessage) -> None:
        """Take the only response of a request, which waits for those of earlier requests."""
        request.answer = self._count_unread(request, answer)
        while self._in_order and (first := self._in_order[0].answer) is not None:
            self._write_or_queue(self._in_order.popleft(), *first)

    # ------------------------------------------------------------------ answers

    def _put(self, request: _OpenRequest, answer: _StreamMessage) -> None:
        if not request.is_over:
            self._write_or_queue(request, *self._count_unread(request, answer))

    def _count_unread(self, request: _OpenRequest, answer: _StreamMessage) -> tuple[_StreamMessage, int]:
        """Return a message with its bytes, counted until it is written; too many end the request, not the stream."""
        if request.model is None or request.inference is None or request not in self._open:
            return answer, 0
        request.unread = request.unread or UnreadBytes(request.model, self._lease())
        try:
            return answer, request.unread.add(request.inference, answer.response)
        except StatusError as too_much:
            request.is_over = True
            request.model.cancel(request.inference)  # which an ensemble answers at once
            return _StreamMessage(None, too_much, True), 0

    def _write_or_queue(self, request: _OpenRequest, answer: _StreamMessage, n_bytes: int) -> None:
        """Write or queue a message, unless its request or the stream has ended."""
        if request not in self._open:
            return
        if self._waiting is None or self._waiting.done() or not self._write_at_once(request, answer, n_bytes):
            self._queue_message((request, answer, n_bytes))

    def _write_at_once(self, request: _OpenRequest, answer: _StreamMessage, n_bytes: int) -> bool:
        """Write a short response at once; waking the writer would delay it by a turn of the event loop.

        gRPC's write coroutine is started here and continued by callbacks. Return False if that is not possible.
        """
        if answer.response is None or answer.final or n_bytes > UNCOUNTED_BODY_BYTES or self._is_writing or self._ready:
            return False
        assert request.answers is not None
        try:
            data = request.answers.response(answer.response, final=False)
        except Exception:  # noqa: BLE001  the normal path reports it; raised here it would reach the model
            return False
        writing = self._write(data).__await__()
        self._is_writing = True
        self._deadline.begin()
        self._continue_write(writing, request, n_bytes)
        return True

    def _continue_write(
        self, writing: Generator[Any, None, None], request: _OpenRequest, n_bytes: int, _: Any = None
    ) -> None:
        try:
            waits_for = writing.send(None)
        except StopIteration:
            pass
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  what gRPC says of a call that is over
            self._fail(error)
        else:  # as a task continues a coroutine: after a future, or without one in the next turn of the event loop
            later = partial(self._continue_write, writing, request, n_bytes)
            if waits_for is None:
                asyncio.get_running_loop().call_soon(later)
            else:
                waits_for._asyncio_future_blocking = False
                waits_for.add_done_callback(later)
            return
        self._is_writing = False
        self._deadline.end()
        if request.unread is not None and request in self._open:
            request.unread.take_off(n_bytes)
        if self._ready:
            self._wake()

    def _queue_message(self, item: tuple[_OpenRequest, _StreamMessage, int] | None) -> None:
        self._ready.append(item)
        if not self._is_writing:
            self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def _next(self) -> tuple[_OpenRequest, _StreamMessage, int] | None:
        while not self._ready or self._is_writing:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        return self._ready.popleft()

    async def _write_all(self, begin: Begin, write: Write) -> None:
        try:
            self._write = write
            with Deadline(self._write_s) as self._deadline:
                self._deadline.begin()
                await begin()
                self._deadline.end()
                while (item := await self._next()) is not None and self._error is None:
                    request, answer, n_bytes = item
                    if answer.error is not None and self._ends_with_error:
                        raise answer.error
                    data = await self._message(request, answer, n_bytes)
                    if data is not None:
                        self._deadline.begin()
                        self.n_writing = len(data)
                        await write(data)
                        self.n_writing = 0
                        self._deadline.end()
                    if request.unread is not None and request in self._open:  # it may have been given up meanwhile
                        request.unread.take_off(n_bytes)
                    if answer.final:
                        self._end_request(request)
        except TimeoutError:
            raise StatusError(Code.UNAVAILABLE, f"the stream was not read for {self._write_s:g} s") from None

    async def _message(self, request: _OpenRequest, answer: _StreamMessage, n_bytes: int) -> bytes | None:
        """Return an encoded message, or None if there is nothing to report. n_bytes: approximate size"""
        if answer.response is None and answer.error is None and not request.empty_final:
            return None
        try:
            if n_bytes <= UNCOUNTED_BODY_BYTES:
                return _encode_message(request, answer)
            return await self._frontend.encode_off_loop(n_bytes, lambda: _encode_message(request, answer))
        except (StatusError, MillraceError) as error:
            failed = as_status(error)
            if self._ends_with_error:
                raise failed from None
            return _encode_message(request, _StreamMessage(None, failed, answer.final))

    def _end_request(self, request: _OpenRequest) -> None:
        self._open.discard(request)
        request.admitted.close()
        if self._grant is not None:
            self._grant.charge(self._caller.token_usage.take())
        if request.unread is not None:
            request.unread.close()
        self._room.release()
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._all_read and not self._open:
            self._queue_message(None)


def as_status(error: StatusError | MillraceError) -> StatusError:
    """Return an error as StatusError, without its traceback frames, because it may wait in the stream."""
    without_frames(error)
    if isinstance(error, StatusError):
        return error
    return StatusError(Code.UNAVAILABLE, problem_of(error, accepting=True).message)


def _encode_message(request: _OpenRequest, answer: _StreamMessage) -> bytes:
    """Encode a ModelStreamInferResponse. raises StatusError"""
    if request.answers is None:
        assert answer.error is not None, "what was not begun has failed"
        return error_answer(request.proto, answer.error)
    if answer.error is not None:
        return request.answers.error(answer.error, answer.final)
    return request.answers.end() if answer.response is None else request.answers.response(answer.response, answer.final)
