"""A model computed by a backend: its request queue, batches and instances.

Everything here runs in the event loop; each instance has a thread of its own (`instance_worker.py`).
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from millrace.model_repository.backends.backend import InstanceContext, ModelBackend
from millrace.model_repository.execution.instance_worker import EventLoopMailbox, InstanceWorker
from millrace.model_repository.execution.model_warmup import warm_up_instance
from millrace.model_repository.models.bls import BlsExecutor
from millrace.model_repository.models.model_version import NO_RESPONSE, Model, ModelVersionSource
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.model_repository.scheduling.dynamic_batcher import Batch, BatchQueue, BatchRules
from millrace.model_repository.scheduling.iterative_sequences import Slots

log = logging.getLogger(__name__)
STUCK_WARNING_S = 60.0  # a longer `execute` is logged as stuck
_Response = tuple[InferResponse | None, StatusError | None, bool]


class MemoryUsage:
    """The memory usage of one model. The first failure of an instance to report is logged, later ones are not."""

    def __init__(self, name: str, version: int, workers: Sequence[InstanceWorker]) -> None:
        self._name, self._version, self._workers = name, version, workers
        self._has_failed = False

    def report(self) -> list[dict[str, Any]]:
        """Return Triton's `memory_usage`; empty if an instance fails to report, because a partial sum would mislead."""
        try:
            sizes = [n_bytes for worker in self._workers if (n_bytes := worker.memory_bytes()) is not None]
        except BaseException as error:  # a backend may raise anything; other models are still reported
            if not self._has_failed:
                log.warning("%s version %d: its memory usage is unknown", self._name, self._version, exc_info=error)
            self._has_failed = True
            return []
        return [{"type": "CPU", "id": 0, "byte_size": sum(sizes)}] if sizes else []


class BackendModel(Model):
    _computes_here = True  # quick batches run in the event loop's thread

    def __init__(
        self, source: ModelVersionSource, backend: ModelBackend, bls: BlsExecutor, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Start loading the instances; `loaded` waits for them."""
        super().__init__(source, loop, ragged=backend.takes_ragged)
        self.rules = BatchRules.from_config(source.config)
        self._mailbox = EventLoopMailbox(loop)
        self._queue = BatchQueue(self.rules)
        self._slots = Slots.from_config(source.config)
        self._timer: asyncio.TimerHandle | None = None
        self._watch: asyncio.TimerHandle | None = None  # set while instances compute
        self._n_busy = 0  # instances that compute
        self._broken = ""  # reason, once every instance is abandoned
        batching = source.config.dynamic_batching
        # With preserve_ordering: requests in dispatch order, and responses that wait for earlier requests.
        self._dispatched: deque[InferRequest] | None = deque() if batching and batching.preserve_ordering else None
        self._early_responses: dict[InferRequest, list[_Response]] = {}
        self._limiter = source.common.limiter
        if self._limiter is not None:
            self._limiter.check(source.config.instance_group)
        self._workers = [self._worker(backend, context) for context in InstanceContext.for_groups(source, bls)]
        if self._limiter is not None:
            for worker in self._workers:
                self._limiter.add(worker, worker.context.group, self)
        self._idle = deque(self._workers)
        self._memory = MemoryUsage(self.name, self.version, self._workers)
        self._never_runs_inline = bool(
            not self._computes_here or self.is_decoupled or self._reshaped or self.rules.delay_ns
            or self._slots is not None or self.cache is not None or self._limiter is not None
        )  # fmt: skip
        # Batches are queued ahead only if that cannot change which requests run together, or on which instance.
        self._gives_ahead = self._computes_here and not (batching or self._never_runs_inline or self._workers[1:])

    def _worker(self, backend: ModelBackend, context: InstanceContext) -> InstanceWorker:
        create = lambda: warm_up_instance(backend.instance(context), context)  # noqa: E731
        return InstanceWorker(context, create, self._mailbox, self)

    async def loaded(self) -> None:
        """Wait until all instances are loaded. raises StatusError, after closing all of them, if one fails to load"""
        outcomes = await asyncio.gather(*(asyncio.wrap_future(w.ready) for w in self._workers), return_exceptions=True)
        failed = next((error for error in outcomes if isinstance(error, StatusError)), None)
        if failed is not None:
            await self.retire()
            raise failed

    @property
    def n_pending(self) -> int:
        """Number of requests that no instance computes yet."""
        n_given = sum(1 for worker in self._workers for _ in worker.not_begun())
        return len(self._queue) + n_given + (len(self._slots) if self._slots is not None else 0)

    def _enqueue(self, request: InferRequest, now_ns: int) -> None:
        request.send_by = self._send
        if self._broken:
            raise StatusError(Code.UNAVAILABLE, request.error_prefix + self._broken)
        if self._slots is not None:
            request.queued_ns, request.reschedule_by = now_ns, self._post_reschedule
            if not self._slots.acquire(request):
                return
        self._queue.put(request, now_ns)

    def _start(self, request: InferRequest, now_ns: int) -> None:
        self._dispatch(now_ns)

    @property
    def _can_infer_inline(self) -> bool:
        if self._n_open or self._never_runs_inline or self._is_over or self._tracer.is_on or not self._idle:
            return False
        return self._idle[0].max_inline_bytes > 0

    def _infer_inline(self, request: InferRequest) -> InferResponse | None:
        """As `Model._infer_inline`, without a queue; the statistics are those of a batch of one."""
        if not self._can_infer_inline or not (worker := self._idle[0]).runs_inline((request,)):
            return None
        batch, responses = self._queue.single_batch(request), list[_Response]()
        request.send_by = lambda _, *response: responses.append(response)
        request.queued_ns = request.started_ns = now_ns = time.monotonic_ns()
        request.received_ns = request.received_ns or now_ns
        worker.run_inline(batch)
        request.finished, done_ns = True, time.monotonic_ns()
        self.statistics.record_batch(batch, done_ns)
        if request.timings is not None:
            self._end_trace(request, done_ns)
        for response, error, is_final in responses:
            if error is not None:
                self.statistics.record_failure(request, done_ns, "BACKEND")
                raise error
            if is_final:
                self.statistics.record_success(request, done_ns)
                if response is None:
                    raise StatusError(Code.INTERNAL, NO_RESPONSE)
                return response
        self.statistics.record_failure(request, done_ns, "BACKEND")
        raise StatusError(Code.INTERNAL, f"{request.error_prefix}no response from model '{self.name}'")

    def cancel(self, request: InferRequest) -> None:
        """Cancel a request. A request that no instance computes ends immediately."""
        request.cancel()
        is_waiting = self._queue.remove(request) or (self._slots is not None and self._slots.waits(request))
        if is_waiting or any(request in worker.not_begun() for worker in self._workers):
            self._end_all([request], request.cancelled_error())
            return
        for worker in self._workers:
            worker.on_cancel(request)

    async def retire(self) -> None:
        self._is_retired = True
        if self._timer is not None and not self._n_open:
            self._timer.cancel()
        self._close_if_done()
        await asyncio.gather(*(asyncio.wrap_future(w.closed) for w in self._workers))
        if self.cache is not None:
            self.cache.remove_model(self.cache_identity)
        if self._limiter is not None:
            self._limiter.remove(self._workers)
        self._unloaded()

    def abort(self) -> None:
        self._end_all(self._waiting(), StatusError(Code.UNAVAILABLE, "Server is stopping"))

    def _waiting(self) -> list[InferRequest]:
        """Remove and return all requests that no instance computes."""
        not_begun = [request for worker in self._workers for request in worker.not_begun()]
        return [*(self._slots.waiting() if self._slots is not None else ()), *self._queue.drain(), *not_begun]

    def _end_all(self, requests: Sequence[InferRequest], error: StatusError) -> None:
        """End requests that no instance computes with an error."""
        for request in requests:
            request.batch = None  # so that the batch is not counted
            self._on_response(request, None, error, True)

    def _close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        for worker in self._workers:
            worker.close()

    # ------------------------------------------------------------------ batches

    def _dispatch(self, now_ns: int) -> None:
        """Hand queued requests to idle instances, and set a timer for the next time that may change."""
        self._refuse_late(now_ns)
        while (next_batch := self._next(now_ns)) is not None:
            worker, batch = next_batch
            for request in batch.requests:
                request.started_ns, request.batch = now_ns, batch
                if request.trace is not None:
                    request.trace.batch = batch
                request.send_by = self._on_response  # called in this thread if the batch runs inline
                if self._dispatched is not None:
                    self._dispatched.append(request)
            if self._limiter is not None:
                self._limiter.begin(worker)
            if self._computes_here and worker.batch is None and worker.runs_inline(batch.requests):
                worker.run_inline(batch)
                self._end(worker, batch)
                if self._limiter is not None:
                    self._limiter.end(worker)
                continue
            for request in batch.requests:
                request.send_by = self._send
            if worker.batch is None:
                self._n_busy += 1
                self._idle.remove(worker)
            worker.take(batch, self._loop.time())
            if self._watch is None:
                self._watch = self._loop.call_later(STUCK_WARNING_S, self._log_stuck_instances)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_ns = self._due_ns()
        if due_ns is not None:
            self._timer = self._loop.call_later((due_ns - now_ns) / 1e9, self._wake)

    def _refuse_late(self, now_ns: int) -> None:
        """Reject requests whose queue timeout has expired."""
        for request in self._queue.take_expired(now_ns):
            self._on_response(request, None, StatusError(Code.UNAVAILABLE, "Request timeout expired"), True)

    def _next(self, now_ns: int) -> tuple[InstanceWorker, Batch] | None:
        """Return the next batch and the instance for it: an idle one, or one that accepts batches ahead."""
        workers: Sequence[InstanceWorker] = self._idle
        if self._limiter is not None:
            workers = self._limiter.select_runnable(self._idle, len(self._queue) > 0)
        if not workers and self._gives_ahead and self._workers[0].takes_ahead:
            workers = self._workers
        batch = self._queue.take(now_ns) if workers else None
        if batch is not None:
            return workers[0], batch
        if self._limiter is not None:
            self._limiter.clear_waiting(workers)
        return None

    def on_resources_available(self) -> None:
        """Dispatch again: an instance that waited for resources may compute."""
        self._dispatch(time.monotonic_ns())

    def _due_ns(self) -> int | None:
        """Return when to dispatch again if nothing else happens."""
        return self._queue.due_ns()

    def _wake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._dispatch(time.monotonic_ns())

    def _log_stuck_instances(self) -> None:
        """Log stuck instances. Runs once per `STUCK_WARNING_S`, because a timer per batch would slow each down."""
        message, now_s = "%s version %d: %s computes one batch for %.1f s", self._loop.time()
        for worker in self._workers:
            if worker.busy_since_s is not None and worker.busy_since_s <= now_s - STUCK_WARNING_S:
                log.warning(message, self.name, self.version, worker.name, now_s - worker.busy_since_s)
        self._watch = self._loop.call_later(STUCK_WARNING_S, self._log_stuck_instances) if self._n_busy else None

    def on_worker_idle(self, worker: InstanceWorker, batch: Batch) -> None:
        """Handle a finished batch; its responses have already been delivered."""
        self._end(worker, batch)
        self._free(worker)

    def _free(self, worker: InstanceWorker) -> None:
        worker.done(self._loop.time())
        if worker.batch is not None:
            self._dispatch(time.monotonic_ns())
            return
        self._n_busy -= 1
        if self._limiter is not None:
            self._limiter.end(worker)
        if worker.is_lost:
            worker.revive()
        else:
            self._idle.append(worker)
        self._dispatch(time.monotonic_ns())
        self._close_if_done()

    def on_batch_returned(self, worker: InstanceWorker, batch: Batch) -> None:
        for request in batch.requests:
            if self._dispatched is not None:
                self._dispatched.remove(request)
            request.started_ns, request.batch = 0, None
        self._queue.put_back([request for request in batch.requests if not request.cancelled])
        for request in batch.requests:
            if request.cancelled:
                self._on_response(request, None, request.cancelled_error(), True)
        self._free(worker)

    def on_worker_lost(self, worker: InstanceWorker, reason: str) -> None:
        log.error("%s version %d: %s was lost and is being restarted: %s", self.name, self.version, worker.name, reason)
        worker.is_lost, worker.unready = True, ""
        if worker in self._idle:
            self._idle.remove(worker)
            worker.revive()

    def on_readiness(self, worker: InstanceWorker, reason: str) -> None:
        log.info("%s version %d: %s: %s", self.name, self.version, worker.name, reason or "it is ready again")
        worker.unready = reason

    def on_worker_restarted(self, worker: InstanceWorker) -> None:
        log.info("%s version %d: %s is available again", self.name, self.version, worker.name)
        worker.is_lost, worker.unready = False, ""
        self._idle.append(worker)
        self._dispatch(time.monotonic_ns())

    def on_worker_abandoned(self, worker: InstanceWorker, reason: str) -> None:
        """Mark a worker dead. If none is left, waiting requests fail and new ones are rejected."""
        worker.is_abandoned = True
        log.error("%s version %d: %s is given up: %s", self.name, self.version, worker.name, reason)
        if all(worker.is_abandoned for worker in self._workers):
            self._broken = f"all instances of model '{self.name}' ended again and again: {reason}"
            self._end_all(self._waiting(), StatusError(Code.UNAVAILABLE, self._broken))

    def statistics_dict(self) -> dict[str, Any]:
        return super().statistics_dict() | {"memory_usage": self._memory.report()}

    @property
    def is_ready(self) -> bool:
        return not all(worker.is_lost or worker.unready for worker in self._workers)

    @property
    def unready_reason(self) -> str:
        lost = [worker.name for worker in self._workers if worker.is_lost]
        unready = [f"{worker.name}: {worker.unready}" for worker in self._workers if worker.unready]
        return self._broken or "; ".join([f"{', '.join(lost)} is being restarted"] * bool(lost) + unready)

    def _end(self, worker: InstanceWorker, batch: Batch) -> None:
        self._count(batch, time.monotonic_ns())
        if worker.responds_async:
            return
        for request in batch.requests:
            if not request.finished:
                failed = StatusError(Code.INTERNAL, f"{request.error_prefix}no response from model '{self.name}'")
                self._on_response(request, None, failed, True)

    def _post_reschedule(self, request: InferRequest) -> None:
        """Post to the event loop; callable from any thread."""
        self._mailbox.post(self._reschedule, request)

    def _reschedule(self, request: InferRequest) -> None:
        """Queue a request again at its model's wish; the instance ends the batch after this call."""
        if request.finished:
            return
        now_ns = time.monotonic_ns()
        if request.batch is not None:
            self._count(request.batch, now_ns)
        if request.cancelled:
            self._on_response(request, None, request.cancelled_error(), True)
            return
        request.flags = request.started_ns = request.computing_ns = request.computed_ns = 0
        self._queue.put(request, now_ns)

    def _send(
        self, request: InferRequest, response: InferResponse | None, error: StatusError | None, final: bool
    ) -> None:
        """Post to the event loop; callable from any thread."""
        self._mailbox.post(self._on_response, request, response, error, final)

    def _on_response(
        self, request: InferRequest, response: InferResponse | None, error: StatusError | None, final: bool
    ) -> None:
        if request.finished:
            return
        if response is not None:
            response, error = self._prepare_response(request, response, error)
        request.has_failed = request.has_failed or error is not None
        if final:
            now_ns = time.monotonic_ns()
            if request.batch is not None:
                self._count(request.batch, now_ns)
            self._finished(request, error, now_ns)
            self._pass_on_slot(request, now_ns)
        if self._dispatched is None or not request.started_ns:
            self._deliver(request, (response, error, final))
        else:
            self._early_responses.setdefault(request, []).append((response, error, final))
            self._release()
        if final:
            self._close_if_done()

    def _pass_on_slot(self, request: InferRequest, now_ns: int) -> None:
        following = self._slots.release(request) if self._slots is not None else None
        if following is not None:
            self._queue.put(following, now_ns)
            self._loop.call_soon(self._wake)  # not inside the call that ended this request

    def _count(self, batch: Batch, now_ns: int) -> None:
        """Count a batch at its first response, so that a client with a response finds it in the statistics."""
        if batch.requests[0].batch is not None:
            self.statistics.record_batch(batch, now_ns)
            for request in batch.requests:
                request.batch = None

    def _release(self) -> None:
        """Deliver responses in dispatch order: those of the oldest request and, once it has ended, of the next."""
        assert self._dispatched is not None
        while self._dispatched:
            request = self._dispatched[0]
            for answer in self._early_responses.pop(request, ()):
                self._deliver(request, answer)
            if not request.finished:
                return
            self._dispatched.popleft()

    def _deliver(self, request: InferRequest, answer: _Response) -> None:
        if request.receive is not None:
            request.receive(*answer)

    def _close_if_done(self) -> None:
        if self._is_over and not self._n_busy:
            self._close()
