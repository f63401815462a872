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
from millrace.serve.http.request_bodies import FREE_BYTES
from millrace.serve.protocols.kserve.grpc.calls import GrpcCallContext, GrpcFrontend
from millrace.serve.protocols.kserve.grpc.stream_responses import Deadline, StreamResponses, error_answer

MAX_OPEN_REQUESTS = 256  # of a stream; the next request is read when one of them has ended
Begin = Callable[[], Awaitable[None]]
Read = Callable[[], Awaitable[bytes | None]]
Write = Callable[[bytes], Awaitable[None]]
Admit = Callable[[int], AbstractContextManager[None]]


class _Answer(NamedTuple):
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
    answer: tuple[_Answer, int] | None = None
    unread: UnreadBytes | None = None
    is_over: bool = False  # nothing more is written about it


class Stream:
    """One ModelStreamInfer call, to be used in the event loop; `run` serves it to its end."""

    def __init__(
        self, front: GrpcFrontend, admit: Admit, share: Callable[[], ResponseSidecar], write_s: float,
        ends_with_error: bool,
        caller: GrpcCallContext, grant: Grant | None = None,
    ) -> None:  # fmt: skip
        """admit: admits a request of so many bytes while it is answered
        share: returns the counter of one request's unread responses
        write_s: timeout for the client to read a response
        ends_with_error: the first error ends the stream with its status, as a client may request
        grant: charged when a request has ended, because a stream may never end"""
        self._front, self._admit, self._write_s, self._ends_with_error = front, admit, write_s, ends_with_error
        self._share, self._caller, self._grant = share, caller, grant
        self._open: set[_OpenRequest] = set()
        self._in_order: deque[_OpenRequest] = deque()  # those of models that are not decoupled
        self._ready = deque[tuple[_OpenRequest, _Answer, int] | None]()  # None: the end
        self._waiting: asyncio.Future[None] | None = None  # for the next of them
        self._write: Write
        self._deadline: Deadline
        self._is_writing = False  # what `_write_at_once` began
        self.n_writing = 0  # bytes of an answer that is on its way, but for a short one's
        self._room = asyncio.Semaphore(MAX_OPEN_REQUESTS)
        self._all_read = self._is_beginning = self.stopped = False
        self._reading: asyncio.Task[None] | None = None
        self._broken: BaseException | None = None  # it ends with it, once the answer that is being written is

    async def run(self, begin: Begin, read: Read, write: Write) -> None:
        """Serve the stream. begin: called before the first response; read: returns the next request, None at the end

        raises StatusError if the stream ends with it, and gRPC's error of a call that is over
        """
        self._reading = asyncio.ensure_future(self._read_all(read))
        try:
            await self._write_all(begin, write)
            if self._broken is not None:
                raise self._broken
        finally:
            self._reading.cancel()
            self._give_up()  # first: while this waits gRPC may cancel it, of which a write may have told before
            await asyncio.wait((self._reading,))

    def stop(self) -> None:
        """Stop reading; requests that were read are answered."""
        self.stopped = True
        if self._is_beginning:  # what is large is read in a thread
            return
        if self._reading is not None:
            self._reading.cancel()
        self._read_to_the_end()

    def _give_up(self) -> None:
        """Cancel all open requests."""
        for one in list(self._open):
            self._ended(one)
            if one.task is not None:
                one.task.cancel()
            elif one.model is not None and one.inference is not None:
                one.model.cancel(one.inference)

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
            self._break(error)
        self._read_to_the_end()

    def _read_to_the_end(self) -> None:
        self._all_read = True
        self._end_if_done()

    async def _begin(self, data: bytes) -> None:
        one = _OpenRequest(None, ExitStack())
        self._open.add(one)
        try:
            one.proto, cut = await self._front.decode_infer(data)  # first, for a refusal has its id
            if self._grant is not None and (above := self._grant.limit_reached):
                raise StatusError(Code.UNAVAILABLE, above)
            one.admitted.enter_context(self._admit(len(data)))
            model = self._front.model(one.proto)
            if model.is_decoupled:
                one.model = model
            one.inference, output_options = await self._front.check_infer(
                one.proto, cut, model, len(data), self._caller
            )
            one.answers, one.empty_final = (
                StreamResponses(one.proto, model, one.inference, output_options),
                output_options.empty_final,
            )
            if model.is_decoupled:
                model.submit(one.inference, lambda *answer: self._put(one, _Answer(*answer)))
            else:
                one.model = model
                self._in_order.append(one)
                one.task = asyncio.ensure_future(self._infer(one, model, one.inference))
        except (StatusError, MillraceError) as error:
            one.inference = one.answers = None
            if one.model is None:  # of a model that is not decoupled, or of none: its turn comes, too
                self._in_order.append(one)
                self._answered(one, _Answer(None, as_status(error), True))
            else:
                self._put(one, _Answer(None, as_status(error), True))

    async def _infer(self, one: _OpenRequest, model: Model, inference: InferRequest) -> None:
        try:
            answer = _Answer(await model.infer(inference), None, True)
        except StatusError as error:
            answer = _Answer(None, as_status(error), True)
        except Exception as error:  # noqa: BLE001  as above
            self._break(error)
            return
        self._answered(one, answer)

    def _break(self, error: BaseException) -> None:
        if self._broken is None:
            self._broken = error
            if self._reading is not None:
                self._reading.cancel()  # or what it begins would not be given up
            self._give_up()
            self._tell(None)

    def _answered(self, one: _OpenRequest, answer: _Answer) -> None:
        """Take the only response of a request, which waits for those of earlier requests."""
        one.answer = self._counted(one, answer)
        while self._in_order and (first := self._in_order[0].answer) is not None:
            self._hand(self._in_order.popleft(), *first)

    # ------------------------------------------------------------------ answers

    def _put(self, one: _OpenRequest, answer: _Answer) -> None:
        if not one.is_over:
            self._hand(one, *self._counted(one, answer))

    def _counted(self, one: _OpenRequest, answer: _Answer) -> tuple[_Answer, int]:
        """Return a message with its bytes, counted until it is written; too many end the request, not the stream."""
        if one.model is None or one.inference is None or one not in self._open:
            return answer, 0
        one.unread = one.unread or UnreadBytes(one.model, self._share())
        try:
            return answer, one.unread.add(one.inference, answer.response)
        except StatusError as too_much:
            one.is_over = True
            one.model.cancel(one.inference)  # which an ensemble answers at once
            return _Answer(None, too_much, True), 0

    def _hand(self, one: _OpenRequest, answer: _Answer, n_bytes: int) -> None:
        """Write or queue a message, unless its request or the stream has ended."""
        if one not in self._open:
            return
        if self._waiting is None or self._waiting.done() or not self._write_at_once(one, answer, n_bytes):
            self._tell((one, answer, n_bytes))

    def _write_at_once(self, one: _OpenRequest, answer: _Answer, n_bytes: int) -> bool:
        """Write a short response at once; waking the writer would delay it by a turn of the event loop.

        gRPC's write coroutine is started here and continued by callbacks. Return False if that is not possible.
        """
        if answer.response is None or answer.final or n_bytes > FREE_BYTES or self._is_writing or self._ready:
            return False
        assert one.answers is not None
        try:
            data = one.answers.response(answer.response, final=False)
        except Exception:  # noqa: BLE001  the normal path reports it; raised here it would reach the model
            return False
        writing = self._write(data).__await__()
        self._is_writing = True
        self._deadline.begin()
        self._go_on(writing, one, n_bytes)
        return True

    def _go_on(self, writing: Generator[Any, None, None], one: _OpenRequest, n_bytes: int, _: Any = None) -> None:
        try:
            waits_for = writing.send(None)
        except StopIteration:
            pass
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  what gRPC says of a call that is over
            self._break(error)
        else:  # as a task continues a coroutine: after a future, or without one in the next turn of the event loop
            later = partial(self._go_on, writing, one, n_bytes)
            if waits_for is None:
                asyncio.get_running_loop().call_soon(later)
            else:
                waits_for._asyncio_future_blocking = False
                waits_for.add_done_callback(later)
            return
        self._is_writing = False
        self._deadline.end()
        if one.unread is not None and one in self._open:
            one.unread.take_off(n_bytes)
        if self._ready:
            self._wake()

    def _tell(self, item: tuple[_OpenRequest, _Answer, int] | None) -> None:
        self._ready.append(item)
        if not self._is_writing:
            self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def _next(self) -> tuple[_OpenRequest, _Answer, int] | None:
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
                while (item := await self._next()) is not None and self._broken is None:
                    one, answer, n_bytes = item
                    if answer.error is not None and self._ends_with_error:
                        raise answer.error
                    data = await self._message(one, answer, n_bytes)
                    if data is not None:
                        self._deadline.begin()
                        self.n_writing = len(data)
                        await write(data)
                        self.n_writing = 0
                        self._deadline.end()
                    if one.unread is not None and one in self._open:  # it may have been given up meanwhile
                        one.unread.take_off(n_bytes)
                    if answer.final:
                        self._ended(one)
        except TimeoutError:
            raise StatusError(Code.UNAVAILABLE, f"the stream was not read for {self._write_s:g} s") from None

    async def _message(self, one: _OpenRequest, answer: _Answer, n_bytes: int) -> bytes | None:
        """Return an encoded message, or None if there is nothing to report. n_bytes: approximate size"""
        if answer.response is None and answer.error is None and not one.empty_final:
            return None
        try:
            if n_bytes <= FREE_BYTES:
                return _packed(one, answer)
            return await self._front.encode_off_loop(n_bytes, lambda: _packed(one, answer))
        except (StatusError, MillraceError) as error:
            failed = as_status(error)
            if self._ends_with_error:
                raise failed from None
            return _packed(one, _Answer(None, failed, answer.final))

    def _ended(self, one: _OpenRequest) -> None:
        self._open.discard(one)
        one.admitted.close()
        if self._grant is not None:
            self._grant.charge(self._caller.bill.take())
        if one.unread is not None:
            one.unread.close()
        self._room.release()
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._all_read and not self._open:
            self._tell(None)


def as_status(error: StatusError | MillraceError) -> StatusError:
    """Return an error as StatusError, without its traceback frames, because it may wait in the stream."""
    without_frames(error)
    if isinstance(error, StatusError):
        return error
    return StatusError(Code.UNAVAILABLE, problem_of(error, accepting=True).message)


def _packed(one: _OpenRequest, answer: _Answer) -> bytes:
    """Encode a ModelStreamInferResponse. raises StatusError"""
    if one.answers is None:
        assert answer.error is not None, "what was not begun has failed"
        return error_answer(one.proto, answer.error)
    if answer.error is not None:
        return one.answers.error(answer.error, answer.final)
    return one.answers.end() if answer.response is None else one.answers.response(answer.response, answer.final)
