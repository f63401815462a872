"""Long texts are tokenised in a process of their own, at the lowest priority.

In a thread of the server they hold up every stream twice: they take a core from a kernel's workers, which meet at a
barrier, and a thread of low priority that holds the interpreter's lock is waited for by the one of high priority.
"""

import json
import sys
import threading
from pathlib import Path

import numpy as np

from millrace.checkpoint.frames import EndedError, FrameProcess, LateError
from millrace.errors import CheckpointError

_WORKER = Path(__file__).with_name("tokenizer_worker.py")


class TokenizerProcess:
    """The tokenizer of a folder. Safe to use from several threads, which take turns; starts with the first text."""

    def __init__(self, folder: Path, timeout_s: float = 120.0) -> None:
        self._folder = folder
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._process: FrameProcess | None = None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """`text` holds no half of a surrogate pair. raises CheckpointError where the process cannot do it"""
        payload = (b"\1" if add_special_tokens else b"\0") + text.encode()
        with self._lock:
            try:
                answer = self._started().exchange(payload, self._timeout_s)
            except (LateError, EndedError) as error:
                raise CheckpointError(
                    f"a text of {len(text):,} characters was not tokenised: the process for it "
                    + ("took too long" if isinstance(error, LateError) else "ended"),
                    f"tokens within {self._timeout_s:g} s and the machine's memory",
                    "send a shorter text, or try again when the machine is less busy",
                ) from None
        ids: list[int] = np.frombuffer(answer, np.int32).tolist()
        return ids

    def close(self) -> None:
        """Stop the process; a later text would start it again."""
        with self._lock:
            if self._process is not None:
                self._process.close()
            self._process = None

    def _started(self) -> FrameProcess:
        if self._process is None or not self._process.alive:
            self._process = FrameProcess(_WORKER)
            load = {"folder": str(self._folder), "path": sys.path}
            self._process.exchange(json.dumps(load).encode(), self._timeout_s)
        return self._process
