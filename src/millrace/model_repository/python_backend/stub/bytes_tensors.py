"""BYTES tensors: arrays of `bytes` objects, and their encoding (each element after its 4-byte length)."""

import itertools
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

_LENGTH = struct.Struct("<I")
_PIECE = 1 << 15  # elements
_MAX_COUNTED = 100_000  # surplus elements that are counted for an error
Array = np.ndarray[Any, np.dtype[Any]]


def objects(values: Sequence[bytes]) -> Array:
    array = np.empty(len(values), dtype=np.object_)
    for i in range(0, len(values), _PIECE):  # in pieces, because each assignment holds the GIL
        array[i : i + _PIECE] = values[i : i + _PIECE]
    return array


def text(value: str | bytes) -> str:
    """Return a name or message as str; Triton also accepts bytes. raises TypeError"""
    if not isinstance(value, str | bytes):
        raise TypeError(f"a name or a message is str or bytes, and this is {type(value).__name__}")
    return value.decode() if isinstance(value, bytes) else value


class CutOffError(ValueError):
    """Truncated strings. in_length: within the 4 bytes of a length. needed, n_there: expected and existing bytes"""

    def __init__(self, in_length: bool, needed: int, n_there: int) -> None:
        super().__init__("its last string ends too early")
        self.in_length, self.needed, self.n_there = in_length, needed, n_there


def split_strings(data: bytes | memoryview) -> list[bytes]:
    """Return the elements of encoded BYTES. raises CutOffError"""
    return split_up_to(data, len(data))[0]


def split_up_to(data: bytes | memoryview, limit: int) -> tuple[list[bytes], int]:
    """Return the first `limit` elements of encoded BYTES, and the number of further ones (counted up to a bound).

    raises CutOffError
    """
    elements, at, end, n_more = list[bytes](), 0, len(data), 0
    take = _LENGTH.unpack_from
    while at < end and n_more <= _MAX_COUNTED:
        if at + 4 > end:
            raise CutOffError(True, 4, end - at)
        n = take(data, at)[0]
        at += 4
        if at + n > end:
            raise CutOffError(False, n, end - at)
        if len(elements) < limit:
            elements.append(bytes(data[at : at + n]))
        else:
            n_more += 1
        at += n
    return elements, n_more


def join_strings(values: Iterable[bytes]) -> bytes:
    return b"".join(join_in_pieces(values))


def join_in_pieces(values: Iterable[bytes]) -> Iterator[bytes]:
    """Encode in pieces, each of which holds the GIL for a few milliseconds."""
    rest = iter(values)
    while piece := [len(v).to_bytes(4, "little") + v for v in itertools.islice(rest, _PIECE)]:
        yield b"".join(piece)
