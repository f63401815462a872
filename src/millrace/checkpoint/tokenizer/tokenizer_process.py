"""Tokenizes long texts in a separate process, at the lowest priority.

In a thread of the server they would delay every stream twice: they take a core from a kernel's worker thread, for which
the other workers wait; and a low-priority thread that holds the interpreter lock blocks the high-priority one.
"""

import base64
import json
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from millrace.checkpoint.tokenizer.tokenizer import TOKENIZER_FILES, Files, read_files
from millrace.errors import CheckpointError
from millrace.machine.worker_process import FrameProcess, WorkerDiedError, WorkerProcess, WorkerTimeoutError

_WORKER = Path(__file__).with_name("tokenizer_worker.py")


class TokenizerProcess:
    """The tokenizer of a folder. Thread-safe: one text at a time. The process starts with the first text.

    The folder is read at construction, so that every process tokenizes alike even if the files change.
    """

    def __init__(self, folder: Path, timeout_s: float = 120.0) -> None:
        self._timeout_s = timeout_s
        files = read_files(folder, TOKENIZER_FILES)
        self._worker = WorkerProcess(_WORKER, partial(_greet, folder, files, timeout_s))
        self.hold = self._worker.pause

    def encode(self, text: str, add_special_tokens: bool) -> Sequence[int]:
        """Return the tokens of a text without lone surrogates. raises CheckpointError if that fails

        They are an array, because millions of Python integers take long to create and free, with the interpreter lock
        held.
        """
        payload = (b"\1" if add_special_tokens else b"\0") + text.encode()
        with _tokenising(f"a text of {len(text):,} characters was not tokenised", self._timeout_s):
            answer = self._worker.exchange(payload, self._timeout_s)
        ids = array("i")
        ids.frombytes(answer)
        return ids

    def close(self) -> None:
        """Stop the process, even during a text; a later text starts it again."""
        self._worker.stop()


def _greet(folder: Path, files: Files, timeout_s: float, process: FrameProcess) -> None:
    contents = {name: base64.b64encode(data).decode() for name, data in files.items()}
    hello = {"folder": str(folder), "files": contents, "path": sys.path}
    with _tokenising("the tokenizer's files were not read", timeout_s):
        process.exchange(json.dumps(hello).encode(), timeout_s)


@contextmanager
def _tokenising(what_failed: str, timeout_s: float) -> Iterator[None]:
    """Convert errors: raises CheckpointError if the process ends or takes too long"""
    try:
        yield
    except (WorkerTimeoutError, WorkerDiedError) as error:
        raise CheckpointError(
            f"{what_failed}: its process {'took too long' if isinstance(error, WorkerTimeoutError) else 'ended'}",
            f"tokens within {timeout_s:g} s and the machine's memory",
            "send a shorter text, or try again when the machine is less busy",
        ) from None
