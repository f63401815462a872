"""The thread of a loop, of whatever engine: its life, and how what fails is told from what has ended."""

import logging
import threading
from collections.abc import Callable

from millrace.errors import MillraceError, has_stopped

MAX_FAILURES_IN_A_ROW = 3  # steps

log = logging.getLogger(__name__)


class EngineThread:
    """The life of a loop, of whatever engine: its thread, when it last got on, and why it stopped.

    `changed` guards `stopping` and `dead_because`, and what the loop hands over between threads.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.changed = threading.Condition()
        self.stopping = False
        self.dead_because = ""  # what went wrong, so that the loop has ended for ever
        self._thread: threading.Thread | None = None
        self._failed_in_row = 0
        self._progress_s = clock()

    @property
    def running(self) -> bool:
        return self._thread is not None

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in it."""
        return self._thread is threading.current_thread()

    @property
    def silent_s(self) -> float:
        """Since the loop last got on."""
        return self.clock() - self._progress_s

    def start(self, run: Callable[[], None]) -> None:
        assert self._thread is None, "the loop is already running"
        self.stopping = False
        self._thread = threading.Thread(target=run, name="millrace-engine", daemon=True)
        self._thread.start()

    def stop(self) -> bool:
        """Waits for the step in progress, and whatever the loop does at its end. False: it had no thread."""
        with self.changed:
            self.stopping = True
            self.changed.notify()
        if self._thread is None:
            return False
        self._thread.join()
        self._thread = None
        return True

    def check_open(self) -> None:
        """Under `changed`, before the loop is given work. raises BusyError"""
        if self.stopping or self.dead_because:
            raise has_stopped(self.dead_because)

    def progressed(self) -> None:
        """Also when work comes to an idle loop: to wait for it was no lack of progress."""
        self._progress_s = self.clock()

    def step_done(self) -> None:
        self._failed_in_row = 0

    def step_failed(self, what: str, error: Exception, check: Callable[[], object]) -> None:
        """Only what was in the step fails with it; but a loop that computes nothing any more has ended.

        check: computes something else, as one request may have come again and again. raises what a step raises
        """
        self._failed_in_row += 1
        log.error("%s failed, %d in a row", what, self._failed_in_row, exc_info=error)
        if self._failed_in_row == MAX_FAILURES_IN_A_ROW:
            try:
                check()
                self._failed_in_row = 0
            except (RuntimeError, MillraceError) as failed:
                self.dead_because = f"{MAX_FAILURES_IN_A_ROW} steps in a row failed, then one of its own: {failed}"
