"""The null server as a separate process, so that it takes no CPU time from the client under test."""

import json
import select
import subprocess
import sys
import urllib.request
from dataclasses import asdict
from types import TracebackType

from millrace.bench.null_server.ledger import NullTiming, Sent
from millrace.errors import MachineError

START_S = 20.0


class NullProcess:
    """A null server process: `with NullProcess(NullTiming(ttft_ms="100")) as server:` waits until it listens."""

    def __init__(self, timing: NullTiming, over_grpc: bool = False) -> None:
        command = [sys.executable, "-P", "-m", "millrace.bench.null_server.__main__", json.dumps(asdict(timing))]
        command += ["grpc"] * over_grpc
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.url = self.grpc_url = ""

    def __enter__(self) -> "NullProcess":
        assert self._process.stdout is not None
        if select.select([self._process.stdout], [], [], START_S)[0]:
            self.url, _, self.grpc_url = self._process.stdout.readline().strip().partition(" ")
        if not self.url:
            self._end()
            raise MachineError("the null server did not start", f"it to listen within {START_S:g} s", "report it")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @property
    def truth_list(self) -> list[Sent]:
        """Return the records in order of arrival."""
        with urllib.request.urlopen(f"{self.url}/truth", timeout=30) as reply:
            return [Sent(**fields) for fields in json.load(reply)]

    @property
    def truth(self) -> dict[str, Sent]:
        """Return the records by request id (header `x-request-id`)."""
        return {sent.id: sent for sent in self.truth_list}

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()
