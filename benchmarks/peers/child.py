"""The other end of `worker`: start an engine's process, ask it, notice when it has died."""

import json
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.peers.homes import worker_command


class EngineFailedError(Exception):
    """The process of an engine ended; the message has the last line of its log."""


class Child:
    def __init__(
        self,
        engine: str,
        shape: str,
        folder: Path,
        threads: int,
        environment: Mapping[str, str] | None = None,
        python: Path | None = None,
    ) -> None:
        """python: of the environment that has its packages; None: this one's"""
        folder.mkdir(parents=True, exist_ok=True)
        self.engine, self._log = engine, folder / f"{engine}.log"
        command = [*worker_command(python), engine, shape, str(folder), str(threads)]
        self._started = time.perf_counter()
        self.ready_s = 0.0  # from the start of the process to a loaded engine, without the files prepared for it
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env={**os.environ, **(environment or {}), "OMP_NUM_THREADS": str(threads)},
            )  # fmt: skip

    def wait_until_ready(self) -> None:
        """raises EngineFailedError"""
        prepared_s = float(self._read()["prepared_s"])
        self.ready_s = time.perf_counter() - self._started - prepared_s

    def ask(self, do: str, workload: str = "") -> dict[str, Any]:
        """raises EngineFailedError"""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, "workload": workload}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it is dead: reading says why
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            last = self._log.read_text(errors="replace").strip().splitlines()[-1:]
            raise EngineFailedError(": ".join([f"ended with code {code}", *last, f"more in {self._log.name}"]))
        reply: dict[str, Any] = json.loads(line)
        return reply

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
