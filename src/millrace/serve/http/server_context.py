"""State shared by all requests of a server: admission, memory bounds, executors for large work, metrics."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from millrace.errors import BusyError
from millrace.model_repository.tracing.tracer import Tracer
from millrace.serve.http.admission import Admission, RequestsInFlight, UnsentBytes
from millrace.serve.http.bounded_executor import BoundedExecutor
from millrace.serve.ops.metrics import ServerMetrics
from millrace.serve.protocols.responses.store import ResponseStore
from millrace.serve.settings import ServerSettings

OFF_LOOP_BODY = 64 * 1024  # bytes of JSON: half a millisecond of the event loop
OFF_LOOP_ITEMS = 8192  # tokens of an answer, characters of stop strings: a few milliseconds
OFF_LOOP_RESUME = 256  # tokens of answers that are resumed: a few milliseconds
OFF_LOOP_STEP = 512  # log probabilities of an answer that is held until it is complete: about a millisecond
T = TypeVar("T")


class ServerContext:
    """The state of one server, independent of its models."""

    def __init__(self, settings: ServerSettings) -> None:
        """raises ConfigError"""
        self.settings, self.load = settings, RequestsInFlight()
        self.admission = Admission()
        self.metrics = ServerMetrics()
        self.tracer = Tracer.from_flags(settings.trace_config)
        self.unsent = UnsentBytes(settings.max_unread_bytes)
        self.responses = ResponseStore()
        self._tasks: set[asyncio.Task[None]] = set()  # background work
        self._bodies = BoundedExecutor("bodies", settings.max_preparing)
        self._replies = BoundedExecutor("replies", settings.max_preparing)

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work whose client may disconnect; draining waits for it as for a request. raises BusyError"""
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
        """Return `work()` on a body of n_bytes, run in a thread if they are many. raises as `off_loop`"""
        return await self._bodies.run(work, n_bytes) if n_bytes > OFF_LOOP_BODY else work()

    async def off_loop(self, is_large: bool, work: Callable[[], T]) -> T:
        """Return `work()` for a reply, run in a thread if it is large. raises BusyError, and whatever `work` raises"""
        return await self._replies.run(work) if is_large else work()

    def close(self) -> None:
        """Close the executors of large bodies and replies."""
        self._bodies.close()
        self._replies.close()
