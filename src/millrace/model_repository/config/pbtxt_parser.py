"""Parser of the protobuf text format: fields, blocks, lists and scalars, each with its position.

`pbtxt_binder.py` interprets the fields. The syntax is that of protobuf's C++ parser, which Triton uses: comments, `{}`
and `<>`, `[a, b]`, `,` and `;` after a field, concatenation of adjacent strings, octal and hexadecimal numbers.
Extensions and `Any` (`[name.of.it]`) are rejected, because no field of a configuration uses them.
"""

import re
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import NoReturn

from millrace.model_repository.config.problems import SourcePosition

MAX_BYTES, _MAX_DEPTH, _MAX_NUMBER_LENGTH = 1 << 18, 32, 64  # bytes: at worst a second or two of CPU time
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
class PbtxtScalar:
    """A scalar. kind: "name", "number" or "string". text: as written, with sign. data: content of a string"""

    kind: str
    text: str
    place: SourcePosition
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class PbtxtBlock:
    fields: "tuple[PbtxtField, ...]"
    place: SourcePosition


@dataclass(frozen=True, slots=True)
class PbtxtList:
    items: tuple[PbtxtScalar | PbtxtBlock, ...]
    place: SourcePosition


@dataclass(frozen=True, slots=True)
class PbtxtField:
    """A field. colon: whether `:` precedes the value; without it only a block may follow"""

    name: str
    value: PbtxtScalar | PbtxtBlock | PbtxtList
    colon: bool
    place: SourcePosition


class PbtxtSyntaxError(Exception):
    """A syntax error, with its position."""

    def __init__(self, place: SourcePosition | None, what: str, expected: str, fix: str) -> None:
        super().__init__(what)
        self.place, self.what, self.expected, self.fix = place, what, expected, fix


def read_text(data: bytes) -> PbtxtBlock:
    """Parse a whole file. raises PbtxtSyntaxError"""
    if len(data) > MAX_BYTES:
        raise PbtxtSyntaxError(None, f"more than {MAX_BYTES:,} bytes", "a configuration", "is it the model itself?")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        text = data[: error.start].decode("utf-8")
        message = f"byte 0x{data[error.start]:02x} is not UTF-8"
        raise PbtxtSyntaxError(
            _Tokens(text).place(len(text)), message, "UTF-8 text", "convert the file with iconv"
        ) from None
    tokens = _Tokens(text.removeprefix("\ufeff"))
    tokens.split()
    return PbtxtBlock(_fields(tokens, "", 0), SourcePosition(1, 1))


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    at: int


class _Tokens:
    """The tokens of a text, and the index of the next one."""

    def __init__(self, text: str) -> None:
        self.text, self.tokens, self.next = text, list[_Token](), 0
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
                self.tokens.append(_Token(kind, match.group(), at))
            at = end

    def place(self, at: int) -> SourcePosition:
        line = bisect_right(self.starts, at)
        return SourcePosition(line, at - self.starts[line - 1] + 1)

    def peek(self) -> _Token | None:
        return self.tokens[self.next] if self.next < len(self.tokens) else None

    def take(self, *marks: str) -> _Token | None:
        """Consume and return the next token if it is one of these marks."""
        token = self.peek()
        if token is None or token.kind != "mark" or token.text not in marks:
            return None
        self.next += 1
        return token

    def stop(self, expected: str, fix: str = "correct it here") -> NoReturn:
        token = self.peek()
        at = token.at if token else len(self.text)
        raise PbtxtSyntaxError(self.place(at), f"found {token.text:.60}" if token else "the file ends", expected, fix)

    def _check_number(self, at: int, end: int) -> None:
        if end - at > _MAX_NUMBER_LENGTH:
            message = f"a number of {end - at:,} characters"
            raise PbtxtSyntaxError(self.place(at), message, f"at most {_MAX_NUMBER_LENGTH}", "write it shorter")
        after = self.text[end : end + 1]
        if after.isalnum() or after in ("_", "."):
            message = f"{self.text[at : end + 8].split()[0]} is no number"
            raise PbtxtSyntaxError(
                self.place(at), message, "a number, and a space behind it", "correct it, or quote it as a string"
            )

    def _no_token(self, at: int) -> NoReturn:
        character = self.text[at]
        if character in "\"'":
            raise PbtxtSyntaxError(
                self.place(at), "a string without an end", f"{character} on the same line", "close it"
            )
        raise PbtxtSyntaxError(
            self.place(at), f"the character {character!r}", "a field, a value or a comment", "remove it"
        )


def _fields(tokens: _Tokens, close: str, depth: int) -> tuple[PbtxtField, ...]:
    """Parse fields up to and including `close`; "" is the end of the file."""
    fields: list[PbtxtField] = []
    while True:
        token = tokens.peek()
        if close and tokens.take(close):
            return tuple(fields)
        if token is None and not close:
            return tuple(fields)
        if token is None or token.kind != "name":
            tokens.stop(f"the name of a field{f' or {close}' if close else ''}")
        tokens.next += 1
        colon = tokens.take(":") is not None
        value = _value(tokens, depth, bool(colon))
        fields.append(PbtxtField(token.text, value, colon, tokens.place(token.at)))
        tokens.take(",", ";")


def _value(tokens: _Tokens, depth: int, colon: bool) -> PbtxtScalar | PbtxtBlock | PbtxtList:
    bracket = tokens.take("[")
    if bracket is None:
        return _item(tokens, depth, colon)
    items: list[PbtxtScalar | PbtxtBlock] = []
    while not tokens.take("]"):
        if items and not tokens.take(","):
            tokens.stop("`,` or `]`")
        items.append(_item(tokens, depth, colon))
    return PbtxtList(tuple(items), tokens.place(bracket.at))


def _item(tokens: _Tokens, depth: int, colon: bool) -> PbtxtScalar | PbtxtBlock:
    opened = tokens.take("{", "<")
    if opened is None:
        if not colon:
            tokens.stop("`:` and a value, or a block in {}")
        return _scalar(tokens)
    place = tokens.place(opened.at)
    if depth == _MAX_DEPTH:
        raise PbtxtSyntaxError(
            place, f"more than {_MAX_DEPTH} blocks in one another", "a configuration", "close those before it"
        )
    return PbtxtBlock(_fields(tokens, _CLOSE[opened.text], depth + 1), place)


def _scalar(tokens: _Tokens) -> PbtxtScalar:
    sign = tokens.take("-")
    token = tokens.peek()
    if token is None or token.kind == "mark" or (sign and token.kind == "string"):
        tokens.stop("a number" if sign else "a value: a number, a word, or a string in quotes")
    tokens.next += 1
    place = tokens.place(sign.at if sign else token.at)
    if token.kind != "string":
        return PbtxtScalar(token.kind, ("-" if sign else "") + token.text, place)
    parts = [token]
    while (more := tokens.peek()) and more.kind == "string":
        parts.append(more)
        tokens.next += 1
    return PbtxtScalar("string", token.text, place, b"".join(_content(tokens, part) for part in parts))


def _content(tokens: _Tokens, token: _Token) -> bytes:
    """Return the bytes of a string token, unescaped."""
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
