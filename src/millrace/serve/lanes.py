"""Work off the event loop: a lane is a bounded queue with threads of its own, which hold up no other lane."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from millrace.errors import BusyError

T = TypeVar("T")
ABANDONED_S = 0.5  # what nobody waits for any more may go on for so long; a new process costs about as much
MAX_HELD_BYTES = 64 * 2**20  # of the texts that wait in one lane


class _Job:
    """`work` is forgotten as soon as nobody waits for it: it may hold megabytes."""

    __slots__ = ("future", "work")

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work: Callable[[], Any] | None = work
        self.future: Future[Any] = Future()


class Lane:
    """Runs calls in their order, at most `max_pending` of them waiting or running.

    The threads are daemons and nobody joins them: a process ends whatever they do.
    """

    def __init__(self, name: str, max_pending: int, n_threads: int = 1, stop: Callable[[], None] | None = None) -> None:
        """stop: ends what the lane's one thread does, where a process does it"""
        assert stop is None or n_threads == 1, "otherwise it would end the work of others"
        self._name, self._max_pending, self._n_threads, self._stop = name, max_pending, n_threads, stop
        self._n_pending = self._held_bytes = 0  # of the event loop's thread
        self._threads: list[threading.Thread] = []
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running: _Job | None = None  # guarded by _lock; of the last thread to begin, so only for one thread

    async def run(self, work: Callable[[], T], n_bytes: int = 0) -> T:
        """The result of `work()`. Whoever is cancelled takes it out of the queue, or has it stopped.

        n_bytes: that the call holds in memory. raises BusyError, and whatever `work` raises
        """
        if self._n_pending >= self._max_pending or (self._n_pending and self._held_bytes + n_bytes > MAX_HELD_BYTES):
            raise BusyError(f"{self._n_pending} requests are being prepared", "fewer at a time", "come back later", 1.0)
        loop, job = asyncio.get_running_loop(), _Job(work)

        def done() -> None:
            self._n_pending -= 1
            self._held_bytes -= n_bytes

        # counted until the thread is done with it, not until its client lost patience
        job.future.add_done_callback(lambda _: _later(loop, done))
        self._n_pending += 1
        self._held_bytes += n_bytes
        self._queue.put(job)
        if len(self._threads) < self._n_threads:
            thread = threading.Thread(target=self._work, name=f"millrace-{self._name}", daemon=True)
            self._threads.append(thread)
            thread.start()
        try:
            result: T = await asyncio.wrap_future(job.future)
        except asyncio.CancelledError:
            job.work = None
            if self._stop is not None:
                loop.call_later(ABANDONED_S, self._end, job)
            raise
        return result

    def close(self) -> None:
        """Cancel what waits and stop what runs, without waiting for it."""
        while not self._queue.empty():
            job = self._queue.get()
            if job is not None:
                job.future.cancel()
        for _ in self._threads:
            self._queue.put(None)
        if self._stop is not None:
            self._stop()

    def _end(self, job: _Job) -> None:
        with self._lock:  # so that it is not the next one that is stopped
            if self._running is job and self._stop is not None:
                self._stop()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            work = job.work
            if work is None or not job.future.set_running_or_notify_cancel():
                continue
            with self._lock:
                self._running = job
            _finish(job.future, work, self._at_rest)
            del job, work  # the next may be long in coming

    def _at_rest(self) -> None:
        with self._lock:
            self._running = None


def _finish(future: Future[Any], work: Callable[[], Any], at_rest: Callable[[], None]) -> None:
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001  nothing is lost: it is raised where the result is waited for
        at_rest()
        future.set_exception(error)
    else:
        at_rest()
        future.set_result(result)


def _later(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)
