"""A process that answers messages: an exchange that is interrupted leaves no answer behind for the next one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.errors import MachineError
from millrace.machine import worker_process
from millrace.machine.worker_process import FrameProcess, WorkerDiedError, WorkerProcess

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
    with pytest.raises(WorkerDiedError):
        process.exchange(b"3", 60)


def test_a_worker_starts_another_after_it(script: Path) -> None:
    worker = WorkerProcess(script, lambda process: None)
    assert worker.exchange(b"1", 60) == b"answer to 1"
    assert worker.process is not None
    interrupt(worker.process)
    with pytest.raises(Interrupted):
        worker.exchange(b"2", 60)
    assert worker.exchange(b"3", 60) == b"answer to 3"


def test_a_process_that_cannot_start_is_no_fault_of_the_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def greeted(process: FrameProcess) -> None:
        process.exchange(b"hello", 60)

    broken = tmp_path / "broken_worker.py"
    broken.write_text("raise SystemExit(7)")
    worker = WorkerProcess(broken, greeted)
    for retry in (True, False):
        with pytest.raises(MachineError, match=r"broken_worker cannot start: it ended with exit status 7"):
            worker.exchange(b"1", 60, retry=retry)
    assert len([record for record in caplog.records if "cannot start" in record.message]) == 2

    def no_process(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", no_process)
    with pytest.raises(MachineError, match="cannot start: Resource temporarily unavailable"):
        worker.exchange(b"1", 60)


def test_a_process_that_something_else_killed_is_replaced(script: Path) -> None:
    """As the kernel does if memory runs out: the message is sent to a new process, once."""
    killed: list[FrameProcess] = []

    class Killed(FrameProcess):
        def exchange(self, payload: bytes, timeout_s: float) -> bytes:
            if payload == b"1" and len(killed) < n_kills:
                killed.append(self)
                self.process.kill()
                self.process.wait()
            return super().exchange(payload, timeout_s)

    for n_kills, retry in ((1, True), (1, False), (2, False)):
        killed.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker_process, "FrameProcess", Killed)
            worker = WorkerProcess(script, lambda process: None)
            assert worker.exchange(b"0", 60) == b"answer to 0"
            if n_kills == 1:
                assert worker.exchange(b"1", 60, retry=retry) == b"answer to 1"
            else:
                with pytest.raises(WorkerDiedError) as error:
                    worker.exchange(b"1", 60, retry=retry)
                assert error.value.is_from_outside
            assert len(killed) == n_kills
            worker.stop()


def test_a_message_that_may_end_its_process_is_sent_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        _SCRIPT.replace("    connection.send", "    if message == b'fatal': raise SystemExit(3)\n    connection.send")
    )
    n = 0

    def greet(process: FrameProcess) -> None:
        nonlocal n
        n += 1

    worker = WorkerProcess(script, greet)
    assert worker.exchange(b"1", 60) == b"answer to 1"
    with pytest.raises(WorkerDiedError) as error:
        worker.exchange(b"fatal", 60, retry=False)
    assert error.value.returncode == 3 and n == 1
    assert worker.exchange(b"2", 60) == b"answer to 2" and n == 2
