"""Scan of the structure of JSON before it is decoded: a decoded value may take a hundred times the bytes of its text.

NumPy scans pieces and lets other threads run meanwhile; a decoder holds the interpreter lock until it is done.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

PIECE = 1 << 18  # bytes: a fraction of a millisecond at a time
_FEW = 50_000  # values, whose count need not be exact: they take at most some 5 MB
_QUOTE, _BACKSLASH, _COMMA = b'"\\,'
_OPENING, _CLOSING = b"[{", b"]}"
Bytes = NDArray[np.uint8]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class JsonPiece:
    """A piece of a JSON text.

    at: its offset in the text; plain: which bytes lie outside of strings; depth: of lists and objects, after each byte
    """

    at: int
    data: Bytes
    plain: Flags
    opens: Flags
    closes: Flags
    depth: NDArray[np.int64]

    @property
    def commas(self) -> Flags:
        flags: Flags = (self.data == _COMMA) & self.plain
        return flags


def scan_pieces(text: bytes | memoryview, depth: int = 0) -> Iterator[JsonPiece]:
    """Yield the structure of a text, which need not be valid JSON. depth: before its first byte"""
    everything = np.frombuffer(text, np.uint8)
    inside = is_escaped = False
    for at in range(0, len(everything), PIECE):
        data = everything[at : at + PIECE]
        quotes, is_escaped = _quotes(data, is_escaped)
        within = np.logical_xor.accumulate(np.concatenate(([inside], quotes)))[1:]
        inside = bool(within[-1])
        plain = ~(within | quotes)
        opens = ((data == _OPENING[0]) | (data == _OPENING[1])) & plain
        closes = ((data == _CLOSING[0]) | (data == _CLOSING[1])) & plain
        depths = depth + np.cumsum(opens.astype(np.int8) - closes.astype(np.int8), dtype=np.int64)
        depth = int(depths[-1])
        yield JsonPiece(at, data, plain, opens, closes, depths)


def _quotes(data: Bytes, is_escaped: bool) -> tuple[Flags, bool]:
    """Return where strings begin or end, and whether the next piece's first byte is escaped.

    is_escaped: whether the first byte of this piece is
    """
    quotes = data == _QUOTE
    slashes = np.flatnonzero(data == _BACKSLASH)
    if is_escaped:
        quotes[0] = False
        slashes = slashes[1:] if len(slashes) and slashes[0] == 0 else slashes
    if not len(slashes):
        return quotes, False
    begins = np.concatenate(([True], np.diff(slashes) != 1))  # of runs, of which each second one is escaped itself
    first = np.maximum.accumulate(np.where(begins, np.arange(len(slashes)), 0))
    escaping = slashes[(np.arange(len(slashes)) - first) % 2 == 0]
    escaped = escaping[escaping + 1 < len(data)] + 1
    quotes[escaped] = False
    return quotes, bool(len(escaping) and escaping[-1] == len(data) - 1)


@dataclass(frozen=True, slots=True)
class JsonCounts:
    """Upper bounds of the values in a text, containers among them, and of its containers: lists and objects."""

    values: int
    containers: int


def count_values(text: bytes) -> JsonCounts:
    """Count the values of a text; if it has few commas and brackets, those within strings are counted, too."""
    n_containers = text.count(_OPENING[:1]) + text.count(_OPENING[1:])
    n_values = text.count(b",") + n_containers + 1
    if n_values <= _FEW:
        return JsonCounts(n_values, n_containers)
    n_values, n_containers = 1, 0
    for piece in scan_pieces(text):
        n_containers += _n(piece.opens)
        n_values += _n(piece.opens) + _n(piece.commas)
    return JsonCounts(n_values, n_containers)


def _n(flags: Any) -> int:
    return int(np.count_nonzero(flags))
