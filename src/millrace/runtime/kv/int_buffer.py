"""A growing array of int32: the tokens of a sequence, or its page table."""

from collections.abc import Sequence

import numpy as np

from millrace.engine.executor import IntArray


class IntBuffer:
    """An int32 array that grows; slices do not copy."""

    __slots__ = ("_data", "_n")

    def __init__(self, start: IntArray | Sequence[int] = ()) -> None:
        self._n = len(start)
        self._data = np.empty(max(16, self._n + 16), dtype=np.int32)
        self._data[: self._n] = start

    def __len__(self) -> int:
        return self._n

    @property
    def array(self) -> IntArray:
        """The current values (n,): a view that the next append may invalidate."""
        return self._data[: self._n]

    def part(self, start: int, end: int) -> IntArray:
        """Return `array[start:end]`. Both must be within the array."""
        return self._data[start:end]

    def append(self, value: int) -> None:
        if self._n == len(self._data):
            self._grow(self._n + 1)
        self._data[self._n] = value
        self._n += 1

    def extend(self, values: Sequence[int]) -> None:
        n = self._n + len(values)
        if n > len(self._data):
            self._grow(n)
        self._data[self._n : n] = values
        self._n = n

    def clear(self) -> None:
        self._n = 0

    def _grow(self, n: int) -> None:
        grown = np.empty(max(n, 2 * len(self._data)), dtype=np.int32)
        grown[: self._n] = self._data[: self._n]
        self._data = grown
