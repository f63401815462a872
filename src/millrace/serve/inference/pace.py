"""How long an instance computes, by which it is known whether another thread would take longer to wake up."""

QUICK_NS = 100_000  # about what handing a request to another thread, and its answer back, costs
MOST_BYTES = 64 << 10
_N_QUICK = 50  # in a row, before it is relied upon
_PAUSE = 1000  # further ones, after one that was slow


class Pace:
    """Of an instance whose time depends on its inputs' sizes alone. quick_bytes: inputs of no more bytes are quick"""

    def __init__(self) -> None:
        self.quick_bytes = 0
        self._n_quick = self._largest = 0

    def took(self, n_bytes: int, took_ns: int) -> None:
        """It computed inputs of so many bytes."""
        if n_bytes > MOST_BYTES:
            return
        if took_ns > QUICK_NS:
            self.quick_bytes, self._largest, self._n_quick = 0, 0, -_PAUSE if self.quick_bytes else 0
            return
        self._n_quick += 1
        self._largest = max(self._largest, n_bytes)
        if self._n_quick >= _N_QUICK:
            self.quick_bytes = self._largest
