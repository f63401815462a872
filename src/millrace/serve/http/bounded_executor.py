"""A thread pool with a bounded queue and cancellation, for work that would block the event loop."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from millrace.errors import BusyError
from millrace.model_repository.execution.tracebacks import portable
from millrace.serve.http.admission import shutting_down

T = TypeVar("T")
ABANDONED_S = 0.5  # how long cancelled work may continue before it is stopped; a new process costs about as much
MAX_HELD_BYTES = 64 * 2**20  # of the texts that wait in one executor


class _Job:
    """One call. `work` is set to None once it is cancelled, because it may hold megabytes."""

    __slots__ = ("n_bytes", "started", "waiter", "work")

    def __init__(self, work: Callable[[], Any], n_bytes: int, waiter: "asyncio.Future[Any]") -> None:
        self.work: Callable[[], Any] | None = work
        self.n_bytes, self.waiter = n_bytes, waiter
        self.started = False


class BoundedExecutor:
    """Executor that runs calls in order, at most `max_pending` of them waiting or running.

    The threads are daemons and never joined, so the process can always end.
    """

    def __init__(self, name: str, max_pending: int, n_threads: int = 1, stop: Callable[[], None] | None = None) -> None:
        """stop: ends the work of the only thread, if a process does it"""
        assert stop is None or n_threads == 1, "otherwise it would end the work of others"
        self._name, self._max_pending, self._n_threads, self._stop = name, max_pending, n_threads, stop
        self._closed = False
        self._jobs: set[_Job] = set()  # that wait or run; of the event loop's thread
        self._held_bytes = 0
        self._threads: list[threading.Thread] = []
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running: _Job | None = None  # guarded by _lock; of the last thread to begin, so only for one thread

    async def run(self, work: Callable[[], T], n_bytes: int = 0) -> T:
        """Return the result of `work()`. Cancelling the task removes it from the queue, or has it stopped.

        n_bytes: memory that the call holds. raises BusyError, and whatever `work` raises
        """
        if self._closed:
            raise shutting_down()
        if len(self._jobs) >= self._max_pending or (self._jobs and self._held_bytes + n_bytes > MAX_HELD_BYTES):
            raise BusyError(f"{len(self._jobs)} requests are being prepared", "fewer at a time", "come back later", 1.0)
        loop = asyncio.get_running_loop()
        job = _Job(work, n_bytes, loop.create_future())
        del work  # it may hold a large body, and this frame may become part of a traceback
        self._jobs.add(job)
        self._held_bytes += n_bytes
        self._queue.put(job)
        if len(self._threads) < self._n_threads:
            name = f"millrace-{self._name}"
            self._threads.append(threading.Thread(target=self._work, args=(loop,), name=name, daemon=True))
            self._threads[-1].start()
        try:
            result: T = await job.waiter
        except asyncio.CancelledError:
            with self._lock:
                job.work, started = None, job.started
            if not started:  # otherwise it counts until the thread is done with it
                self._forget(job)
            elif self._stop is not None:
                loop.call_later(ABANDONED_S, self._end, job)
            raise
        finally:
            del job  # otherwise: exception, its traceback, this frame, the job, its waiter, the exception
        return result

    def close(self) -> None:
        """Stop running work without waiting for it; waiting and later calls raise BusyError."""
        self._closed = True
        for job in self._jobs:
            job.work = None
            if not job.waiter.done():
                job.waiter.set_exception(shutting_down())
        for _ in self._threads:
            self._queue.put(None)
        if self._stop is not None:
            self._stop()

    def _end(self, job: _Job) -> None:
        with self._lock:  # so that it is not the next one that is stopped
            if self._running is job and self._stop is not None:
                self._stop()

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        while (job := self._queue.get()) is not None:
            with self._lock:
                work, job.started, self._running = job.work, True, job
            if work is not None:
                result, error = _outcome(work)
                job.work = None
                with self._lock, contextlib.suppress(RuntimeError):  # the event loop is closed
                    self._running = None
                    loop.call_soon_threadsafe(self._done, job, result, error)
                del result, error
            del job, work  # the next may be long in coming

    def _done(self, job: _Job, result: Any, error: BaseException | None) -> None:
        self._forget(job)
        if job.waiter.done():
            return
        if error is None:
            job.waiter.set_result(result)
        else:
            job.waiter.set_exception(error)

    def _forget(self, job: _Job) -> None:
        if job in self._jobs:
            self._jobs.remove(job)
            self._held_bytes -= job.n_bytes


def _outcome(work: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return work(), None
    except BaseException as error:  # noqa: BLE001  nothing is lost: it is raised where the result is waited for
        return None, portable(error)
