"""The process that tokenises long texts; its stdin is a connection to its owner (see `worker_process.py`).

First JSON {"folder", "files", "path"}: the files' contents by name in base64, the folder for messages. The answer is an
empty message. Then, any number of times, one byte (1: with the special tokens of the model) and a text in UTF-8; the
answer is its tokens as int32.
"""

import base64
import contextlib
import ctypes
import json
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

LOWEST_PRIORITY = 19
MEMORY_BYTES = 8 * 2**30  # address space beyond what the process needs for itself; 8 million tokens take 2 GiB
_PR_SET_PDEATHSIG = 1  # prctl(2), Linux


def _let_the_engine_go_first() -> None:
    """Whatever is left of the cores: beside busy workers 0.3 % of one, nice 19 would get 1.5 %, 4 ms a time."""
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(LOWEST_PRIORITY)


def _go_on_when_the_owner_ends() -> None:
    """A process that its owner has stopped for a moment would otherwise stay so for ever when the owner is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is the parent's business
    _let_the_engine_go_first()
    _go_on_when_the_owner_ends()
    owner = Connection(0)
    with contextlib.suppress(EOFError, OSError):  # the owner is gone
        _serve(owner)


def _serve(owner: Connection) -> None:
    opened = json.loads(owner.recv_bytes())
    sys.path[:] = opened["path"]  # as the parent sees it: it may run from a source tree
    import numpy as np

    from millrace.checkpoint.address_space import limit_address_space
    from millrace.checkpoint.tokenizer.tokenizer_files import make_tokenizer

    files = {name: base64.b64decode(data) for name, data in opened["files"].items()}
    tokenizer = make_tokenizer(files, Path(opened["folder"]))
    limit_address_space(MEMORY_BYTES)
    owner.send_bytes(b"")
    while True:
        text = owner.recv_bytes()
        ids = tokenizer.encode(text[1:].decode(), add_special_tokens=text[:1] == b"\1")
        owner.send_bytes(np.array(ids, np.int32).tobytes())


if __name__ == "__main__":
    main()
