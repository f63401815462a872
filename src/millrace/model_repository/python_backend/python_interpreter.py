"""Which Python a model runs in, and a process of it."""

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
from millrace.model_repository.python_backend.stub.stub_process import MOST_SHARED_BYTES
from millrace.model_repository.request.status_code import invalid

_STUB = Path(stub.__file__).with_name("__main__.py")
PROCESS = "MILLRACE_PROCESS"
_LONGEST_LINE = 4000
_END_S = 5.0  # for a process that is told to end, and for one that is gone to be known as such


@dataclass(frozen=True)
class Python:
    """own: the server's own interpreter, with its environment"""

    file: Path
    own: bool


def python_of(config: ModelConfig, folder: Path) -> Python | None:
    """By the model's parameters; None: the server's own process. raises StatusError"""
    parameters = {name: value.string_value for name, value in config.parameters.items()}
    said, process = parameters.get(ENVIRONMENT, ""), parameters.get(PROCESS, "")
    if process not in ("", "own", "server"):
        raise invalid(f"parameter {PROCESS} of model '{config.name}' is '{process:.40}': expected own or server")
    if said and process == "server":
        raise invalid(f"model '{config.name}' has {ENVIRONMENT} and {PROCESS} \"server\": leave out one of them")
    if not said:
        return Python(Path(sys.executable), True) if process == "own" else None
    path = Path(str(folder) + said.removeprefix(MODEL_FOLDER) if said.startswith(MODEL_FOLDER) else said)
    where = f"{ENVIRONMENT} of model '{config.name}', '{said:.200}',"
    if not path.is_absolute():
        raise invalid(f"{where} is a relative path: begin it with / or {MODEL_FOLDER}")
    if ".." in path.parts:
        raise invalid(f"{where} has .. in it: name the folder itself")
    if path.is_dir():
        found = next((path / "bin" / name for name in ("python", "python3") if (path / "bin" / name).is_file()), None)
        if found is None:
            raise invalid(f"{where} is a folder without bin/python: name a virtual or conda environment")
        return Python(found, False)
    if path.name.endswith((".tar.gz", ".tgz", ".tar", ".zip")):
        raise invalid(f"{where} is an archive: unpack it, and name its folder")
    if not path.is_file() or not os.access(path, os.X_OK):
        raise invalid(f"{where} is neither an environment's folder nor an interpreter")
    return Python(path, False)


class Child:
    """A process with a socket to it; what it writes goes to the log, line by line."""

    def __init__(self, python: Python, name: str, threads: int = 1) -> None:
        """threads: that its numbers may be computed with. raises StatusError"""
        self.name, self._why = name, ""
        self._lines: deque[str] = deque(maxlen=3)  # its last ones, which may say why it ended
        ours, theirs = socket.socketpair()
        # -E: PYTHONPATH and PYTHONHOME are the server's, and not those of another environment.
        command = [str(python.file), *(() if python.own else ("-E",)), "-u", str(_STUB), str(theirs.fileno())]
        try:
            with theirs:
                # A session of its own: what interrupts the server from a terminal is not for it.
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(),), start_new_session=True, env=for_process(threads),
                )  # fmt: skip
        except OSError as error:
            ours.close()
            raise invalid(f"{python.file} cannot be run: {error.strerror}") from None
        self.frames = Frames(ours, Arena(MOST_SHARED_BYTES), Mapped(writable=False))
        self._printing = threading.Thread(target=self._print, name=f"millrace-{name}-log", daemon=True)
        self._printing.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self, why: str) -> None:
        self._why = self._why or why
        self._process.kill()

    def how_it_ended(self) -> str:
        """Waits for the end, which has come, or is near. With what it wrote last."""
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
        if self._why:
            return f"{how}: {self._why}"
        return f"{how}: {' / '.join(self._lines)}" if self._lines and code > 0 else how

    def _end_group(self) -> None:
        """What it started, and left behind, ends with it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """It ends when nobody is at the other end of the socket; and otherwise all the same."""
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
            while line := pipe.readline(_LONGEST_LINE):
                text = line.decode("utf-8", "replace").rstrip()
                if text:
                    self._lines.append(text)
                    LOG.log(logging.INFO, "%s: %s", self.name, text)
