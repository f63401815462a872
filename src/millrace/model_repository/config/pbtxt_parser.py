"""The protobuf text format, as far as it is syntax: fields, blocks, lists, scalars, each with its place.

`pbtxt_binder.py` gives fields their meaning. The syntax is that of protobuf's C++ parser, which Triton uses: comments,
`{}` and `<>`, `[a, b]`, `,` and `;` after a field, adjacent strings as one, octal and hexadecimal numbers. Extensions
and `Any` (`[name.of.it]`) are refused: no field of a configuration has them.
"""

import re
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import NoReturn

from millrace.model_repository.config.problems import Place

MOST_BYTES, _DEEPEST, _LONGEST_NUMBER = 1 << 18, 32, 64  # bytes: a second or two of a core at worst
_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n\v\f]+|\#[^\n]*)
    |(?P<name>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<number>0[xX][0-9a-fA-F]+|(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[fF]?)
    |(?P<string>"[^"\\\n]*(?:\\[^\n][^"\\\n]*)*"|'[^'\\\n]*(?:\\[^\n][^'\\\n]*)*')
    |(?P<mark>[{}<>\[\]:;,.-])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_PLAIN_ESCAPES = dict(zip("abfnrtv\\?'\"", b"\a\b\f\n\r\t\v\\?'\"", strict=True))
_CLOSE = {"{": "}", "<": ">"}


@dataclass(frozen=True, slots=True)
class Scalar:
    """kind: "name", "number" or "string"; text: as written, with its sign; a string's content is `data`"""

    kind: str
    text: str
    place: Place
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class Block:
    fields: "tuple[Field, ...]"
    place: Place


@dataclass(frozen=True, slots=True)
class List:
    items: tuple[Scalar | Block, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class Field:
    """colon: whether `:` stands before the value, without which only a block may follow"""

    name: str
    value: Scalar | Block | List
    colon: bool
    place: Place


class PbtxtSyntaxError(Exception):
    """Text that is not of the format."""

    def __init__(self, place: Place | None, what: str, expected: str, mend: str) -> None:
        super().__init__(what)
        self.place, self.what, self.expected, self.mend = place, what, expected, mend


def read_text(data: bytes) -> Block:
    """The fields of a whole file. raises Misread"""
    if len(data) > MOST_BYTES:
        raise PbtxtSyntaxError(None, f"more than {MOST_BYTES:,} bytes", "a configuration", "is it the model itself?")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        text = data[: error.start].decode("utf-8")
        what = f"byte 0x{data[error.start]:02x} is not UTF-8"
        raise PbtxtSyntaxError(
            _Tokens(text).place(len(text)), what, "UTF-8 text", "convert the file with iconv"
        ) from None
    tokens = _Tokens(text.removeprefix("\ufeff"))
    tokens.split()
    return Block(_fields(tokens, "", 0), Place(1, 1))


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    at: int


class _Tokens:
    """The words of a text, and which is next."""

    def __init__(self, text: str) -> None:
        self.text, self.found, self.next = text, list[_Token](), 0
        self.starts = [0, *accumulate(len(line) + 1 for line in text.split("\n"))]

    def split(self) -> None:
        at, text = 0, self.text
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                self._no_token(at)
            end, kind = match.end(), match.lastgroup
            assert kind is not None
            if kind == "number":
                self._check_number(at, end)
            if kind != "space":
                self.found.append(_Token(kind, match.group(), at))
            at = end

    def place(self, at: int) -> Place:
        line = bisect_right(self.starts, at)
        return Place(line, at - self.starts[line - 1] + 1)

    def peek(self) -> _Token | None:
        return self.found[self.next] if self.next < len(self.found) else None

    def take(self, *marks: str) -> _Token | None:
        """The next token where it is one of these marks."""
        token = self.peek()
        if token is None or token.kind != "mark" or token.text not in marks:
            return None
        self.next += 1
        return token

    def stop(self, expected: str, mend: str = "correct it here") -> NoReturn:
        token = self.peek()
        at = token.at if token else len(self.text)
        raise PbtxtSyntaxError(self.place(at), f"found {token.text:.60}" if token else "the file ends", expected, mend)

    def _check_number(self, at: int, end: int) -> None:
        if end - at > _LONGEST_NUMBER:
            what = f"a number of {end - at:,} characters"
            raise PbtxtSyntaxError(self.place(at), what, f"at most {_LONGEST_NUMBER}", "write it shorter")
        after = self.text[end : end + 1]
        if after.isalnum() or after in ("_", "."):
            what = f"{self.text[at : end + 8].split()[0]} is no number"
            raise PbtxtSyntaxError(
                self.place(at), what, "a number, and a space behind it", "correct it, or quote it as a string"
            )

    def _no_token(self, at: int) -> NoReturn:
        found = self.text[at]
        if found in "\"'":
            raise PbtxtSyntaxError(self.place(at), "a string without an end", f"{found} on the same line", "close it")
        raise PbtxtSyntaxError(self.place(at), f"the character {found!r}", "a field, a value or a comment", "remove it")


def _fields(tokens: _Tokens, close: str, depth: int) -> tuple[Field, ...]:
    """Until `close`, which is taken, too; "" is the end of the file."""
    found: list[Field] = []
    while True:
        token = tokens.peek()
        if close and tokens.take(close):
            return tuple(found)
        if token is None and not close:
            return tuple(found)
        if token is None or token.kind != "name":
            tokens.stop(f"the name of a field{f' or {close}' if close else ''}")
        tokens.next += 1
        colon = tokens.take(":") is not None
        value = _value(tokens, depth, bool(colon))
        found.append(Field(token.text, value, colon, tokens.place(token.at)))
        tokens.take(",", ";")


def _value(tokens: _Tokens, depth: int, colon: bool) -> Scalar | Block | List:
    bracket = tokens.take("[")
    if bracket is None:
        return _item(tokens, depth, colon)
    items: list[Scalar | Block] = []
    while not tokens.take("]"):
        if items and not tokens.take(","):
            tokens.stop("`,` or `]`")
        items.append(_item(tokens, depth, colon))
    return List(tuple(items), tokens.place(bracket.at))


def _item(tokens: _Tokens, depth: int, colon: bool) -> Scalar | Block:
    opened = tokens.take("{", "<")
    if opened is None:
        if not colon:
            tokens.stop("`:` and a value, or a block in {}")
        return _scalar(tokens)
    place = tokens.place(opened.at)
    if depth == _DEEPEST:
        raise PbtxtSyntaxError(
            place, f"more than {_DEEPEST} blocks in one another", "a configuration", "close those before it"
        )
    return Block(_fields(tokens, _CLOSE[opened.text], depth + 1), place)


def _scalar(tokens: _Tokens) -> Scalar:
    sign = tokens.take("-")
    token = tokens.peek()
    if token is None or token.kind == "mark" or (sign and token.kind == "string"):
        tokens.stop("a number" if sign else "a value: a number, a word, or a string in quotes")
    tokens.next += 1
    place = tokens.place(sign.at if sign else token.at)
    if token.kind != "string":
        return Scalar(token.kind, ("-" if sign else "") + token.text, place)
    parts = [token]
    while (more := tokens.peek()) and more.kind == "string":
        parts.append(more)
        tokens.next += 1
    return Scalar("string", token.text, place, b"".join(_content(tokens, part) for part in parts))


def _content(tokens: _Tokens, token: _Token) -> bytes:
    """A string's bytes, without quotes and escapes."""
    text, at = token.text[1:-1], 0
    if "\\" not in text:
        return text.encode()
    pieces = []
    for match in _ESCAPE.finditer(text):
        pieces.append(text[at : match.start()].encode())
        octal, hexa, short, long, letter = match.groups()
        code = int(octal, 8) if octal else int(hexa or short or long or "0", 16)
        is_text = bool(short or long)
        if (
            (letter and letter not in _PLAIN_ESCAPES)
            or (octal and code > 0xFF)
            or (is_text and not _is_character(code))
        ):
            place = tokens.place(token.at + 1 + match.start())
            raise PbtxtSyntaxError(
                place, f"the escape {match.group()}", r"one of \n \t \" \\ \x41 \101 \u00e9", "double its \\"
            )
        done = bytes([_PLAIN_ESCAPES[letter] if letter else code]) if not is_text else chr(code).encode()
        pieces.append(done)
        at = match.end()
    return b"".join([*pieces, text[at:].encode()])


def _is_character(code: int) -> bool:
    return code <= 0x10FFFF and not 0xD800 <= code < 0xE000
