"""Strings in tensors: arrays of `bytes` objects, and the bytes of BYTES (each element after its length)."""

import itertools
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

_LENGTH = struct.Struct("<I")
_PIECE = 1 << 15  # elements
_LOOKS = 100_000  # at elements that are too many
Array = np.ndarray[Any, np.dtype[Any]]


def objects(values: Sequence[bytes]) -> Array:
    array = np.empty(len(values), dtype=np.object_)
    for i in range(0, len(values), _PIECE):  # each holds the interpreter
        array[i : i + _PIECE] = values[i : i + _PIECE]
    return array


def text(value: str | bytes) -> str:
    """A name or a message, which Triton takes as bytes, too: elements of BYTES are some. raises TypeError"""
    if not isinstance(value, str | bytes):
        raise TypeError(f"a name or a message is str or bytes, and this is {type(value).__name__}")
    return value.decode() if isinstance(value, bytes) else value


class CutOffError(ValueError):
    """Strings that end too early. in_length: inside the four bytes of a length. Of `needed` bytes, `n_there`"""

    def __init__(self, in_length: bool, needed: int, n_there: int) -> None:
        super().__init__("its last string ends too early")
        self.in_length, self.needed, self.n_there = in_length, needed, n_there


def split_strings(data: bytes | memoryview) -> list[bytes]:
    """The elements of BYTES. raises CutOffError"""
    return split_up_to(data, len(data))[0]


def split_up_to(data: bytes | memoryview, most: int) -> tuple[list[bytes], int]:
    """The elements of BYTES, the first `most` of them, and how many more there are; some are looked at.

    raises CutOffError
    """
    found, at, end, n_more = list[bytes](), 0, len(data), 0
    take = _LENGTH.unpack_from
    while at < end and n_more <= _LOOKS:
        if at + 4 > end:
            raise CutOffError(True, 4, end - at)
        n = take(data, at)[0]
        at += 4
        if at + n > end:
            raise CutOffError(False, n, end - at)
        if len(found) < most:
            found.append(bytes(data[at : at + n]))
        else:
            n_more += 1
        at += n
    return found, n_more


def joined_strings(values: Iterable[bytes]) -> bytes:
    return b"".join(joined_pieces(values))


def joined_pieces(values: Iterable[bytes]) -> Iterator[bytes]:
    """The same in pieces, of which each holds the interpreter for a few milliseconds."""
    rest = iter(values)
    while piece := [len(v).to_bytes(4, "little") + v for v in itertools.islice(rest, _PIECE)]:
        yield b"".join(piece)
