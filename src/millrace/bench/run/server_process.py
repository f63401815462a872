"""`millrace serve` as a child process: started, awaited, stopped, with its exit code checked."""

import json
import select
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from millrace.errors import MachineError

START_S, STOP_S = 60.0, 40.0


class ServerProcess:
    """A server process: `with ServerProcess(engine) as server:` waits until it is ready, and stops it at the end."""

    def __init__(self, model: Path | str | None, flags: Sequence[str] = (), start_s: float = START_S) -> None:
        """model: None if the flags name what is served; start_s: start timeout, including the engine's build"""
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        served = [] if model is None else [str(model)]
        command = [sys.executable, "-P", "-m", "millrace", "serve", *served, "--port", "0", "--json", *flags]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._errors)
        self._start_s = start_s
        self.url = self.grpc_url = ""  # grpc_url: HOST:PORT, if gRPC is enabled
        self.ready_s = 0.0  # from the start of the process, as reported by it

    def __enter__(self) -> "ServerProcess":
        try:
            self._wait_until_ready()
        except BaseException:  # also Ctrl-C: leave no server behind
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @property
    def pid(self) -> int:
        return self._process.pid

    def terminate(self) -> None:
        """Send SIGTERM: the server finishes running requests and accepts no new ones."""
        self._process.send_signal(signal.SIGTERM)

    def wait(self) -> float:
        """Wait for the end and return the seconds. raises MachineError on timeout or a nonzero exit code"""
        start_s = time.perf_counter()
        try:
            code = self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            raise self._failure(f"the server did not stop within {STOP_S:g} s of SIGTERM") from None
        if code != 0:
            raise self._failure(f"the server ended with exit code {code}")
        return time.perf_counter() - start_s

    def _wait_until_ready(self) -> None:
        assert self._process.stdout is not None
        until_s = time.perf_counter() + self._start_s
        if not select.select([self._process.stdout], [], [], self._start_s)[0]:
            raise self._failure(f"the server was not ready after {self._start_s:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._failure("the server ended before it was ready")
        announced = json.loads(line)
        self.url, self.ready_s = announced["url"], announced["ready_s"]
        self.grpc_url = announced.get("grpc_url", "")
        while not self._says_ready():
            if time.perf_counter() > until_s:
                raise self._failure(f"{self.url}/v1/health/ready did not say ready within {self._start_s:g} s")
            time.sleep(0.05)

    def _says_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/v1/health/ready", timeout=5) as reply:
                return bool(reply.status == 200)
        except urllib.error.URLError:
            return False

    def _failure(self, problem: str) -> MachineError:
        self._errors.seek(0)
        log_tail = " / ".join(self._errors.read()[-2000:].decode(errors="replace").split("\n")).strip(" /")
        return MachineError(
            f"{problem}; it said: {log_tail}" if log_tail else problem, "a server that works", "report it"
        )

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()
