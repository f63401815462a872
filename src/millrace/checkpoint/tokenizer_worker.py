"""The process that tokenises long texts: frames of stdin and stdout as in `frames.py`.

First JSON {"folder", "path"}, answered by an empty frame; then, any number of times, one byte (1: with the special
tokens of the model) and a text in UTF-8, answered by its tokens as int32.
"""

import json
import os
import signal
import sys
from pathlib import Path

LOWEST_PRIORITY = 19


def _let_the_engine_go_first() -> None:
    """Whatever is left of the cores: beside busy workers 0.3 % of one, nice 19 would get 1.5 %, 4 ms a time."""
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(LOWEST_PRIORITY)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is the parent's business
    _let_the_engine_go_first()
    source, to = sys.stdin.buffer, sys.stdout.buffer

    def read() -> bytes | None:
        head = source.read(4)
        return source.read(int.from_bytes(head, "big")) if len(head) == 4 else None

    def write(payload: bytes) -> None:
        to.write(len(payload).to_bytes(4, "big") + payload)
        to.flush()

    load = read()
    if load is None:
        return
    opened = json.loads(load)
    sys.path[:] = opened["path"]  # as the parent sees it: it may run from a source tree
    import numpy as np

    from millrace.checkpoint.tokenizer import open_tokenizer

    tokenizer = open_tokenizer(Path(opened["folder"]))
    write(b"")
    while (frame := read()) is not None:
        ids = tokenizer.encode(frame[1:].decode(), add_special_tokens=frame[:1] == b"\1")
        write(np.array(ids, np.int32).tobytes())


if __name__ == "__main__":
    main()
