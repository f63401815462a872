"""Large JSON of an inference: tensor data is cut out, compared with the shapes, and decoded in pieces.

The rest, names and shapes, is small and decoded at once. Nothing holds the interpreter lock for longer than a piece
takes, and no element is decoded before the number of elements is known to fit the model.
"""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from millrace.model_repository.request.status_code import StatusError, invalid
from millrace.model_repository.request.tensors import DTYPES, Array
from millrace.serve.http.json_scan import JsonPiece, scan_pieces
from millrace.serve.protocols.kserve.http.json_values import MAX_DEPTH, flat_array, mismatch, no_json, too_deep

MAX_VALUES = 1 << 18  # outside the data of tensors
MAX_TEXT_BYTES = 16 << 20  # bytes of one string in JSON, which is decoded at once
_DATA_DEPTH = 4  # of a list in an input: {"inputs": [{"data": [
_MIN_SPAN_BYTES = 1024  # bytes: a shorter list stays where it is
_MAX_LISTS = 1 << 16  # and objects, at that depth
_MARK = f"millrace:{secrets.token_hex(16)}:"  # drawn anew by each process: no client can write it
_LIST, _END, _SPACE, _COMMA, _TEXT = b'[] ,"'


@dataclass(frozen=True, slots=True)
class Span:
    """A list in the JSON, perhaps of lists. n: number of values, if no inner list is empty"""

    text: memoryview
    n: int

    def array(self, name: str, datatype: str, n: int) -> Array:
        """Return the values as a flat array. n: elements of the shape. raises StatusError"""
        if n != self.n:
            raise mismatch()
        numbers, at = np.empty(n, DTYPES[datatype]), 0
        for text in self._texts():
            try:
                values = flat_array(name, datatype, msgspec.json.decode(b"[%b]" % text))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise no_json(error) from None
            if at + len(values) > n:
                raise mismatch()
            numbers[at : at + len(values)] = values
            at += len(values)
        if at != n:
            raise mismatch()
        return numbers

    def _texts(self) -> Iterator[bytes]:
        """Yield pieces of whole values without brackets, cut at commas. raises StatusError"""
        left, n_left, previous = list[bytes](), 0, _COMMA
        for piece in scan_pieces(self.text):
            previous = _check_lists(piece, previous)
            data = piece.data.copy()
            data[piece.plain & ((data == _LIST) | (data == _END))] = _SPACE
            text, commas = data.tobytes(), np.flatnonzero(piece.commas)
            if len(commas):
                cut = int(commas[-1])
                yield b"".join((*left, text[:cut]))
                left, text, n_left = [], text[cut + 1 :], 0
            left.append(text)
            n_left += len(text)
            if n_left > MAX_TEXT_BYTES:
                raise too_long()
        yield b"".join(left)


def too_long() -> StatusError:
    return no_json(f"it has a text of more than {MAX_TEXT_BYTES} bytes: use the binary data format for it")


def _check_lists(piece: JsonPiece, previous: int) -> int:
    """Check that no list is empty, and return the piece's last byte that is not white space.

    previous: that of the piece before. raises StatusError
    """
    significant = np.where(piece.plain, piece.data, _TEXT)
    significant = significant[significant > _SPACE]
    if not len(significant):
        return previous
    before = np.concatenate(([previous], significant[:-1]))
    if bool(np.any((before == _LIST) & (significant == _END))):
        raise invalid("'data' of a large request has lists without elements: leave them out")
    return int(significant[-1])


class JsonWithSpans:
    """A large JSON text split up. rest: the text with marks in place of its long lists; spans: these lists"""

    def __init__(self, head: memoryview) -> None:
        """raises StatusError"""
        self.spans: list[Span] = []
        self._head, self._remaining, self._at = head, list[bytes | memoryview](), 0
        self._begin: tuple[int, int, int] | None = None  # of a list: its place, commas and brackets before
        self._commas = self._brackets = self._n_cut = self._n_lists = 0
        depth = 0
        for piece in scan_pieces(head):
            if int(piece.depth.max()) >= MAX_DEPTH + _DATA_DEPTH:
                raise too_deep()
            self._scan(piece)
            depth = int(piece.depth[-1])
        if depth > 0:
            raise no_json("Input data was truncated")
        n_left = self._commas + self._brackets - self._n_cut
        if n_left > MAX_VALUES:
            what = f"it has {n_left} values beside the data of its inputs, at most {MAX_VALUES} are supported"
            raise no_json(what)
        self._remaining.append(head[self._at :])
        if sum(map(len, self._remaining)) > MAX_TEXT_BYTES:
            raise too_long()
        self.rest = b"".join(self._remaining)

    def _scan(self, piece: JsonPiece) -> None:
        """raises StatusError"""
        commas = self._commas + np.cumsum(piece.commas, dtype=np.int64)
        brackets = self._brackets + np.cumsum(piece.opens, dtype=np.int64)
        is_begin = piece.opens & (piece.depth == _DATA_DEPTH)
        places = np.flatnonzero(is_begin | (piece.closes & (piece.depth == _DATA_DEPTH - 1)))
        self._n_lists += len(places)
        if self._n_lists > 2 * _MAX_LISTS:
            raise no_json(f"it has more than {_MAX_LISTS} lists and objects within its inputs")
        for i in places.tolist():
            place, n_commas, n_brackets = piece.at + i, int(commas[i]), int(brackets[i])
            if is_begin[i]:
                self._begin = (place, n_commas, n_brackets) if piece.data[i] == _LIST else None
            elif self._begin is not None and place - self._begin[0] >= _MIN_SPAN_BYTES:
                self._cut(place + 1, n_commas, n_brackets)
        self._commas, self._brackets = int(commas[-1]), int(brackets[-1])

    def _cut(self, end: int, n_commas: int, n_brackets: int) -> None:
        assert self._begin is not None, "a list ends that has begun"
        begin, n_commas_before, n_brackets_before = self._begin
        self._remaining += (self._head[self._at : begin], f'"{_MARK}{len(self.spans)}"'.encode())
        self.spans.append(Span(self._head[begin:end], n_commas - n_commas_before + 1))
        self._n_cut += n_commas - n_commas_before + n_brackets - n_brackets_before
        self._at, self._begin = end, None


def span_or_value(data: Any, spans: list[Span]) -> Any:
    """Return the span that a mark stands for, or other data unchanged."""
    if isinstance(data, str) and data.startswith(_MARK):
        return spans[int(data.removeprefix(_MARK))]
    return data
