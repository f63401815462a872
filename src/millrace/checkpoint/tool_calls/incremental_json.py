"""JSON as it comes: where a value ends, and a call's name and arguments before its object is complete."""

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
    """Finds the end of a value by its brackets and quotes; what is between them is not looked at."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_literal", "complete")

    def __init__(self) -> None:
        self.complete = False
        self._depth, self._in_string, self._escaped = 0, False, False
        self._literal: bool | None = None  # a number, true, false, null; None: nothing has come yet

    def take(self, text: str, at: int) -> int:
        """Where in `text` that what belongs to the value ends, from `at` on; the first time, its first character."""
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
    """`{"name": "f", "arguments": {...}}`, with the keys in any order and under any of their usual names.

    Each character is looked at once, however the text is cut.
    name: None, not known yet; broken: it is no such object
    rest: of the last piece, behind a complete object, or from where it broke; n_taken: characters in front of that
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.complete, self.broken = False, False
        self.rest, self.n_taken = "", 0
        self._pieces: list[str] = []  # all that it was given
        self._opened = False
        self._key: str | None = None  # whose value is due
        self._is_behind_colon = False
        self._value: JsonValue | None = None  # a key or a value under way
        self._streams = False  # it is an object of arguments
        self._read: list[str] = []  # of it, where it counts when it is complete
        self._arguments: list[str] = []  # of what may be given away once the name is known
        self._any_arguments = False

    @property
    def text(self) -> str:
        """All that it was given."""
        return "".join(self._pieces)

    def push(self, text: str) -> None:
        """What comes next; what is behind the object remains in `rest`."""
        self._pieces.append(text)
        at = 0
        while at < len(text) and not (self.complete or self.broken):
            at = self._take(text, at)
        self.rest = text[at:]
        self.n_taken += at

    def arguments(self) -> str:
        """What is new of them; nothing before the name is known."""
        if self.name is None:
            return ""
        new, self._arguments = "".join(self._arguments), []
        self._any_arguments = self._any_arguments or bool(new)
        return new

    def last_arguments(self) -> str:
        """What is still to be said at the end: a call without arguments has none of them."""
        return self.arguments() or ("" if self._any_arguments else "{}")

    def _take(self, text: str, at: int) -> int:
        """One part further; where the next begins."""
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
        """From a key to the first character of its value."""
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
        """A value that counts when it is complete."""
        if self._key in NAMES and isinstance(value, str) and value and self.name is None:
            self.name = value
        elif self._key in ARGUMENTS and isinstance(value, str):  # written twice, as some models do
            self._arguments.append(value)
        elif self._key in ARGUMENTS and value is not None:
            self.broken = True


def behind_blank(text: str, at: int) -> int:
    """Where white space ends that begins there, if any does."""
    blank = _BLANK.match(text, at)
    assert blank is not None
    return blank.end()


def _loaded(text: str) -> Any:
    """None for what is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
