"""Packed repeated fields of protobuf as arrays, without an object for each number.

Specification: https://protobuf.dev/programming-guides/encoding/#packed
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.protobuf import MAX_VARINT

CONTINUES = 0x80  # set in every byte of a varint but its last
_DTYPES: dict[str, Any] = {
    "bool_contents": np.bool_, "int_contents": np.int32, "int64_contents": np.int64, "uint_contents": np.uint32,
    "uint64_contents": np.uint64, "fp32_contents": np.dtype("<f4"), "fp64_contents": np.dtype("<f8"),
}  # fmt: skip


def is_fixed(field: str) -> bool:
    """Return whether the numbers of a field of InferTensorContents have 4 or 8 bytes each."""
    return field in ("fp32_contents", "fp64_contents")


def numbers(field: str, packed: memoryview) -> NDArray[Any] | None:
    """Return the values of a packed field of InferTensorContents, or None if they are malformed.

    Integers of more bits than the field holds lose the upper ones, as in every reader of protobuf.
    """
    dtype = np.dtype(_DTYPES[field])
    if is_fixed(field):
        return None if len(packed) % dtype.itemsize else np.frombuffer(packed, dtype)
    found = _varints(np.frombuffer(packed, np.uint8))
    return None if found is None else found.astype(dtype)


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
