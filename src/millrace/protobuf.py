"""Reads and writes protobuf's wire format without a schema.

Specification: https://protobuf.dev/programming-guides/encoding/
"""

from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
MAX_VARINT = 10  # bytes
_SIZES = {FIXED64: 8, FIXED32: 4}


class WireError(ValueError):
    """The bytes are not a message: a field exceeds them, or has an unknown wire type."""


def fields(
    data: bytes | memoryview, begin: int = 0, end: int | None = None
) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield the fields of a message: number, wire type, and the offsets of its key, its content and its end.

    begin, end: offsets of the message in `data`. raises WireError
    """
    at, end = begin, len(data) if end is None else end
    while at < end:
        key_at = at
        key, at = read_varint(data, at)
        kind = key & 7
        content_at = at
        if kind == VARINT:
            _, at = read_varint(data, at)
        elif kind == BYTES:
            size, content_at = read_varint(data, at)
            at = content_at + size
        elif kind in _SIZES:
            at += _SIZES[kind]
        else:
            raise WireError(f"field {key >> 3} has wire type {kind}")
        if at > end:
            raise WireError(f"field {key >> 3} ends outside its message")
        yield key >> 3, kind, key_at, content_at, at


def read_varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """Return the number at an offset, and the offset after it. raises WireError"""
    value = shift = 0
    for i in range(at, min(at + MAX_VARINT, len(data))):
        byte = data[i]
        value |= (byte & 127) << shift
        if byte < 128:
            return value, i + 1
        shift += 7
    raise WireError("a number has no end")


def varint(value: int) -> bytes:
    """Return a non-negative number encoded as a varint."""
    if value < 128:
        return bytes((value,))
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def key(number: int, kind: int) -> bytes:
    """Return the key that precedes a field's content. kind: its wire type"""
    return varint(number << 3 | kind)


def bytes_field(number: int, content: bytes) -> bytes:
    """Return a length-delimited field: bytes, text or a message."""
    return key(number, BYTES) + varint(len(content)) + content
