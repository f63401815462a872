"""Runs a script in a separate process that answers each message with one message, over a connection as its stdin.

The messages are bytes, as `multiprocessing.connection` sends them: nothing is pickled.
"""

import logging
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

from millrace.errors import MachineError

log = logging.getLogger(__name__)
_CAN_HOLD = sys.platform == "linux"  # only there can a stopped process be continued when its owner has ended
_ENDING_S = 1.0  # wait for a process to end after its connection was closed
_LONG_S = 0.05  # duration of a compute step in which one time slice of the kernel for the process hardly matters


class WorkerTimeoutError(Exception):
    """The process did not answer in time and was killed."""


class WorkerDiedError(Exception):
    """The process ended without an answer.

    returncode: its exit status; -N if signal N ended it
    closed: whether the owner closed it and needs no answer
    """

    def __init__(self, returncode: int, closed: bool = False) -> None:
        super().__init__(returncode, closed)
        self.returncode, self.closed = returncode, closed

    @property
    def is_from_outside(self) -> bool:
        """Whether something other than the message ended the process, such as the kernel if memory runs out."""
        return self.returncode == -signal.SIGKILL and not self.closed


class FrameProcess:
    """A process that runs from construction until `close` or garbage collection. One exchange at a time."""

    def __init__(self, script: Path) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            # not fork: the parent has threads; -P: do not prepend the script's folder to sys.path
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(script)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            self._connection = Connection(ours.detach())
        self._killed = False
        self.close = weakref.finalize(self, _end, self.process, self._connection)

    @property
    def alive(self) -> bool:
        return not self._killed and self.process.poll() is None

    @property
    def killed(self) -> bool:
        """Whether `kill` was called; its caller needs no answer."""
        return self._killed

    def kill(self) -> None:
        """Kill the process, from any thread, without waiting: an exchange in progress raises WorkerDiedError."""
        self._killed = True
        self.process.kill()

    def suspend(self) -> None:
        """Suspend the process until `resume`. If the owner ends meanwhile, the script itself must continue."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def exchange(self, payload: bytes, timeout_s: float) -> bytes:
        """Send one message and receive one.

        raises WorkerTimeoutError, WorkerDiedError; the process has ended after any exception
        """
        late, process = threading.Event(), self.process

        def kill() -> None:  # has no reference to self, so that it can be collected
            late.set()
            process.kill()

        timer = threading.Timer(timeout_s, kill)
        timer.daemon = True
        timer.start()
        answer = None
        try:
            self._connection.send_bytes(payload)
            answer = self._connection.recv_bytes()
        except (EOFError, OSError):  # broken pipe, connection reset
            pass
        except BaseException:  # interrupted: the next exchange would receive this one's answer
            self.close()
            raise
        finally:
            timer.cancel()
        if answer is not None and not late.is_set():
            return answer
        if not late.is_set():
            with suppress(subprocess.TimeoutExpired):
                process.wait(_ENDING_S)  # the connection closes before the process ends: wait for its own exit status
        self.close()
        raise WorkerTimeoutError if late.is_set() else WorkerDiedError(process.returncode, self._killed)


def unavailable(what: str) -> MachineError:
    """Log a failure of a process that a request needs, and return it as an error."""
    log.error("%s", what)
    return MachineError(what, "memory and time for one more process", "free memory, then try again")


class WorkerProcess:
    """A FrameProcess that starts on first use, and again after it ended. Thread-safe: one exchange at a time."""

    def __init__(self, script: Path, greet: Callable[[FrameProcess], None]) -> None:
        """greet: sends the first messages to a new process; if it raises, the process is closed"""
        self._script, self._greet = script, greet
        self._turn = threading.Lock()
        self.process: FrameProcess | None = None
        self._settling = threading.Lock()  # guards the attributes below
        self._paused, self._began_s, self._lasted_s = False, 0.0, 0.0
        self._at_work: FrameProcess | None = None
        self._suspended: FrameProcess | None = None

    def exchange(self, payload: bytes, timeout_s: float, *, retry: bool = True) -> bytes:
        """Send one message and receive one.

        retry: if a process that has answered before dies, send the message to a new one; False: only if something else
            killed it, because the message itself may have been the cause

        raises WorkerTimeoutError, WorkerDiedError; MachineError if no process can start; and errors of `greet`
        """
        with self._turn:
            before, process = self.process, self._started()
            try:
                with self._work_of(process):
                    return process.exchange(payload, timeout_s)
            except WorkerDiedError as ended:
                if process is not before or process.killed or not (retry or ended.is_from_outside):
                    raise
            again = self._started()  # the other may have ended before it got the message
            with self._work_of(again):
                return again.exchange(payload, timeout_s)

    def pause(self, paused: bool) -> None:
        """Suspend the process while the calling thread computes on all cores: from `pause(True)` to `pause(False)`.

        A low priority is not enough: the scheduler still grants a waiting process some time, and then for a whole tick
        (4 ms). After a long step the process is not suspended for the next one, so messages progress in long steps.
        """
        if not _CAN_HOLD:
            return
        now_s = time.perf_counter()
        with self._settling:
            if paused:
                self._began_s = now_s
            else:
                self._lasted_s = now_s - self._began_s
            self._paused = paused and self._lasted_s < _LONG_S
            self._settle()

    def stop(self) -> None:
        """Kill the process without waiting for an exchange in progress; the next exchange starts a new one."""
        process = self.process
        if process is not None:
            process.kill()
            if self._turn.acquire(blocking=False):  # otherwise the thread with the turn closes it
                process.close()
                self._turn.release()

    @contextmanager
    def _work_of(self, process: FrameProcess) -> Iterator[None]:
        with self._settling:
            self._at_work = process
            self._settle()
        try:
            yield
        finally:
            with self._settling:
                self._at_work = None
                self._settle()

    def _settle(self) -> None:
        halted = self._at_work if self._paused else None
        if halted is self._suspended:
            return
        if self._suspended is not None:
            self._suspended.resume()
        if halted is not None:
            halted.suspend()
        self._suspended = halted

    def _started(self) -> FrameProcess:
        if self.process is not None and self.process.alive:
            return self.process
        if self.process is not None:
            self.process.close()
        try:
            self.process = process = FrameProcess(self._script)
        except OSError as error:  # no memory, no more processes or descriptors
            raise self._unavailable(f"{error.strerror}") from None
        try:
            self._greet(process)
        except WorkerTimeoutError:
            raise self._unavailable("it was not ready in time") from None
        except WorkerDiedError as error:
            raise self._unavailable(f"it ended with exit status {error.returncode}") from None
        except BaseException:
            process.close()
            raise
        return process

    def _unavailable(self, reason: str) -> MachineError:
        return unavailable(f"the process {self._script.stem} cannot start: {reason}")


def _end(process: "subprocess.Popen[bytes]", connection: Connection) -> None:
    process.kill()
    process.wait()
    connection.close()
