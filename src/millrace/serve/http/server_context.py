"""What all requests of one server share: connections and who gives way, bounds, threads for large work, metrics."""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from millrace.errors import BusyError
from millrace.model_repository.execution.tracebacks import portable
from millrace.model_repository.tracing.tracer import Tracer
from millrace.runtime.service import schedule_on_loop
from millrace.serve.http.connection_limits import MAX_REFUSED, ConnectionLimits
from millrace.serve.http.errors import HttpError
from millrace.serve.ops.logs import RateLimitedLog
from millrace.serve.ops.metrics import Metrics
from millrace.serve.protocols.responses.store import ResponseStore
from millrace.serve.settings import ServerSettings

log = logging.getLogger(__name__)


class ConnectionView(Protocol):
    """A connection, as far as others are concerned."""

    since_s: float  # time.monotonic(): the beginning of what is being waited for
    n_unread: int  # bytes of replies that the client has not taken, at the last sweep
    unread_since_s: float  # when it last took some

    @property
    def is_waiting(self) -> bool:
        """No request is being answered."""

    @property
    def is_incomplete(self) -> bool:
        """It sends a body, of which a part is missing, while nothing in front of it is being answered."""

    @property
    def is_refused(self) -> bool:
        """It was told so."""

    def check(self, now_s: float) -> None:
        """Once in a while: has this waited too long?"""

    def close_gracefully(self) -> None:
        """Close; what the client has not taken so far is lost."""

    def abort(self) -> None:
        """Close at once."""


class Connections:
    """All connections of one server."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.seldom = RateLimitedLog(log)
        self._open: dict[ConnectionView, None] = {}  # in the order in which they came
        # in the order of their since_s: ordered dictionaries, for a plain one looks at all that left before its first
        self._waiting: OrderedDict[ConnectionView, None] = OrderedDict()
        self._incomplete: OrderedDict[ConnectionView, None] = OrderedDict()  # of those that do not wait
        self._refused: dict[ConnectionView, None] = {}

    def admit(self, connection: ConnectionView) -> bool:
        """Where there is no room, the connection that has waited for a request the longest is closed, as in nginx.

        Where none waits, it is the one whose request has been incomplete the longest. Constant time: a flood of
        connections takes none from those that are answered.
        """
        if len(self._open) >= self.limits.max_connections:
            waiting = next(iter(self._waiting), None) or next(iter(self._incomplete), None)
            if waiting is None:
                self.seldom.warn("all connections are in use, so that new ones get a 503 (raise `ulimit -n`)")
                if len(self._refused) >= MAX_REFUSED:
                    self._end_refused()
                self._refused[connection] = None
                return False
            self.seldom.warn("all connections are in use, so that waiting ones are closed (raise `ulimit -n`)")
            self.remove(waiting)
            waiting.close_gracefully()
        self._open[connection] = None
        self.touch(connection)
        return True

    def touch(self, connection: ConnectionView) -> None:
        """Its since_s is now: it has waited, or been incomplete, for the shortest time of all."""
        self._waiting.pop(connection, None)
        self._incomplete.pop(connection, None)
        if connection not in self._open:
            return
        if connection.is_waiting:
            self._waiting[connection] = None
        elif connection.is_incomplete:
            self._incomplete[connection] = None

    def remove(self, connection: ConnectionView) -> None:
        for group in (self._open, self._waiting, self._incomplete):
            group.pop(connection, None)
        self._refused.pop(connection, None)

    def _end_refused(self) -> None:
        """One that was told, and is only listened to so that it hears it, makes place for one that was not."""
        evicted = next((c for c in self._refused if c.is_refused), None) or next(iter(self._refused))
        self.remove(evicted)
        evicted.close_gracefully()

    def abort(self) -> None:
        """Whatever is still open, and all that is unread."""
        for connection in [*self._open, *self._refused]:
            connection.abort()

    def sweep(self) -> None:
        """End what takes too long, and the laziest readers where all of them together hold too much."""
        now_s, unread = time.monotonic(), 0
        readers: list[ConnectionView] = []
        for connection in [*self._open, *self._refused]:
            connection.check(now_s)
            if connection.n_unread:
                unread += connection.n_unread
                readers.append(connection)
        if unread <= self.limits.max_unread_bytes:
            return
        for connection in sorted(readers, key=lambda c: c.unread_since_s):
            self.seldom.warn("replies that nobody reads hold too much memory, so that their connections are closed")
            unread -= connection.n_unread
            connection.abort()
            if unread <= self.limits.max_unread_bytes:
                return


T = TypeVar("T")
ABANDONED_S = 0.5  # what nobody waits for any more may go on for so long; a new process costs about as much
MAX_HELD_BYTES = 64 * 2**20  # of the texts that wait in one lane


class _Job:
    """`work` is None when nobody waits for it any more: it may hold megabytes."""

    __slots__ = ("n_bytes", "started", "waiter", "work")

    def __init__(self, work: Callable[[], Any], n_bytes: int, waiter: "asyncio.Future[Any]") -> None:
        self.work: Callable[[], Any] | None = work
        self.n_bytes, self.waiter = n_bytes, waiter
        self.started = False


class BoundedExecutor:
    """Runs calls in their order, at most `max_pending` of them waiting or running.

    The threads are daemons and nobody joins them: a process ends whatever they do.
    """

    def __init__(self, name: str, max_pending: int, n_threads: int = 1, stop: Callable[[], None] | None = None) -> None:
        """stop: ends what the lane's one thread does, where a process does it"""
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
        """The result of `work()`. Whoever is cancelled takes it out of the queue, or has it stopped.

        n_bytes: that the call holds in memory. raises BusyError, and whatever `work` raises
        """
        if self._closed:
            raise _shutting_down()
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
        """Stop what runs, without waiting for it; whoever waits, or comes later, is told."""
        self._closed = True
        for job in self._jobs:
            job.work = None
            if not job.waiter.done():
                job.waiter.set_exception(_shutting_down())
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


def _shutting_down() -> BusyError:
    return BusyError("the server is shutting down", "a running server", "try again", 5.0)


def _outcome(work: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return work(), None
    except BaseException as error:  # noqa: BLE001  nothing is lost: it is raised where the result is waited for
        return None, portable(error)


LARGE_BODY = 64 * 1024  # bytes of JSON: half a millisecond of the event loop
LARGE = 8192  # tokens of an answer, characters of stop strings: a few milliseconds
LARGE_RESUME = 256  # tokens of answers that are resumed: a few milliseconds
LARGE_STEP = 512  # log probabilities of an answer that is held until it is complete: about a millisecond


@dataclass(slots=True)
class RequestsInFlight:
    """Requests that are being answered, of every kind."""

    n: int = 0


class Admission:
    """Requests to models: they are taken until the server drains, and those that were taken are waited for.

    From the moment that the whole request is there until its answer is handed to the connection: nothing of what is
    done for it, in whatever lane or engine, is given up before the time to drain is over.
    """

    def __init__(self) -> None:
        self._n, self.is_draining = 0, False
        self._none_left = asyncio.Event()
        self._none_left.set()

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """raises BusyError"""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> None:
        """Take one request, until `remove`. raises BusyError"""
        if self.is_draining:
            raise _shutting_down()
        self._n += 1
        self._none_left.clear()

    def leave(self) -> None:
        """It is answered."""
        self._n -= 1
        if not self._n:
            self._none_left.set()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new ones, and wait for those that are there; False: some were not answered in time."""
        self.is_draining = True
        return await schedule_on_loop(self._none_left, timeout_s)


class UnsentBytes:
    """Bytes of the log probabilities of all answers that are held until they are complete; bounded together."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.n_bytes = max_bytes, 0

    def lease(self) -> "UnsentBytesLease":
        return UnsentBytesLease(self)


class UnsentBytesLease:
    """That of one answer."""

    def __init__(self, pool: UnsentBytes) -> None:
        self._pool, self._n_bytes = pool, 0

    def add(self, n_bytes: int) -> None:
        """raises HttpError with 503 where that is too much beside others"""
        self._n_bytes += n_bytes
        self._pool.n_bytes += n_bytes
        if self._pool.n_bytes > self._pool.max_bytes and self._pool.n_bytes > self._n_bytes:
            what = "the answers that are being computed for others take all the memory for answers"
            mend = "come back later, or set stream to true"
            error = HttpError(503, "too_many_answers", what, "fewer large answers at a time", mend)
            error.headers["retry-after"] = "5"
            raise error

    def release(self) -> None:
        self._pool.n_bytes -= self._n_bytes
        self._n_bytes = 0


class ServerContext:
    """One server, whatever models it has."""

    def __init__(self, settings: ServerSettings) -> None:
        """raises ConfigError"""
        self.settings, self.load = settings, RequestsInFlight()
        self.admission = Admission()
        self.metrics = Metrics()
        self.tracer = Tracer.of(settings.trace_config)
        self.unsent = UnsentBytes(settings.max_unread_bytes)
        self.responses = ResponseStore()
        self._tasks: set[asyncio.Task[None]] = set()  # of what nobody waits for
        self._bodies = BoundedExecutor("bodies", settings.max_preparing)
        self._replies = BoundedExecutor("replies", settings.max_preparing)

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Have it done though its client is gone; it is waited for like a request. raises BusyError"""
        admitted = contextlib.ExitStack()
        try:
            admitted.enter_context(self.admission.admitted())
        except BusyError:
            work.close()
            raise
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def done(task: "asyncio.Task[None]") -> None:
            self._tasks.discard(task)
            admitted.close()

        task.add_done_callback(done)

    async def decode_off_loop(self, work: Callable[[], T], n_bytes: int) -> T:
        """`work()` on a body of so many bytes, in a thread where they are many. raises as `off_loop`"""
        return await self._bodies.run(work, n_bytes) if n_bytes > LARGE_BODY else work()

    async def off_loop(self, is_large: bool, work: Callable[[], T]) -> T:
        """`work()` for a reply, in a thread where it is large. raises BusyError, and whatever `work` raises"""
        return await self._replies.run(work) if is_large else work()

    def close(self) -> None:
        """Nobody waits for a large body or reply any more."""
        self._bodies.close()
        self._replies.close()
