"""Instances of a model in threads, and how threads speak to the event loop."""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from enum import Enum
from functools import partial
from operator import index
from typing import Any, Protocol, TypeVar

from millrace.model_repository.backends.backend import Computing, Instance, InstanceContext, InstanceLostError
from millrace.model_repository.execution.readiness_probe import ReadinessProbe
from millrace.model_repository.execution.tracebacks import portable, without_frames
from millrace.model_repository.python_backend.stub.model_runner import said
from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.model_repository.request.tensors import Array
from millrace.model_repository.scheduling.dynamic_batcher import Batch

log = logging.getLogger(__name__)
T = TypeVar("T")
_SOON_NS, _N_SOON = 1_000_000, 16  # an instance that was so quick, so often in a row, is given batches ahead
_MOST_AHEAD = 15  # batches
MOST_MEMORY_BYTES = 1 << 57  # an address has no more bits, and so many instances' still fit a message's uint64
RESTARTS_S = (
    0.05,
    0.5,
    2.0,
    8.0,
    30.0,
)  # before an instance is made anew, the first time in a row, ...


class _Job(Enum):
    REVIVE = "revive"
    CLOSE = "close"


class EventLoopMailbox:
    """What threads have to say to the event loop, in order; what comes together wakes it once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._is_woken = False

    def post(self, call: Callable[..., None], *arguments: Any) -> None:
        """From any thread."""
        self._calls.append((call, arguments))
        if not self._is_woken:  # otherwise the loop is on its way, and takes this, too
            self._is_woken = True
            with contextlib.suppress(RuntimeError):  # it is closed: nobody is left to be told
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_woken = False
        try:
            for _ in range(len(self._calls)):  # a thread that never stops must not keep the loop
                call, arguments = self._calls.popleft()
                call(*arguments)
        finally:
            if self._calls:  # more came meanwhile, or one failed, which the loop logs; none is lost
                self._loop.call_soon(self._deliver)


async def run_in_daemon_thread(name: str, work: Callable[[], T]) -> T:
    """A model's code, which may never return: a daemon, for asyncio's threads are few, and are waited for at the end.

    raises whatever `work` raises
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()
    threading.Thread(target=_settle, args=(done, work), name=f"millrace-{name}", daemon=True).start()
    waiter = asyncio.wrap_future(done)
    del done, work  # an exception that this raises must not hold what holds the exception
    try:
        return await waiter
    finally:
        del waiter


def _settle(done: Future[T], work: Callable[[], T]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:  # noqa: BLE001  nothing is lost: it is raised where the result is waited for
        done.set_exception(portable(error))


class WorkerListener(Protocol):
    """Who has workers; called in the event loop, after whatever they answered before."""

    def on_worker_idle(self, worker: "Worker", batch: Batch) -> None:
        """It is done with a batch."""

    def on_batch_returned(self, worker: "Worker", batch: Batch) -> None:
        """In place of `on_worker_idle`: its instance was gone before it was given this."""

    def on_worker_lost(self, worker: "Worker", why: str) -> None:
        """Its instance is gone, and whatever it computes ends with an error."""

    def on_readiness(self, worker: "Worker", why: str) -> None:
        """Its instance says that it is not ready, and why; "": that it is."""

    def on_worker_restarted(self, worker: "Worker") -> None:
        """It has an instance again."""

    def on_worker_abandoned(self, worker: "Worker", why: str) -> None:
        """It will never have one again."""


class Worker:
    """One instance in its thread, a daemon: a process ends whatever a model does.

    An instance that is lost is made anew, each time in a row after a longer pause; after the last of RESTARTS_S never.
    """

    def __init__(
        self, given: InstanceContext, make: Callable[[], Instance], outbox: EventLoopMailbox, owner: WorkerListener
    ) -> None:
        self.given, self.name, self._make, self._outbox, self._owner = given, given.name, make, outbox, owner
        self.batch: Batch | None = None  # that it computes
        self._ahead: deque[Batch] = deque()  # given to it behind that, in order
        self._n_soon = 0  # batches in a row that took less than _SOON_NS
        self.is_lost = self.is_dead = False  # as its owner knows; dead: for good
        self.unready = ""  # as its owner knows: why its instance says that it is not ready
        self.answers_later = False
        self.alone: Computing | None = None  # its instance's
        self.busy_since_s: float | None = None  # of its event loop's clock, once it was given a batch
        self._instance: Instance | None = None
        self._watch: ReadinessProbe | None = None
        self._lost_because = ""  # of the instance that it has
        self._n_lost = 0  # in a row, without a batch between them
        self.ready: Future[None] = Future()  # loaded; or what loading raised
        self.closed: Future[None] = Future()
        for future in (self.ready, self.closed):  # whoever waits for one may give up; it comes all the same
            future.set_running_or_notify_cancel()
        self._jobs: queue.SimpleQueue[Batch | _Job] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"millrace-{given.name}", daemon=True).start()

    # ------------------------------------------------------------------ of the event loop

    def take(self, batch: Batch, now_s: float) -> None:
        """Compute it: at once, or after those that it was given before."""
        if self.batch is None:
            self.batch, self.busy_since_s = batch, now_s
        else:
            self._ahead.append(batch)
        self._jobs.put(batch)

    def done(self, now_s: float) -> None:
        """`batch` is computed; the next one, if there is any, is being computed."""
        self.batch = self._ahead.popleft() if self._ahead else None
        self.busy_since_s = now_s if self.batch is not None else None

    def has(self, request: InferRequest) -> bool:
        """Whether it was given this one, and is not done with it."""
        return (self.batch is not None and request in self.batch.requests) or request in self.not_begun()

    def not_begun(self) -> Iterator[InferRequest]:
        """What it was given and, as far as is known here, has not begun; without those that were answered meanwhile."""
        return (request for batch in self._ahead for request in batch.requests if not request.finished)

    @property
    def takes_ahead(self) -> bool:
        """Whether it may be given one more batch while it computes: it is done soon, and waits for no other request.

        A thread that finds its next batch at hand need not be woken by the event loop for each.
        """
        if self._n_soon < _N_SOON or len(self._ahead) >= _MOST_AHEAD or self._instance is None:
            return False
        return self._instance.is_independent

    def run_inline(self, batch: Batch) -> bool:
        """Compute it in this thread, the event loop's, where that is quicker than waking another; False: it is not."""
        held = (array.nbytes for r in batch.requests for array in r.inputs.values())
        if self._instance is None or not self.is_quick(sum(held) if self.quick_bytes else 0):
            return False
        self.compute(batch)
        return True

    @property
    def quick_bytes(self) -> int:
        """Its instance's, which may find out while it computes."""
        return self._instance.quick_bytes if self._instance is not None else 0

    def took(self, inputs: Mapping[str, Array], took_ns: int) -> None:
        """Its instance computed them as `alone`."""
        if self._instance is not None:
            self._instance.took(sum(array.nbytes for array in inputs.values()), took_ns)

    def compute(self, batch: Batch) -> None:
        """In this thread, of what `is_quick`."""
        assert self._instance is not None, f"{self.name} is not loaded"
        self._answer(self._instance, batch)

    def is_quick(self, n_bytes: int) -> bool:
        """Whether it would compute inputs of so many bytes in whatever thread asks."""
        return bool(self.quick_bytes) and n_bytes <= self.quick_bytes

    def cancelled(self, request: InferRequest) -> None:
        if self._instance is not None:
            self._instance.cancelled(request)

    def memory_bytes(self) -> int | None:
        """Of its instance; None: it has none, or that cannot tell. raises what the instance raises, and ValueError"""
        found = self._instance.memory_bytes() if self._instance is not None and not self.is_lost else None
        if found is None:
            return None
        if not 0 <= index(found) < MOST_MEMORY_BYTES:
            raise ValueError(f"{found} is no number of bytes that a process can hold")
        return index(found)

    def revive(self) -> None:
        """Its instance is lost, and computes nothing more."""
        self._jobs.put(_Job.REVIVE)

    def close(self) -> None:
        """After its last batch; does not wait."""
        self._jobs.put(_Job.CLOSE)

    # ------------------------------------------------------------------ of its thread

    def _run(self) -> None:
        try:
            instance: Instance | None = self._made()
        except BaseException as error:  # noqa: BLE001  a model may raise anything; whoever loads it is told
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
            instance = self._made_again() if is_lost else None
        self.closed.set_result(None)

    def _made(self) -> Instance:
        """raises whatever the model raises"""
        instance = self._make()
        self._lost_because = ""
        self.answers_later = instance.answers_later
        self.alone = instance.alone()
        self._instance = instance
        instance.when_lost(self._is_lost)
        asks = instance.says_ready()
        if asks is not None:
            self._watch = ReadinessProbe(self.name, asks, partial(self._outbox.post, self._owner.on_readiness, self))
            self._watch.wait()
        return instance

    def _serve(self, instance: Instance) -> bool:
        """Until it is closed, or (True) lost."""
        while isinstance(job := self._jobs.get(), Batch):
            self._begin(instance, job)
            del job  # the next may be long in coming
        return job is _Job.REVIVE

    def _begin(self, instance: Instance, batch: Batch) -> None:
        began_ns = time.monotonic_ns()
        for request in batch.requests:
            request.started_ns = began_ns
        try:
            if all(request.finished for request in batch.requests):  # while others were in front of it
                self._is_done(batch, None)
                return
            instance.begin(batch.given, partial(self._is_done, batch))
            self._n_soon = self._n_soon + 1 if time.monotonic_ns() - began_ns < _SOON_NS else 0
        except InstanceLostError:
            self._outbox.post(self._owner.on_batch_returned, self, batch)
        except BaseException as error:
            failed = to_status_error(error)
            log.debug("%s: %s", self.name, failed, exc_info=error)
            self._is_done(batch, failed)

    def _is_done(self, batch: Batch, failed: StatusError | None) -> None:
        """From any thread. failed: the answer of those that have none"""
        if failed is not None:
            _fail(batch, failed)
        if not self._lost_because:
            self._n_lost = 0
        self._outbox.post(self._owner.on_worker_idle, self, batch)

    def _is_lost(self, why: str) -> None:
        """From any thread."""
        self._lost_because = why
        self._outbox.post(self._owner.on_worker_lost, self, why)

    def _made_again(self) -> Instance | None:
        """None: it was closed meanwhile, perhaps long after it was given up."""
        why = self._lost_because
        while self._n_lost < len(RESTARTS_S):
            pause_s = RESTARTS_S[self._n_lost]
            self._n_lost += 1
            try:
                job = self._jobs.get(timeout=pause_s)
                assert job is _Job.CLOSE, "nothing is given to what is lost"
                return None
            except queue.Empty:
                pass
            try:
                instance = self._made()
            except BaseException as error:  # noqa: BLE001  as where it was first made
                why = str(to_status_error(error))
                log.warning("%s: could not be started again: %s", self.name, why)
            else:
                self._outbox.post(self._owner.on_worker_restarted, self)
                return instance
        self._outbox.post(self._owner.on_worker_abandoned, self, why)
        self._jobs.get()
        return None

    def _answer(self, instance: Instance, batch: Batch) -> None:
        try:
            instance.execute(batch.given)
        except BaseException as error:
            failed = to_status_error(error)
            log.debug("%s: %s", self.name, failed, exc_info=error)
            _fail(batch, failed)


def _fail(batch: Batch, failed: StatusError) -> None:
    """Answer every request of the batch with an exception of its own: each is raised where its client waits."""
    without_frames(failed)
    for request in batch.given:
        request.fail(StatusError(failed.code, failed.message))


def to_status_error(error: BaseException) -> StatusError:
    """What a model raised, as an answer."""
    return error if isinstance(error, StatusError) else StatusError(Code.INTERNAL, said(error))
