"""A script in a process of its own that answers one message with another, over a connection that is its stdin.

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
_CAN_HOLD = sys.platform == "linux"  # where a process that is stopped can go on when its owner has ended
_ENDING_S = 1.0  # for a process to end after its connection was closed
_LONG_S = 0.05  # of which what a process takes, one slice of the kernel's, is hardly felt


class WorkerTimeoutError(Exception):
    """The process did not answer in time, and was killed."""


class WorkerDiedError(Exception):
    """The process ended without an answer.

    returncode: its exit status; -N if signal N ended it; closed: by its owner, who wants no answer
    """

    def __init__(self, returncode: int, closed: bool = False) -> None:
        super().__init__(returncode, closed)
        self.returncode, self.closed = returncode, closed

    @property
    def is_from_outside(self) -> bool:
        """Whether something else ended the process, as the kernel does if memory runs out: not what it was sent."""
        return self.returncode == -signal.SIGKILL and not self.closed


class FrameProcess:
    """Runs from its making until `close`, or until nobody holds it any more. One exchange at a time."""

    def __init__(self, script: Path) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            # not fork: the parent has threads; -P: the script's folder is not put in front of the import path
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
        """By `kill`: whoever did that wants no answer."""
        return self._killed

    def kill(self) -> None:
        """From any thread, without waiting: an exchange under way ends with EndedError, and nobody begins another."""
        self._killed = True
        self.process.kill()

    def halt(self) -> None:
        """Stop it where it is, until `go_on`. Where the owner ends meanwhile, the script has to see to it itself."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def exchange(self, payload: bytes, timeout_s: float) -> bytes:
        """Send one message and receive one. raises LateError, EndedError; the process is gone after any exception"""
        late, process = threading.Event(), self.process

        def kill() -> None:  # holds the process, not its owner, which must be free to go
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
        except BaseException:  # interrupted: the next exchange would take this one's answer for its own
            self.close()
            raise
        finally:
            timer.cancel()
        if answer is not None and not late.is_set():
            return answer
        if not late.is_set():
            with suppress(subprocess.TimeoutExpired):
                process.wait(_ENDING_S)  # its connection closes before it has ended: its own exit status is awaited
        self.close()
        raise WorkerTimeoutError if late.is_set() else WorkerDiedError(process.returncode, self._killed)


def unavailable(what: str) -> MachineError:
    """Log what happened to a process that a request needs, and return it as an error."""
    log.error("%s", what)
    return MachineError(what, "memory and time for one more process", "free memory, then try again")


class WorkerProcess:
    """A FrameProcess that is started when it is needed, and again after it ended. Threads take turns with it."""

    def __init__(self, script: Path, greet: Callable[[FrameProcess], None]) -> None:
        """greet: sends the first messages to a new process; what it raises ends the process"""
        self._script, self._greet = script, greet
        self._turn = threading.Lock()
        self.process: FrameProcess | None = None
        self._settling = threading.Lock()  # guards what is below
        self._paused, self._began_s, self._lasted_s = False, 0.0, 0.0
        self._at_work: FrameProcess | None = None
        self._halted: FrameProcess | None = None

    def exchange(self, payload: bytes, timeout_s: float, *, retry: bool = True) -> bytes:
        """Send one message and receive one.

        retry: if the process ends that answered before, ask a new one; False: only if something else ended it, because
        the message may have

        raises LateError, EndedError; MachineError if no process can start; and what else `greet` raises
        """
        with self._turn:
            before, process = self.process, self._started()
            try:
                with self._work_of(process):
                    return process.exchange(payload, timeout_s)
            except WorkerDiedError as ended:
                if process is not before or process.killed or not (retry or ended.is_from_outside):
                    raise
            again = self._started()  # the other may have ended before it was asked
            with self._work_of(again):
                return again.exchange(payload, timeout_s)

    def pause(self, paused: bool) -> None:
        """From one thread, which computes on all cores from `hold(True)` to `hold(False)`: messages rest then.

        A low priority is not enough: who waits is owed a little, and a core once given is given until the kernel's next
        tick, 4 ms. What lasts long is not held a second time, so that messages get on beside long steps.
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
        """End the process, whatever it does, without waiting for whose turn it is; the next exchange starts another."""
        process = self.process
        if process is not None:
            process.kill()
            if self._turn.acquire(blocking=False):  # otherwise whoever has the turn lets it go
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
        if halted is self._halted:
            return
        if self._halted is not None:
            self._halted.go_on()
        if halted is not None:
            halted.halt()
        self._halted = halted

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

    def _unavailable(self, why: str) -> MachineError:
        return unavailable(f"the process {self._script.stem} cannot start: {why}")


def _end(process: "subprocess.Popen[bytes]", connection: Connection) -> None:
    process.kill()
    process.wait()
    connection.close()
