"""Word wrapping of streamed text on a terminal."""

import re
from collections.abc import Callable

from rich.cells import cell_len

_WIDE = "\u2e80-\ua4cf\uac00-\ud7ff\uf900-\ufaff\uff00-\uffef"  # Chinese, Japanese and Korean: no spaces between words
_PIECES = re.compile(rf"\n|[^\S\n]|[{_WIDE}]|[^\s{_WIDE}]+")
LONGEST_WORD = 40  # columns; what is longer is no word, and is not waited for


class WordWrap:
    """Wraps streamed text. `push` returns all complete words, `flush` the rest.

    A line end, a space and a Chinese, Japanese or Korean character each end a word.
    """

    def __init__(self, columns: Callable[[], int]) -> None:
        """columns: returns the width of the terminal, queried for each word because windows are resized"""
        self._columns = columns
        self._column = 0  # where the next character goes
        self._word = ""

    def push(self, text: str) -> str:
        pieces = _PIECES.findall(self._word + text)
        self._word = ""
        if pieces and pieces[-1].strip() and cell_len(pieces[-1]) < LONGEST_WORD:
            self._word = pieces.pop()
        return "".join(map(self._place, pieces))

    def flush(self) -> str:
        word, self._word = self._word, ""
        return self._place(word)

    def _place(self, piece: str) -> str:
        if piece == "\n":
            self._column = 0
            return piece
        columns, width = max(self._columns(), 1), cell_len(piece)
        broken = ""
        if self._column and self._column + width > columns:
            self._column, broken = 0, "\n"
            if piece.isspace():  # the line end stands for it
                return broken
        self._column = (self._column + width) % columns if width > columns else self._column + width
        return broken + piece
