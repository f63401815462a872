"""The asyncio interface of the engine loop: submit a request, iterate over its deltas, cancel it, close.

Everything here runs in one asyncio thread; the engine loop runs in its own. Each step makes at most one
`call_soon_threadsafe`, however many requests it served.
"""

import asyncio
import contextlib
import logging
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

from millrace.engine.executor import ExecutorLimits
from millrace.errors import BusyError, ConfigError, MillraceError
from millrace.runtime.loop import EngineLoop
from millrace.runtime.loop_stats import LoopStats
from millrace.runtime.request.prompt_embeds import Prompt
from millrace.runtime.request.queue_options import QueueOptions
from millrace.runtime.request.request import DEFAULT_OPTIONS, Request, RequestOptions, StopTables
from millrace.runtime.request.sampling_params import Delta, FinishReason, SamplingParams
from millrace.runtime.settings import MAX_QUEUED
from millrace.runtime.structured_output.grammar import GrammarCompiler, Matcher

RETRY_LOW_S, RETRY_HIGH_S = 1.0, 60.0
MIN_SEQUENCES = 4  # of the moving average of waiting times
MAX_TOKENS_PER_READ = 512  # so that a reader that was slow does not delay the others when it resumes
DELIVERY_WAIT_S = 0.001  # how long the engine waits at most for the event loop to deliver a step's deltas
STOP_S = 5.0  # default time for the last step to finish
SWITCH_INTERVAL_S = 0.0005  # so that the engine thread gets the interpreter back quickly after each native call


log = logging.getLogger(__name__)


@contextlib.contextmanager
def use_short_switch_interval() -> Iterator[None]:
    """Switch between the interpreter's threads often, so that the event loop receives a step's tokens without delay."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


async def schedule_on_loop(event: asyncio.Event, within_s: float) -> bool:
    """Wait for the event for at most `within_s`; return whether it is set."""
    try:
        await asyncio.wait_for(event.wait(), within_s)
    except TimeoutError:
        return False
    return True


async def stop_within(stop: Callable[[], None], within_s: float) -> bool:
    """Run `stop`, which waits for an engine's step, in a thread; return False if it did not end within `within_s`."""
    aio, stopped = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        try:
            stop()
        finally:
            with contextlib.suppress(RuntimeError):  # the event loop is closed: it no longer waits
                aio.call_soon_threadsafe(stopped.set)

    # not a thread of a pool: the interpreter joins those when it ends
    threading.Thread(target=run, name="millrace-stop", daemon=True).start()
    if not (ended := await schedule_on_loop(stopped, within_s)):
        log.critical("the engine's step did not end within %g s; it is left behind", within_s)
    return ended


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """Limits on queued requests and undelivered tokens. raises ConfigError"""

    max_queued: int = MAX_QUEUED  # sequences that wait for their first step, beyond those that free slots take
    max_undelivered_tokens: int = 4096  # per choice of a request; a reader further behind is dropped

    def __post_init__(self) -> None:
        for name in ("max_queued", "max_undelivered_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}", "at least 1", f"raise {name}")


class RequestHandle:
    """Requests in progress that one reader consumes: `async for deltas in handle` gives a list of Delta per wake-up.

    Choices are numbered across all requests: those of the second request follow those of the first. Iteration ends
    after every choice has finished. Made by `AsyncEngine.submit` only.
    """

    def __init__(self, engine: "AsyncEngine") -> None:
        self.requests: list[Request] = []  # their `timings` are written by the engine thread while they run
        self._engine = engine
        self._buffer: deque[Delta] = deque()
        self._undelivered_tokens = 0
        self._n_choices = 0
        self._unfinished = 0  # choices whose last delta has not arrived here
        self._dropped = False
        self._wakeup: asyncio.Future[None] | None = None

    @property
    def request_id(self) -> str:
        return self.requests[0].id

    @property
    def n_prompt(self) -> int:
        """Number of tokens in all prompts."""
        return sum(len(request.prompt) for request in self.requests)

    @property
    def n_cached(self) -> int:
        """Number of prompt tokens found in the prefix cache so far."""
        return sum(request.n_cached for request in self.requests)

    @property
    def finished(self) -> bool:
        """Whether the last delta of every choice has arrived. It may still be in the buffer."""
        return self._unfinished == 0

    def cancel(self) -> None:
        """Stop the requests; unfinished choices end with ABORT. Does nothing if all are finished."""
        if not self.finished:
            for request in self.requests:
                self._engine.loop.cancel(request)

    async def __aenter__(self) -> "RequestHandle":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()  # leaving `async with engine.submit(...)` early cancels the requests

    def __aiter__(self) -> AsyncIterator[list[Delta]]:
        return self

    async def __anext__(self) -> list[Delta]:
        while not self._buffer:
            if self.finished:
                raise StopAsyncIteration
            assert self._wakeup is None, "a handle has one reader"
            self._wakeup = self._engine.aio.create_future()
            try:
                await self._wakeup
            finally:
                self._wakeup = None
        deltas, n_tokens = [self._buffer.popleft()], 0
        while self._buffer and (n_tokens := n_tokens + max(1, deltas[-1].n_tokens)) < MAX_TOKENS_PER_READ:
            deltas.append(self._buffer.popleft())
        for delta in deltas:
            self._undelivered_tokens -= delta.n_tokens
        return deltas

    def _receive(self, deltas: list[Delta], max_undelivered_tokens: int) -> None:
        if self._dropped:
            return
        self._buffer += deltas
        for delta in deltas:
            self._undelivered_tokens += delta.n_tokens
            self._unfinished -= delta.finish_reason is not None
        # a waiting reader is not slow: a backlog arrived at once because this thread was held up
        if self._undelivered_tokens > max_undelivered_tokens * self._n_choices and self._wakeup is None:
            self._drop(f"the reader fell {self._undelivered_tokens} tokens behind, so the request was aborted")
        self._wake()

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)

    def _drop(self, reason: str) -> None:
        """Drop the deltas that the reader did not fetch, and end every choice."""
        self._dropped = True
        self.cancel()
        self._buffer = deque(
            Delta(index=i, text="", token_ids=(), finish_reason=FinishReason.ABORT, error=reason)
            for i in range(self._n_choices)
        )
        self._undelivered_tokens = 0
        self._unfinished = 0


class QueueTimeEstimator:
    """Estimates how long a new sequence waits for a slot, from how long sequences hold theirs.

    Uses the mean over the last sequences that ended, or the mean so far over those that run, whichever is longer: the
    mean over ended sequences counts short answers first, and long ones only after a whole batch has finished.
    """

    def __init__(self, n_places: int) -> None:
        self._n_places, self._most = n_places, max(MIN_SEQUENCES, n_places)
        self._held_s = self._n_left = 0.0  # of about the last `_most` sequences that ended
        self._last_totals = 0.0, 0

    def wait_s(self, stats: LoopStats) -> float:
        """Return how long a new sequence waits behind all others; 0 if a slot is free, or nothing is known yet."""
        (running_s, n_left), self._last_totals = self._last_totals, (stats.held_s_total, stats.left_total)
        self._held_s += stats.held_s_total - running_s
        self._n_left += stats.left_total - n_left
        if self._n_left > self._most:
            self._held_s, self._n_left = self._held_s * self._most / self._n_left, self._most
        n_running = max(1, stats.running)
        keeps_s = max(self._held_s / max(1.0, self._n_left), stats.running_s / n_running)
        n_before = stats.waiting + 1 if stats.waiting or stats.running >= self._n_places else 0
        return keeps_s * n_before / n_running


class AsyncEngine:
    """`async with AsyncEngine(loop) as engine:` starts the engine thread and stops it at the end."""

    def __init__(self, loop: EngineLoop, options: ServiceOptions | None = None) -> None:
        self.loop = loop
        self.options = options or ServiceOptions()
        self._aio: asyncio.AbstractEventLoop | None = None
        self._live: set[RequestHandle] = set()
        self._closing = False
        self.stuck = False  # the engine thread did not end
        self._lock = threading.Lock()
        self._outbox: list[tuple[RequestHandle, list[Delta]]] = []  # guarded by _lock
        self._flush_due = False  # guarded by _lock
        self._turnover = QueueTimeEstimator(loop.limits.max_sequences)
        self._delivered = threading.Event()  # the deltas of the last step were passed to their readers

    @property
    def aio(self) -> asyncio.AbstractEventLoop:
        """The event loop in which the engine was started. (asyncio.get_running_loop() costs a system call.)"""
        assert self._aio is not None, "ask before start"
        return self._aio

    @property
    def limits(self) -> ExecutorLimits:
        return self.loop.limits

    @property
    def grammars(self) -> GrammarCompiler:
        return self.loop.grammars

    def start(self, computing: Callable[[bool], None] | None = None) -> None:
        """Start the engine thread. Call it inside the running event loop from which all requests are submitted.

        computing: called with True before and False after each step, if the engine uses all cores
        """
        self._aio = asyncio.get_running_loop()
        if computing is None or not self.limits.on_all_cores:
            self.loop.start(self._after_step)
        else:
            self.loop.start(self._after_step, computing)

    def submit(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        request_id: str | None = None,
        stops: StopTables | None = None,
        options: RequestOptions = DEFAULT_OPTIONS,
        matchers: Sequence[Matcher] = (),
    ) -> RequestHandle:
        """Queue one request per prompt, each with its own params; all of them or none.

        raises RequestError on bad input, BusyError if the queue is full or the engine is closing.
        stops: the tables of the stop strings, if the caller has made them, off the event loop
        options: of each request
        matchers: one for each choice of all requests, if their output is structured
        """
        self._check_room(sum(own.n for own in params), options.queue_options)
        return self._queue(self.prepare(prompts, params, request_id, stops, options, matchers))

    def prepare(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], request_id: str | None = None,
        stops: StopTables | None = None, options: RequestOptions = DEFAULT_OPTIONS, matchers: Sequence[Matcher] = (),
    ) -> RequestHandle:  # fmt: skip
        """Make the requests of `submit`, in any thread, because resuming long answers is slow. raises RequestError"""
        handle = RequestHandle(self)
        handle._n_choices = handle._unfinished = sum(own.n for own in params)

        def deliver(deltas: list[Delta]) -> None:  # called in the engine thread
            self._outbox_append(handle, deltas)

        first = 0
        for prompt, own in zip(prompts, params, strict=True):
            group = matchers[first : first + own.n]
            handle.requests.append(self.loop.prepare(prompt, own, deliver, request_id, stops, first, options, group))
            first += own.n
        return handle

    def queue(self, handle: RequestHandle) -> None:
        """Queue prepared requests, all or none. raises BusyError as `submit` does"""
        self._check_room(handle._n_choices, handle.requests[0].queue_options)
        self._queue(handle)

    def _queue(self, handle: RequestHandle) -> RequestHandle:
        assert self._aio is not None, "submit before start"
        try:
            for request in handle.requests:
                self.loop.queue(request)
        except MillraceError:
            handle.cancel()
            raise
        self._live.add(handle)
        return handle

    def stats(self) -> LoopStats:
        """Return counters, queue lengths, page counts and health of the engine loop."""
        return self.loop.stats()

    async def close(self, within_s: float = STOP_S) -> None:
        """Abort the remaining requests and stop the engine thread. The executor stays open: its owner closes it.

        If the step in progress does not end within `within_s`, it is abandoned: `stuck` is set, and the executor must
        not be closed or reused.
        """
        self._closing = True
        for handle in self._live:
            handle.cancel()
        if not await stop_within(self.loop.stop, within_s):
            self.stuck = True
            for handle in self._live:
                handle._drop("the engine is stuck, and the server is stopping")
                handle._wake()
        self._flush()  # the flush of the last step may not have run yet

    async def __aenter__(self) -> "AsyncEngine":
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _check_room(self, n: int, queue_options: QueueOptions) -> None:
        stats = self.loop.stats()
        if self._closing:
            raise BusyError("the server is shutting down", "a server that takes requests", "try again", 5.0)
        if not stats.healthy:
            raise BusyError("the engine has stopped", "a running engine", "restart the server; its log says why", 30.0)
        free_slots = max(0, self.limits.max_sequences - stats.running)
        wait_s = self._turnover.wait_s(stats)
        retry_s = min(max(wait_s / 2, RETRY_LOW_S), RETRY_HIGH_S)  # until half of the queue is served
        if stats.waiting + n > self.options.max_queued + free_slots:
            raise BusyError(
                f"{stats.waiting} sequences are waiting",
                f"at most {self.options.max_queued}",
                "come back later, or raise the queue limit",
                retry_s,
            )
        if queue_options.tenant and (n_own := self._n_waiting(queue_options.tenant)) + n > (
            most := max(1, self.options.max_queued // 2)
        ):
            raise BusyError(
                f"{n_own} sequences of this API key are waiting", f"at most {most}, half of the queue",
                "come back later, or raise the queue limit", retry_s,
            )  # fmt: skip
        if queue_options.queue_timeout_s is not None and wait_s > queue_options.queue_timeout_s:
            n_others = stats.running + stats.waiting
            raise BusyError(
                f"it would wait some {wait_s:.1f} s, behind {n_others} other{'s' if n_others > 1 else ''}",
                f"at most {queue_options.queue_timeout_s:g} s, as queue_timeout_s says",
                "come back later, or raise queue_timeout_s",
                retry_s,
            )

    def _n_waiting(self, tenant: str) -> int:
        """Number of the tenant's sequences that no step has included yet."""
        requests = (
            request for handle in self._live for request in handle.requests if request.queue_options.tenant == tenant
        )
        return sum(len(request.choices) for request in requests if request.timings.first_scheduled_s is None)

    def _outbox_append(self, handle: RequestHandle, deltas: list[Delta]) -> None:
        with self._lock:
            self._outbox.append((handle, deltas))

    def _after_step(self) -> None:
        """Wake the event loop once for all requests of the step. Called in the engine thread."""
        assert self._aio is not None
        with self._lock:
            if not self._outbox:
                return
            due, self._flush_due = self._flush_due, True
        if not due:
            self._delivered.clear()
            try:
                self._aio.call_soon_threadsafe(self._flush)
            except RuntimeError:  # the event loop is closed, so there are no readers
                with self._lock:
                    self._outbox.clear()
                return
        # While workers use every core, the event loop would wait for the next tick of the kernel, 2 to 4 ms, and so
        # would its reader. A core that it takes from one worker stalls all of them, so waiting here costs nothing more.
        if self.limits.on_all_cores:
            self._delivered.wait(DELIVERY_WAIT_S)

    def _flush(self) -> None:
        with self._lock:
            batch, self._outbox, self._flush_due = self._outbox, [], False
        if self.limits.on_all_cores and self._aio is not None and not self._aio.is_closed():
            # readers run in the next iteration of the event loop, and have written by the one after it
            self._aio.call_soon(self._aio.call_soon, self._delivered.set)
        for handle, deltas in batch:
            handle._receive(deltas, self.options.max_undelivered_tokens)
            if handle.finished:
                self._live.discard(handle)
