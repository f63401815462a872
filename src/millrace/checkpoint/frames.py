"""A script in a process of its own that answers one frame with another: 4 bytes of length, big endian, then as many."""

import contextlib
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import IO, cast


class LateError(Exception):
    """The process did not answer in time, and was killed."""


class EndedError(Exception):
    """The process ended without an answer."""


class FrameProcess:
    """Runs from its making until `close`, or until nobody holds it any more. One exchange at a time."""

    def __init__(self, script: Path) -> None:
        # not fork: the parent has threads; -P: the script's folder is not put in front of the import path
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.close = weakref.finalize(self, _end, self.process)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def exchange(self, payload: bytes, timeout_s: float) -> bytes:
        """Send one frame and read one. raises LateError, EndedError; the process is gone after either"""
        late, process = threading.Event(), self.process

        def kill() -> None:  # holds the process, not its owner, which must be free to go
            late.set()
            process.kill()

        timer = threading.Timer(timeout_s, kill)
        timer.daemon = True
        timer.start()
        try:
            answer = _transfer(cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout), payload)
        except BrokenPipeError:
            answer = None
        finally:
            timer.cancel()
        if answer is not None and not late.is_set():
            return answer
        self.close()
        raise LateError if late.is_set() else EndedError


def _transfer(to: IO[bytes], source: IO[bytes], payload: bytes) -> bytes | None:
    to.write(len(payload).to_bytes(4, "big") + payload)
    to.flush()
    head = source.read(4)
    if len(head) < 4:
        return None
    length = int.from_bytes(head, "big")
    answer = source.read(length)
    return answer if len(answer) == length else None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # what was buffered for a dead process is lost with it
                pipe.close()
