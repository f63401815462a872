"""Choice of the Python interpreter of a model, and stub processes that run it."""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from millrace.env import for_process
from millrace.model_repository.config.model_config import ModelConfig
from millrace.model_repository.lifecycle.override_checks import ENVIRONMENT, MODEL_FOLDER
from millrace.model_repository.python_backend import stub
from millrace.model_repository.python_backend.python_host import LOG
from millrace.model_repository.python_backend.stub.ipc import Frames
from millrace.model_repository.python_backend.stub.shared_memory import Arena, Mapped
from millrace.model_repository.python_backend.stub.stub_process import MAX_SHARED_BYTES
from millrace.model_repository.request.status_code import invalid

_STUB = Path(stub.__file__).with_name("__main__.py")
PROCESS = "MILLRACE_PROCESS"
_MAX_LINE_BYTES = 4000
_END_S = 5.0  # time for a process to end, or for its end to become known


@dataclass(frozen=True)
class Python:
    """An interpreter. own: the server's interpreter, with its environment"""

    file: Path
    own: bool


def resolve_python(config: ModelConfig, folder: Path) -> Python | None:
    """Return the interpreter from the model's parameters; None for the server's own process. raises StatusError"""
    parameters = {name: value.string_value for name, value in config.parameters.items()}
    environment, process = parameters.get(ENVIRONMENT, ""), parameters.get(PROCESS, "")
    if process not in ("", "own", "server"):
        raise invalid(f"parameter {PROCESS} of model '{config.name}' is '{process:.40}': expected own or server")
    if environment and process == "server":
        raise invalid(f"model '{config.name}' has {ENVIRONMENT} and {PROCESS} \"server\": leave out one of them")
    if not environment:
        return Python(Path(sys.executable), True) if process == "own" else None
    path = Path(
        str(folder) + environment.removeprefix(MODEL_FOLDER) if environment.startswith(MODEL_FOLDER) else environment
    )
    where = f"{ENVIRONMENT} of model '{config.name}', '{environment:.200}',"
    if not path.is_absolute():
        raise invalid(f"{where} is a relative path: begin it with / or {MODEL_FOLDER}")
    if ".." in path.parts:
        raise invalid(f"{where} has .. in it: name the folder itself")
    if path.is_dir():
        executable = next(
            (path / "bin" / name for name in ("python", "python3") if (path / "bin" / name).is_file()), None
        )
        if executable is None:
            raise invalid(f"{where} is a folder without bin/python: name a virtual or conda environment")
        return Python(executable, False)
    if path.name.endswith((".tar.gz", ".tgz", ".tar", ".zip")):
        raise invalid(f"{where} is an archive: unpack it, and name its folder")
    if not path.is_file() or not os.access(path, os.X_OK):
        raise invalid(f"{where} is neither an environment's folder nor an interpreter")
    return Python(path, False)


class StubProcess:
    """A stub process and its socket; its output is logged line by line."""

    def __init__(self, python: Python, name: str, threads: int = 1) -> None:
        """threads: limit for its numerical libraries. raises StatusError"""
        self.name, self._kill_reason = name, ""
        self._lines: deque[str] = deque(maxlen=3)  # the last lines, which may explain its end
        ours, theirs = socket.socketpair()
        # -E: ignore the server's PYTHONPATH and PYTHONHOME.
        command = [str(python.file), *(() if python.own else ("-E",)), "-u", str(_STUB), str(theirs.fileno())]
        try:
            with theirs:
                # A new session, so that a terminal's interrupt reaches the server alone.
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(),), start_new_session=True, env=for_process(threads),
                )  # fmt: skip
        except OSError as error:
            ours.close()
            raise invalid(f"{python.file} cannot be run: {error.strerror}") from None
        self.frames = Frames(ours, Arena(MAX_SHARED_BYTES), Mapped(writable=False))
        self._printing = threading.Thread(target=self._print, name=f"millrace-{name}-log", daemon=True)
        self._printing.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self, reason: str) -> None:
        self._kill_reason = self._kill_reason or reason
        self._process.kill()

    def exit_reason(self) -> str:
        """Wait for the end of the process and describe it, with its last output."""
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._end_group()
        self._printing.join(_END_S)
        how = f"its process ended with code {code}"
        if code < 0:
            with contextlib.suppress(ValueError):
                how = f"its process was ended by {signal.Signals(-code).name}"
        if self._kill_reason:
            return f"{how}: {self._kill_reason}"
        return f"{how}: {' / '.join(self._lines)}" if self._lines and code > 0 else how

    def _end_group(self) -> None:
        """Kill processes that the stub started and left behind."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the socket, which ends the process; kill it if it does not end in time."""
        self.frames.shut()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._end_group()

    def _print(self) -> None:
        assert self._process.stdout is not None, "it was asked for"
        with self._process.stdout as pipe:
            while line := pipe.readline(_MAX_LINE_BYTES):
                text = line.decode("utf-8", "replace").rstrip()
                if text:
                    self._lines.append(text)
                    LOG.log(logging.INFO, "%s: %s", self.name, text)
