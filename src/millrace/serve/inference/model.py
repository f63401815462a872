"""One version of a model, loaded: what a request to it must be, its queue, its instances, its statistics.

Everything here runs in the event loop; instances have threads of their own (`instances.py`).
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.serve.inference.backend import InstanceGiven, ModelBackend
from millrace.serve.inference.batching import Batch, BatchQueue, BatchRules
from millrace.serve.inference.check import Checker
from millrace.serve.inference.instances import Outbox, Worker
from millrace.serve.inference.request import InferRequest, InferResponse, Receiver
from millrace.serve.inference.statistics import Statistics
from millrace.serve.inference.status import Code, StatusError
from millrace.serve.repository.config import ModelConfig

log = logging.getLogger(__name__)
PATIENCE_S = 60.0  # an `execute` that takes longer is told of in the log
_Answer = tuple[InferResponse | None, StatusError | None, bool]
_NOTHING = "received an unexpected null response"


@dataclass(frozen=True, slots=True)
class Loadable:
    """A version as it is found in a repository, with what runs it. config: completed by the backend, too"""

    name: str
    version: int
    config: ModelConfig
    folder: Path
    labels: Mapping[str, Sequence[str]]  # of an output
    backend: ModelBackend
    max_requests: int  # that wait for answers; further ones are refused


class Model:
    def __init__(self, of: Loadable, loop: asyncio.AbstractEventLoop) -> None:
        """Its instances begin to load; `loaded` waits for them."""
        self.name, self.version, self.config, self.labels = of.name, of.version, of.config, of.labels
        self.checker = Checker(of.config, of.backend.takes_ragged)
        self.statistics = Statistics()
        self.rules = BatchRules.of(of.config)
        self.is_decoupled = bool(of.config.model_transaction_policy and of.config.model_transaction_policy.decoupled)
        self._loop, self._outbox = loop, Outbox(loop)
        self._queue = BatchQueue(self.rules)
        self._timer: asyncio.TimerHandle | None = None
        self._watch: asyncio.TimerHandle | None = None  # while instances compute
        self._max_open = of.max_requests
        self.unread_bytes = 0  # of responses that wait for their readers: `responses.py` counts them
        self._n_open = 0  # requests that were taken and not answered to the end
        self._n_busy = 0  # instances that compute
        self._is_retired = False
        batching = of.config.dynamic_batching
        # with preserve_ordering: those that were begun, in order, and what waits for those before it
        self._begun: deque[InferRequest] | None = deque() if batching and batching.preserve_ordering else None
        self._held: dict[InferRequest, list[_Answer]] = {}
        self._workers = [self._worker(of, given) for given in _instances(of)]
        self._idle = deque(self._workers)

    def _worker(self, of: Loadable, given: InstanceGiven) -> Worker:
        return Worker(given.name, lambda: of.backend.instance(given), self._outbox, self._freed)

    async def loaded(self) -> None:
        """raises StatusError, and all of its instances are closed, where one cannot be loaded"""
        found = await asyncio.gather(*(asyncio.wrap_future(w.ready) for w in self._workers), return_exceptions=True)
        failed = next((error for error in found if isinstance(error, StatusError)), None)
        if failed is not None:
            await self.retire()
            raise failed

    @property
    def n_pending(self) -> int:
        """Requests that no instance has taken."""
        return len(self._queue)

    def submit(self, request: InferRequest, receive: Receiver) -> None:
        """request: `checker` took it. receive: called in the event loop. raises StatusError: it is full, or unloaded"""
        now_ns = time.monotonic_ns()
        request.receive, request.send_by = receive, self._send
        request.received_ns = request.received_ns or now_ns
        try:
            if self._is_retired:  # while the request was read, which threads do: its instances may be gone
                what = f"Request for unknown model: '{self.name}' version {self.version} is not at ready state"
                raise StatusError(Code.UNAVAILABLE, what)
            if self._n_open >= self._max_open:  # it may never answer: it takes so much of the server, and no more
                what = f"Exceeds maximum queue size: {self._n_open} requests to model '{self.name}' wait for answers"
                raise StatusError(Code.UNAVAILABLE, request.named + what)
            self._queue.put(request, now_ns)
        except StatusError:
            self.statistics.failed(request, now_ns, "REJECTED")
            raise
        self._n_open += 1
        self._dispatch(now_ns)

    def cancel(self, request: InferRequest) -> None:
        """Nobody waits for it any more. One that no instance has taken ends at once."""
        request.cancel()
        if self._queue.leave(request):
            self._answered(request, None, StatusError(Code.CANCELLED, f"{request.named}request was cancelled"), True)

    def answers_at_once(self, n_bytes: int) -> bool:
        """Whether a request with inputs of so many bytes, submitted now, is answered before `submit` returns."""
        if self._n_open or not self._idle or self.is_decoupled or self.rules.delay_ns:
            return False
        return self._idle[0].is_quick(n_bytes)

    def infer_at_once(self, request: InferRequest) -> InferResponse:
        """As `infer`, where it `answers_at_once`. raises StatusError"""
        answers: list[tuple[InferRequest, InferResponse | None, StatusError | None, bool]] = []
        request.send_by = lambda *answer: answers.append(answer)
        request.received_ns = request.queued_ns = request.started_ns = time.monotonic_ns()
        batch = self._queue.alone(request)
        self._idle[0].compute(batch)
        done_ns = time.monotonic_ns()
        for _, response, error, final in answers:
            if error is None and response is not None and final:
                self.statistics.answered_alone(request, batch, done_ns)
                return response
            if error is not None or final:
                break
        else:
            error = StatusError(Code.INTERNAL, f"{request.named}no response from model '{self.name}'")
        self.statistics.executed(batch, done_ns)
        self.statistics.failed(request, done_ns, "BACKEND")
        raise error or StatusError(Code.INTERNAL, _NOTHING)

    async def infer(self, request: InferRequest) -> InferResponse:
        """The one response of a model that is not decoupled. raises StatusError; cancels it where it is cancelled"""
        done: asyncio.Future[InferResponse] = self._loop.create_future()

        def receive(response: InferResponse | None, error: StatusError | None, final: bool) -> None:
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            elif response is not None and final:
                done.set_result(response)
            elif final:
                done.set_exception(StatusError(Code.INTERNAL, _NOTHING))

        self.submit(request, receive)
        try:
            return await done
        except asyncio.CancelledError:
            self.cancel(request)
            raise

    async def retire(self) -> None:
        """Answer what it has taken, and unload. It is given nothing any more."""
        self._is_retired = True
        if self._timer is not None and not self._n_open:
            self._timer.cancel()
        if not self._n_open and not self._n_busy:
            self._close()
        await asyncio.gather(*(asyncio.wrap_future(w.closed) for w in self._workers))

    def abort(self) -> None:
        """End what waits; what is being computed is left behind."""
        for request in list(self._queue.drained()):
            self._answered(request, None, StatusError(Code.UNAVAILABLE, "Server is stopping"), True)

    def _close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        for worker in self._workers:
            worker.close()

    # ------------------------------------------------------------------ batches

    def _dispatch(self, now_ns: int) -> None:
        """Give idle instances what there is to compute, and be woken when that may change."""
        for request in self._queue.expired(now_ns):
            self._answered(request, None, StatusError(Code.UNAVAILABLE, "Request timeout expired"), True)
        while self._idle and (batch := self._queue.take(now_ns)) is not None:
            for request in batch.requests:
                request.started_ns, request.batch = now_ns, batch
                request.send_by = self._answered  # in this thread, if it is computed here
                if self._begun is not None:
                    self._begun.append(request)
            if self._idle[0].run_here(batch):
                self._end(self._idle[0], batch)
                continue
            for request in batch.requests:
                request.send_by = self._send
            self._n_busy += 1
            worker = self._idle.popleft()
            worker.busy_since_s = self._loop.time()
            worker.take(batch)
            if self._watch is None:
                self._watch = self._loop.call_later(PATIENCE_S, self._look)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_ns = self._queue.due_ns()
        if due_ns is not None:
            self._timer = self._loop.call_later((due_ns - now_ns) / 1e9, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._dispatch(time.monotonic_ns())

    def _look(self) -> None:
        """Once in `PATIENCE_S`, for a timer for each batch would cost each: say which instances are stuck."""
        since_s = self._loop.time() - PATIENCE_S
        for worker in self._workers:
            if worker.busy_since_s is not None and worker.busy_since_s <= since_s:
                took_s = self._loop.time() - worker.busy_since_s
                log.warning(
                    "%s version %d: %s computes one batch for %.1f s", self.name, self.version, worker.name, took_s
                )
        self._watch = self._loop.call_later(PATIENCE_S, self._look) if self._n_busy else None

    def _freed(self, worker: Worker, batch: Batch) -> None:
        """An instance is done with a batch; what it answered has come before this."""
        self._end(worker, batch)
        self._n_busy -= 1
        worker.busy_since_s = None
        self._idle.append(worker)
        self._dispatch(time.monotonic_ns())
        self._close_if_done()

    def _end(self, worker: Worker, batch: Batch) -> None:
        self._count(batch, time.monotonic_ns())
        if worker.answers_later:
            return
        for request in batch.requests:
            if not request.finished:
                failed = StatusError(Code.INTERNAL, f"{request.named}no response from model '{self.name}'")
                self._answered(request, None, failed, True)

    # ------------------------------------------------------------------ answers

    def _send(
        self, request: InferRequest, response: InferResponse | None, error: StatusError | None, final: bool
    ) -> None:
        """From any thread."""
        self._outbox.post(self._answered, request, response, error, final)

    def _answered(
        self, request: InferRequest, response: InferResponse | None, error: StatusError | None, final: bool
    ) -> None:
        if request.finished:
            return
        request.n_responses += response is not None
        if final:
            self._finished(request, error)
        if self._begun is None or not request.started_ns:
            self._deliver(request, (response, error, final))
        else:
            self._held.setdefault(request, []).append((response, error, final))
            self._release()
        if final:
            self._close_if_done()

    def _finished(self, request: InferRequest, error: StatusError | None) -> None:
        request.finished = True
        self._n_open -= 1
        now_ns = time.monotonic_ns()
        if request.batch is not None:
            self._count(request.batch, now_ns)
        if error is None:
            self.statistics.answered(request, now_ns)
            return
        reason = "CANCELED" if request.cancelled else "BACKEND" if request.started_ns else "REJECTED"
        self.statistics.failed(request, now_ns, reason)

    def _count(self, batch: Batch, now_ns: int) -> None:
        """At its first answer: whoever has one finds it in the statistics."""
        if batch.requests[0].batch is not None:
            self.statistics.executed(batch, now_ns)
            for request in batch.requests:
                request.batch = None

    def _release(self) -> None:
        """Answers whose turn it is: those of the oldest request that was begun, and once it has ended, of the next."""
        assert self._begun is not None
        while self._begun:
            request = self._begun[0]
            for answer in self._held.pop(request, ()):
                self._deliver(request, answer)
            if not request.finished:
                return
            self._begun.popleft()

    def _deliver(self, request: InferRequest, answer: _Answer) -> None:
        if request.receive is not None:
            request.receive(*answer)

    def _close_if_done(self) -> None:
        if self._is_retired and not self._n_open and not self._n_busy:
            self._close()

    def told(self) -> dict[str, Any]:
        return self.statistics.told(self.name, self.version)


def _instances(of: Loadable) -> list[InstanceGiven]:
    return [
        InstanceGiven(f"{group.name}_{i}", of.config, of.version, of.folder, group)
        for group in of.config.instance_group
        for i in range(group.count)
    ]
