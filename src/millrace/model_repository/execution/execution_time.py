"""Estimates whether an instance computes faster than another thread would wake up."""

QUICK_NS = 100_000  # about what handing a request to another thread, and its answer back, costs
MOST_BYTES = 64 << 10
_N_QUICK = 50  # more than slow ones, before it is relied upon
_SLOW = 20  # quick ones that make up for a slow one: on a busy machine any computation may be interrupted
_VERY_SLOW_NS = 50 * QUICK_NS  # what would hold up other requests: it counts as no interruption
_MOST_WAITING_NS = 10 * QUICK_NS  # of a thread, for the interpreter's lock; longer ones wait for their own threads
_PAUSE = 1000  # further ones, after it was too often slow


class Pace:
    """The pace of an instance whose time depends on the sizes of its inputs alone.

    quick_bytes: inputs of at most so many bytes are computed quickly; 0: none
    """

    def __init__(self) -> None:
        self.quick_bytes = 0
        self._score = self._largest = 0

    def took(self, n_bytes: int, took_ns: int, cpu_ns: int | None = None) -> None:
        """Record a computation. n_bytes: of its inputs; cpu_ns: CPU time of its thread, which may have waited"""
        if n_bytes > MOST_BYTES:
            return
        if cpu_ns is not None and took_ns <= _MOST_WAITING_NS:
            took_ns = cpu_ns
        if took_ns > QUICK_NS:
            self._slow(took_ns)
            return
        self._score = min(self._score + 1, _N_QUICK)
        self._largest = max(self._largest, n_bytes)
        if self._score == _N_QUICK:
            self.quick_bytes = self._largest

    def _slow(self, took_ns: int) -> None:
        if self.quick_bytes:
            self._score -= _SLOW
            if self._score < 0 or took_ns > _VERY_SLOW_NS:
                self.quick_bytes, self._largest, self._score = 0, 0, -_PAUSE
        else:
            self._score = max(min(self._score, 0), self._score - _SLOW)
            self._largest = 0 if self._score <= 0 else self._largest
