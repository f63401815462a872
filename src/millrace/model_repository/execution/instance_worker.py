"""Worker threads that each run one model instance, and the mailbox by which they reach the event loop."""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from enum import Enum
from functools import partial
from operator import index
from typing import Any, Protocol, TypeVar

from millrace.model_repository.backends.backend import Instance, InstanceContext, InstanceLostError
from millrace.model_repository.execution.readiness_probe import ReadinessProbe
from millrace.model_repository.execution.tracebacks import portable, without_frames
from millrace.model_repository.python_backend.stub.model_runner import error_text
from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.model_repository.scheduling.dynamic_batcher import Batch

log = logging.getLogger(__name__)
T = TypeVar("T")
_SOON_NS, _N_SOON = 1_000_000, 16  # after this many consecutive quick batches an instance gets batches ahead
_MAX_AHEAD = 15  # batches
MAX_MEMORY_BYTES = 1 << 57  # address space limit; sums over instances still fit a uint64
RESTARTS_S = (
    0.05,
    0.5,
    2.0,
    8.0,
    30.0,
)  # pause before each consecutive restart of an instance


class _WorkerCommand(Enum):
    REVIVE = "revive"
    CLOSE = "close"


class EventLoopMailbox:
    """Ordered calls from threads to the event loop; calls that arrive together wake it once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._is_woken = False

    def post(self, call: Callable[..., None], *arguments: Any) -> None:
        """Queue a call for the event loop; callable from any thread."""
        self._calls.append((call, arguments))
        if not self._is_woken:  # otherwise a pending wake-up takes this call, too
            self._is_woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_woken = False
        try:
            for _ in range(len(self._calls)):  # bounded, so that a busy thread cannot block the loop
                call, arguments = self._calls.popleft()
                call(*arguments)
        finally:
            if self._calls:  # more arrived, or a call failed, which the loop logs
                self._loop.call_soon(self._deliver)


async def run_in_daemon_thread(name: str, work: Callable[[], T]) -> T:
    """Run model code, which may never return, in a daemon thread: asyncio's threads are few and joined at exit.

    raises whatever `work` raises
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()
    threading.Thread(target=_settle, args=(done, work), name=f"millrace-{name}", daemon=True).start()
    waiter = asyncio.wrap_future(done)
    del done, work  # the raised exception must not form a reference cycle
    try:
        return await waiter
    finally:
        del waiter


def _settle(done: Future[T], work: Callable[[], T]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:  # noqa: BLE001  re-raised where the result is awaited
        done.set_exception(portable(error))


class WorkerListener(Protocol):
    """Owner of workers. Called in the event loop, after the responses that a worker sent before."""

    def on_worker_idle(self, worker: "InstanceWorker", batch: Batch) -> None:
        """Handle a finished batch."""

    def on_batch_returned(self, worker: "InstanceWorker", batch: Batch) -> None:
        """Handle a batch that the instance never received, because it was lost before."""

    def on_worker_lost(self, worker: "InstanceWorker", reason: str) -> None:
        """Handle the loss of the instance; its running batch ends with an error."""

    def on_readiness(self, worker: "InstanceWorker", reason: str) -> None:
        """Handle a readiness report of the instance; "" means ready."""

    def on_worker_restarted(self, worker: "InstanceWorker") -> None:
        """Handle a successful restart of the instance."""

    def on_worker_abandoned(self, worker: "InstanceWorker", reason: str) -> None:
        """Handle the final failure to restart the instance."""


class InstanceWorker:
    """One instance in a daemon thread, so that the process can exit whatever a model does.

    A lost instance is restarted after pauses that grow with each consecutive loss; after RESTARTS_S it is abandoned.
    """

    def __init__(
        self,
        context: InstanceContext,
        make: Callable[[], Instance],
        mailbox: EventLoopMailbox,
        listener: WorkerListener,
    ) -> None:
        self.context, self.name, self._make, self._mailbox, self._listener = (
            context,
            context.name,
            make,
            mailbox,
            listener,
        )
        self.batch: Batch | None = None  # in execution
        self._ahead: deque[Batch] = deque()  # queued behind `batch`, in order
        self._n_soon = 0  # consecutive batches that took less than _SOON_NS
        self.is_lost = self.is_abandoned = False  # set by the listener; dead: abandoned
        self.unready = ""  # set by the listener: the reported reason for not being ready
        self.responds_async = False
        self.busy_since_s: float | None = None  # start of `batch` by the event loop's clock
        self._instance: Instance | None = None
        self._watch: ReadinessProbe | None = None
        self._lost_reason = ""  # of the current instance
        self._n_lost = 0  # consecutive losses without a finished batch
        self.ready: Future[None] = Future()  # resolves once loaded, or raises what loading raised
        self.closed: Future[None] = Future()
        for future in (self.ready, self.closed):  # a waiter that is cancelled must not cancel these
            future.set_running_or_notify_cancel()
        self._jobs: queue.SimpleQueue[Batch | _WorkerCommand] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"millrace-{context.name}", daemon=True).start()

    # ------------------------------------------------------------------ of the event loop

    def take(self, batch: Batch, now_s: float) -> None:
        """Queue a batch for execution after those taken before."""
        if self.batch is None:
            self.batch, self.busy_since_s = batch, now_s
        else:
            self._ahead.append(batch)
        self._jobs.put(batch)

    def done(self, now_s: float) -> None:
        """Advance to the next queued batch after `batch` has finished."""
        self.batch = self._ahead.popleft() if self._ahead else None
        self.busy_since_s = now_s if self.batch is not None else None

    def not_begun(self) -> Iterator[InferRequest]:
        """Return the queued requests that have not started, as far as known, and are not finished."""
        return (request for batch in self._ahead for request in batch.requests if not request.finished)

    @property
    def takes_ahead(self) -> bool:
        """Whether it accepts another batch while computing: it is quick, and waits for no other request.

        A thread that finds its next batch queued need not be woken by the event loop for each batch.
        """
        if self._n_soon < _N_SOON or len(self._ahead) >= _MAX_AHEAD or self._instance is None:
            return False
        return self._instance.is_independent

    @property
    def max_inline_bytes(self) -> int:
        """The instance's `max_inline_bytes`, which may change as it computes."""
        return self._instance.max_inline_bytes if self._instance is not None else 0

    def runs_inline(self, requests: Sequence[InferRequest]) -> bool:
        """Return whether computing in the event loop's thread is quicker than waking the instance's."""
        max_bytes = self.max_inline_bytes
        return max_bytes > 0 and sum([array.nbytes for r in requests for array in r.inputs.values()]) <= max_bytes

    def run_inline(self, batch: Batch) -> None:
        """Compute a batch in the event loop's thread, if `runs_inline`."""
        assert self._instance is not None, f"{self.name} is not loaded"
        self._answer(self._instance, batch)

    def on_cancel(self, request: InferRequest) -> None:
        if self._instance is not None:
            self._instance.on_cancel(request)

    def memory_bytes(self) -> int | None:
        """Return the instance's memory; None if unknown. raises what the instance raises, and ValueError"""
        n_bytes = self._instance.memory_bytes() if self._instance is not None and not self.is_lost else None
        if n_bytes is None:
            return None
        if not 0 <= index(n_bytes) < MAX_MEMORY_BYTES:
            raise ValueError(f"{n_bytes} is no number of bytes that a process can hold")
        return index(n_bytes)

    def revive(self) -> None:
        """Restart the instance after it was lost."""
        self._jobs.put(_WorkerCommand.REVIVE)

    def close(self) -> None:
        """Close after the last queued batch, without waiting."""
        self._jobs.put(_WorkerCommand.CLOSE)

    # ------------------------------------------------------------------ of its thread

    def _run(self) -> None:
        try:
            instance: Instance | None = self._create_instance()
        except BaseException as error:  # noqa: BLE001  a model may raise anything; it becomes the load error
            self.ready.set_exception(without_frames(to_status_error(error)))
            self.closed.set_result(None)
            return
        self.ready.set_result(None)
        while instance is not None:
            is_lost = self._serve(instance)
            self._instance = None
            if self._watch is not None:
                self._watch.stop()
            try:
                instance.close()
            except BaseException:
                log.exception("%s: finalize failed", self.name)
            instance = self._recreate_instance() if is_lost else None
        self.closed.set_result(None)

    def _create_instance(self) -> Instance:
        """Create and register the instance. raises whatever the model raises"""
        instance = self._make()
        self._lost_reason = ""
        self.responds_async = instance.responds_async
        self._instance = instance
        instance.on_lost(self._report_lost)
        asks = instance.readiness_check()
        if asks is not None:
            self._watch = ReadinessProbe(
                self.name, asks, partial(self._mailbox.post, self._listener.on_readiness, self)
            )
            self._watch.wait()
        return instance

    def _serve(self, instance: Instance) -> bool:
        """Compute batches until closed, or until the instance is lost (True)."""
        while isinstance(job := self._jobs.get(), Batch):
            self._begin(instance, job)
            del job  # do not keep it alive while waiting for the next
        return job is _WorkerCommand.REVIVE

    def _begin(self, instance: Instance, batch: Batch) -> None:
        began_ns = time.monotonic_ns()
        for request in batch.requests:
            request.started_ns = began_ns
        try:
            if all(request.finished for request in batch.requests):  # while it was queued
                self._report_done(batch, None)
                return
            instance.begin(batch.executed_requests, partial(self._report_done, batch))
            self._n_soon = self._n_soon + 1 if time.monotonic_ns() - began_ns < _SOON_NS else 0
        except InstanceLostError:
            self._mailbox.post(self._listener.on_batch_returned, self, batch)
        except BaseException as error:
            failed = to_status_error(error)
            log.debug("%s: %s", self.name, failed, exc_info=error)
            self._report_done(batch, failed)

    def _report_done(self, batch: Batch, failed: StatusError | None) -> None:
        """Report a finished batch, from any thread. failed: the error for unanswered requests"""
        if failed is not None:
            _fail(batch, failed)
        if not self._lost_reason:
            self._n_lost = 0
        self._mailbox.post(self._listener.on_worker_idle, self, batch)

    def _report_lost(self, reason: str) -> None:
        """Report the loss of the instance, from any thread."""
        self._lost_reason = reason
        self._mailbox.post(self._listener.on_worker_lost, self, reason)

    def _recreate_instance(self) -> Instance | None:
        """Restart the instance with growing pauses; None if the worker is closed or abandoned."""
        reason = self._lost_reason
        while self._n_lost < len(RESTARTS_S):
            pause_s = RESTARTS_S[self._n_lost]
            self._n_lost += 1
            try:
                job = self._jobs.get(timeout=pause_s)
                assert job is _WorkerCommand.CLOSE, "nothing is given to what is lost"
                return None
            except queue.Empty:
                pass
            try:
                instance = self._create_instance()
            except BaseException as error:  # noqa: BLE001  as at the first load
                reason = str(to_status_error(error))
                log.warning("%s: could not be started again: %s", self.name, reason)
            else:
                self._mailbox.post(self._listener.on_worker_restarted, self)
                return instance
        self._mailbox.post(self._listener.on_worker_abandoned, self, reason)
        self._jobs.get()
        return None

    def _answer(self, instance: Instance, batch: Batch) -> None:
        try:
            instance.execute(batch.executed_requests)
        except BaseException as error:
            failed = to_status_error(error)
            log.debug("%s: %s", self.name, failed, exc_info=error)
            _fail(batch, failed)


def _fail(batch: Batch, failed: StatusError) -> None:
    """Fail every request of a batch, each with its own exception, because each is raised separately."""
    without_frames(failed)
    for request in batch.executed_requests:
        request.fail(StatusError(failed.code, failed.message))


def to_status_error(error: BaseException) -> StatusError:
    """Convert what a model raised to a StatusError."""
    return error if isinstance(error, StatusError) else StatusError(Code.INTERNAL, error_text(error))
