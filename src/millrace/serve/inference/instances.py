"""Instances of a model in threads, and how threads speak to the event loop."""

import asyncio
import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from millrace.serve.inference.backend import Instance, InstanceGiven
from millrace.serve.inference.batching import Batch
from millrace.serve.inference.guest.runner import said
from millrace.serve.inference.status import Code, StatusError

log = logging.getLogger(__name__)
T = TypeVar("T")


class Outbox:
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


async def in_own_thread(name: str, work: Callable[[], T]) -> T:
    """A model's code, which may never return: a daemon, for asyncio's threads are few, and are waited for at the end.

    raises whatever `work` raises
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001  nothing is lost: it is raised where the result is waited for
            done.set_exception(error)

    threading.Thread(target=run, name=f"millrace-{name}", daemon=True).start()
    return await asyncio.wrap_future(done)


class Worker:
    """One instance in its thread, a daemon: a process ends whatever a model does."""

    def __init__(
        self, given: InstanceGiven, make: Callable[[], Instance], outbox: Outbox,
        freed: Callable[["Worker", Batch], None],
    ) -> None:  # fmt: skip
        """freed: called in the event loop when a batch is done with, after whatever it answered"""
        self.given, self.name, self._make, self._outbox, self._freed = given, given.name, make, outbox, freed
        self.batch: Batch | None = None  # that it computes
        self.answers_later, self._quick_bytes = False, 0
        self.busy_since_s: float | None = None  # of its event loop's clock, once it was given a batch
        self._instance: Instance | None = None
        self.ready: Future[None] = Future()  # loaded; or what loading raised
        self.closed: Future[None] = Future()
        for future in (self.ready, self.closed):  # whoever waits for one may give up; it comes all the same
            future.set_running_or_notify_cancel()
        self._batches: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"millrace-{given.name}", daemon=True).start()

    def take(self, batch: Batch) -> None:
        self._batches.put(batch)

    def run_here(self, batch: Batch) -> bool:
        """Compute it in this thread, the event loop's, where that is quicker than waking another; False: it is not."""
        held = (array.nbytes for r in batch.requests for array in r.inputs.values())
        if self._instance is None or not self.is_quick(sum(held) if self._quick_bytes else 0):
            return False
        self.compute(batch)
        return True

    def compute(self, batch: Batch) -> None:
        """In this thread, of what `is_quick`."""
        assert self._instance is not None, f"{self.name} is not loaded"
        self._answer(self._instance, batch)

    def is_quick(self, n_bytes: int) -> bool:
        """Whether it would compute inputs of so many bytes in whatever thread asks."""
        return bool(self._quick_bytes) and n_bytes <= self._quick_bytes

    def close(self) -> None:
        """After its last batch; does not wait."""
        self._batches.put(None)

    def _run(self) -> None:
        try:
            instance = self._make()
        except BaseException as error:  # noqa: BLE001  a model may raise anything; whoever loads it is told
            self.ready.set_exception(as_status(error))
            self.closed.set_result(None)
            return
        self.answers_later, self._quick_bytes = instance.answers_later, instance.quick_bytes
        self._instance = instance
        self.ready.set_result(None)
        while (batch := self._batches.get()) is not None:
            self._execute(instance, batch)
            del batch  # the next may be long in coming
        try:
            instance.close()
        except BaseException:
            log.exception("%s: finalize failed", self.name)
        self.closed.set_result(None)

    def _execute(self, instance: Instance, batch: Batch) -> None:
        self._answer(instance, batch)
        self._outbox.post(self._freed, self, batch)

    def _answer(self, instance: Instance, batch: Batch) -> None:
        try:
            instance.execute(batch.requests)
        except BaseException as error:
            failed = as_status(error)
            log.debug("%s: %s", self.name, failed, exc_info=error)
            for request in batch.requests:
                request.fail(failed)


def as_status(error: BaseException) -> StatusError:
    """What a model raised, as an answer."""
    return error if isinstance(error, StatusError) else StatusError(Code.INTERNAL, said(error))
