"""EngineThread: the thread that runs an engine's loop, its progress, and the reason it stopped."""

import logging
import threading
from collections.abc import Callable

from millrace.errors import MillraceError, engine_stopped_error

MAX_CONSECUTIVE_FAILURES = 3  # steps

log = logging.getLogger(__name__)


class EngineThread:
    """The thread of an engine's loop, the time of its last progress, and the reason it stopped.

    `changed` guards `stopping`, `dead_because` and the data that the loop passes between threads.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.changed = threading.Condition()
        self.stopping = False
        self.dead_because = ""  # the error that ended the loop for good; "" while it can run
        self._thread: threading.Thread | None = None
        self._consecutive_failures = 0
        self._progress_s = clock()

    @property
    def running(self) -> bool:
        return self._thread is not None

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is this one."""
        return self._thread is threading.current_thread()

    @property
    def seconds_since_progress(self) -> float:
        """Time since the loop last made progress."""
        return self.clock() - self._progress_s

    def start(self, run: Callable[[], None]) -> None:
        assert self._thread is None, "the loop is already running"
        self.stopping = False
        self._thread = threading.Thread(target=run, name="millrace-engine", daemon=True)
        self._thread.start()

    def stop(self) -> bool:
        """Stop the loop, wait for its last step and its cleanup; return False if it was not running."""
        with self.changed:
            self.stopping = True
            self.changed.notify()
        if self._thread is None:
            return False
        self._thread.join()
        self._thread = None
        return True

    def check_open(self) -> None:
        """Check, with `changed` held, that the loop accepts work. raises BusyError"""
        if self.stopping or self.dead_because:
            raise engine_stopped_error(self.dead_because)

    def record_progress(self) -> None:
        """Also called when an idle loop receives work: an idle period is not a lack of progress."""
        self._progress_s = self.clock()

    def step_done(self) -> None:
        self._consecutive_failures = 0

    def step_failed(self, label: str, error: Exception, check: Callable[[], object]) -> None:
        """Count a failed step; after MAX_CONSECUTIVE_FAILURES, end the loop if `check` fails too.

        A failed step fails only its own requests. check: computes an unrelated step, because the failures may all
        come from one repeated request; raises RuntimeError or MillraceError
        """
        self._consecutive_failures += 1
        log.error("%s failed, %d in a row", label, self._consecutive_failures, exc_info=error)
        if self._consecutive_failures == MAX_CONSECUTIVE_FAILURES:
            try:
                check()
                self._consecutive_failures = 0
            except (RuntimeError, MillraceError) as failed:
                self.dead_because = f"{MAX_CONSECUTIVE_FAILURES} steps in a row failed, then one of its own: {failed}"
