"""Estimate of whether an instance computes faster than another thread would wake up."""

QUICK_NS = 100_000  # roughly the cost of handing a request to another thread and back
MAX_BYTES = 64 << 10
_N_QUICK = 50  # surplus of quick computations before the estimate is used
_SLOW = 20  # quick computations that offset a slow one: on a busy machine any may be interrupted
_VERY_SLOW_NS = 50 * QUICK_NS  # long enough to delay other requests, so never taken as an interruption
_MAX_WAITING_NS = 10 * QUICK_NS  # up to here a thread may have waited for the GIL; beyond, for its own threads
_PAUSE = 1000  # further quick computations required after too many slow ones


class Pace:
    """Pace of an instance whose time depends only on the size of its inputs.

    max_inline_bytes: inputs of at most this many bytes are computed quickly; 0: none
    """

    def __init__(self) -> None:
        self.max_inline_bytes = 0
        self._score = self._largest = 0

    def record(self, n_bytes: int, took_ns: int, cpu_ns: int | None = None) -> None:
        """Record a computation. n_bytes: of its inputs; cpu_ns: CPU time of its thread, which may have waited"""
        if n_bytes > MAX_BYTES:
            return
        if cpu_ns is not None and took_ns <= _MAX_WAITING_NS:
            took_ns = cpu_ns
        if took_ns > QUICK_NS:
            self._slow(took_ns)
            return
        self._score = min(self._score + 1, _N_QUICK)
        self._largest = max(self._largest, n_bytes)
        if self._score == _N_QUICK:
            self.max_inline_bytes = self._largest

    def _slow(self, took_ns: int) -> None:
        if self.max_inline_bytes:
            self._score -= _SLOW
            if self._score < 0 or took_ns > _VERY_SLOW_NS:
                self.max_inline_bytes, self._largest, self._score = 0, 0, -_PAUSE
        else:
            self._score = max(min(self._score, 0), self._score - _SLOW)
            self._largest = 0 if self._score <= 0 else self._largest
