"""Incremental JSON parsing: finds the end of a value, and a call's name and arguments before its object is complete."""

import json
import re
from typing import Any

NAMES = ("name", "function", "tool_name")
ARGUMENTS = ("arguments", "parameters", "args", "tool_arguments")
_STRUCTURE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
_BEHIND_LITERAL = re.compile(r"[\s,\]}]")
_BLANK = re.compile(r"\s*")


class JsonValue:
    """Finds the end of a value by its brackets and quotes, without checking what is between them."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_literal", "complete")

    def __init__(self) -> None:
        self.complete = False
        self._depth, self._in_string, self._escaped = 0, False, False
        self._literal: bool | None = None  # whether it is a number, true, false or null; None: nothing received yet

    def take(self, text: str, at: int) -> int:
        """Return the end of the value's part in `text` from `at`, which on the first call is its first character."""
        if self._literal is None and at < len(text):
            self._literal = text[at] not in '"{['
        if self._literal:
            end = _BEHIND_LITERAL.search(text, at)
            self.complete = end is not None
            return end.start() if end else len(text)
        while at < len(text) and not self.complete:
            at = self._string(text, at) if self._in_string else self._structure(text, at)
        return at

    def _string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        result = _IN_STRING.search(text, at)
        if result is None:
            return len(text)
        if result[0] == "\\":
            self._escaped = True
        else:
            self._in_string, self.complete = False, self._depth == 0
        return result.end()

    def _structure(self, text: str, at: int) -> int:
        result = _STRUCTURE.search(text, at)
        if result is None:
            return len(text)
        if result[0] == '"':
            self._in_string = True
        else:
            self._depth += 1 if result[0] in "{[" else -1
            self.complete = self._depth == 0
        return result.end()


class CallObject:
    """Parses `{"name": "f", "arguments": {...}}`, with the keys in any order and with any of their usual names.

    Each character is read once, however the text is split.
    name: None if not known yet; broken: whether it is not such an object
    rest: the rest of the last piece, after a complete object or from the error; n_taken: characters before that
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.complete, self.broken = False, False
        self.rest, self.n_taken = "", 0
        self._pieces: list[str] = []  # all pieces received
        self._opened = False
        self._key: str | None = None  # whose value is expected next
        self._is_behind_colon = False
        self._value: JsonValue | None = None  # an incomplete key or value
        self._streams = False  # whether it is the arguments' object
        self._read: list[str] = []  # its text, if it is processed when complete
        self._arguments: list[str] = []  # text of arguments to return once the name is known
        self._any_arguments = False

    @property
    def text(self) -> str:
        """Return all text received."""
        return "".join(self._pieces)

    def push(self, text: str) -> None:
        """Parse the next piece; text after the object remains in `rest`."""
        self._pieces.append(text)
        at = 0
        while at < len(text) and not (self.complete or self.broken):
            at = self._take(text, at)
        self.rest = text[at:]
        self.n_taken += at

    def arguments(self) -> str:
        """Return new text of the arguments; "" until the name is known."""
        if self.name is None:
            return ""
        new, self._arguments = "".join(self._arguments), []
        self._any_arguments = self._any_arguments or bool(new)
        return new

    def last_arguments(self) -> str:
        """Return the remaining text of the arguments at the end; a call without arguments has an empty object."""
        return self.arguments() or ("" if self._any_arguments else "{}")

    def _take(self, text: str, at: int) -> int:
        """Parse one token and return where the next begins."""
        if self._value is not None:
            return self._more_of_value(self._value, text, at)
        at = behind_blank(text, at)
        if at == len(text):
            return at
        first = text[at]
        if self._key is not None:
            return self._to_value(first, at)
        if not self._opened:
            self._opened, self.broken = True, first != "{"
            return at + 1
        if first == "}":
            self.complete, self.broken = True, self.name is None
            return at + 1
        if first == ",":
            return at + 1
        self.broken = first != '"'
        self._value = None if self.broken else JsonValue()
        return at

    def _to_value(self, first: str, at: int) -> int:
        """Go from a key to the first character of its value."""
        if not self._is_behind_colon:
            self.broken = first != ":"
            self._is_behind_colon = True
            return at + (not self.broken)
        self._value, self._is_behind_colon = JsonValue(), False
        self._streams = self._key in ARGUMENTS and first == "{"
        return at

    def _more_of_value(self, value: JsonValue, text: str, at: int) -> int:
        end = value.take(text, at)
        (self._arguments if self._streams else self._read).append(text[at:end])
        if value.complete:
            read, self._value = "".join(self._read), None
            self._read = []
            if self._key is None:
                key = _loaded(read)
                self.broken, self._key = not isinstance(key, str), key
            else:
                if not self._streams:
                    self._complete(_loaded(read))
                self._key, self._streams = None, False
        return end

    def _complete(self, value: Any) -> None:
        """Process a value that is needed as a whole."""
        if self._key in NAMES and isinstance(value, str) and value and self.name is None:
            self.name = value
        elif self._key in ARGUMENTS and isinstance(value, str):  # JSON encoded twice, as by some models
            self._arguments.append(value)
        elif self._key in ARGUMENTS and value is not None:
            self.broken = True


def behind_blank(text: str, at: int) -> int:
    """Return the end of the white space at `at`; `at` if there is none."""
    blank = _BLANK.match(text, at)
    assert blank is not None
    return blank.end()


def _loaded(text: str) -> Any:
    """Parse JSON; None if it is invalid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
