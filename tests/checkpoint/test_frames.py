"""A process that answers messages: an exchange that is interrupted leaves no answer behind for the next one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.checkpoint.frames import EndedError, FrameProcess, Worker

_SCRIPT = """
import time
from multiprocessing.connection import Connection

connection = Connection(0)
while True:
    try:
        message = connection.recv_bytes()
    except EOFError:
        break
    connection.send_bytes(b"answer to " + message)
"""


class Interrupted(BaseException):
    """As KeyboardInterrupt, or a test's time-out, is raised: anywhere."""


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "script.py"
    path.write_text(_SCRIPT)
    yield path


def interrupt(process: FrameProcess) -> None:
    """The next answer is not waited for."""
    connection = process._connection

    class Cut:
        def send_bytes(self, payload: bytes) -> None:
            connection.send_bytes(payload)

        def recv_bytes(self) -> bytes:
            raise Interrupted

    process._connection = Cut()  # type: ignore[assignment]


def test_an_interrupted_exchange_ends_the_process(script: Path) -> None:
    process = FrameProcess(script)
    assert process.exchange(b"1", 60) == b"answer to 1"
    interrupt(process)
    with pytest.raises(Interrupted):
        process.exchange(b"2", 60)
    assert not process.alive
    with pytest.raises(EndedError):
        process.exchange(b"3", 60)


def test_a_worker_starts_another_after_it(script: Path) -> None:
    worker = Worker(script, lambda process: None)
    assert worker.exchange(b"1", 60) == b"answer to 1"
    assert worker.process is not None
    interrupt(worker.process)
    with pytest.raises(Interrupted):
        worker.exchange(b"2", 60)
    assert worker.exchange(b"3", 60) == b"answer to 3"
