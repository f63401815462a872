"""The process that tokenizes long texts; its stdin is a connection to its owner (see `worker_process.py`).

The first message is JSON {"folder", "files", "path"}: the folder for messages, the files' contents by name in base64,
sys.path. The answer is an empty message. Each later message is one byte (1: add special tokens) and a text in UTF-8;
the answer is its tokens as int32.
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
MEMORY_BYTES = 8 * 2**30  # address space in addition to the process's own; 8 million tokens take 2 GiB
_PR_SET_PDEATHSIG = 1  # prctl(2), Linux


def _let_the_engine_go_first() -> None:
    """Use idle CPU time only: next to busy workers 0.3 % of a core; nice 19 would get 1.5 %, 4 ms at a time."""
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(LOWEST_PRIORITY)


def _go_on_when_the_owner_ends() -> None:
    """Continue if the owner ends: otherwise a process that it had suspended would stay suspended forever."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C in a terminal
    _let_the_engine_go_first()
    _go_on_when_the_owner_ends()
    owner = Connection(0)
    with contextlib.suppress(EOFError, OSError):  # the owner is gone
        _serve(owner)


def _serve(owner: Connection) -> None:
    opened = json.loads(owner.recv_bytes())
    sys.path[:] = opened["path"]  # the parent's: it may run from a source tree
    import numpy as np

    from millrace.checkpoint.tokenizer.tokenizer_files import make_tokenizer
    from millrace.machine.address_space import limit_address_space

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
