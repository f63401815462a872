"""Signal handling that unwinds the stack, so that temporary files are removed."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Make SIGTERM and SIGHUP unwind the block like Ctrl-C, and end the process with 128 + signal; a second one at
    once.

    Only in the main thread. Signals that are ignored (nohup) or handled already are left alone.
    """
    ours = [s for s in _SIGNALS if signal.getsignal(s) == signal.SIG_DFL]

    def restore() -> None:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)

    def end(number: int, frame: FrameType | None) -> None:
        restore()
        raise SystemExit(128 + number)

    try:
        for number in ours:
            signal.signal(number, end)
        yield
    finally:
        restore()
