"""Packed repeated fields of protobuf as arrays, without an object for each number.

Specification: https://protobuf.dev/programming-guides/encoding/#packed
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.protobuf import MAX_VARINT

CONTINUES = 0x80  # set in every byte of a varint but its last


def unpack_numbers(packed: memoryview, dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """Return the values of a packed field, or None if they are malformed. dtype: of the field; floats have its size

    Integers of more bits than the field holds lose the upper ones, as in every reader of protobuf.
    """
    if dtype.kind == "f":
        return None if len(packed) % dtype.itemsize else np.frombuffer(packed, dtype)
    integers = _varints(np.frombuffer(packed, np.uint8))
    return None if integers is None else integers.astype(dtype)


def _varints(data: NDArray[np.uint8]) -> NDArray[Any] | None:
    """Return unsigned integers of 8 or 64 bits."""
    if not len(data) or data.max() < CONTINUES:
        return data
    ends = np.flatnonzero(data < CONTINUES)
    if not len(ends) or ends[-1] != len(data) - 1:
        return None
    starts = np.concatenate((ends[:1] * 0, ends[:-1] + 1))
    lengths = ends - starts + 1
    if lengths.max() > MAX_VARINT:
        return None
    place = np.arange(len(data), dtype=np.uint64) - np.repeat(starts, lengths).astype(np.uint64)
    bits = (data & (CONTINUES - 1)).astype(np.uint64) << (7 * place)
    return np.bitwise_or.reduceat(bits, starts)
