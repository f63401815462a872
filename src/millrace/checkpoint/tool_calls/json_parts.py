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
        found = _IN_STRING.search(text, at)
        if found is None:
            return len(text)
        if found[0] == "\\":
            self._escaped = True
        else:
            self._in_string, self.complete = False, self._depth == 0
        return found.end()

    def _structure(self, text: str, at: int) -> int:
        found = _STRUCTURE.search(text, at)
        if found is None:
            return len(text)
        if found[0] == '"':
            self._in_string = True
        else:
            self._depth += 1 if found[0] in "{[" else -1
            self.complete = self._depth == 0
        return found.end()


class CallObject:
    """`{"name": "f", "arguments": {...}}`, with the keys in any order and under any of their usual names.

    text: all that it was given; name: None, not known yet; broken: it is no such object
    """

    def __init__(self) -> None:
        self.text, self.name = "", None
        self.complete, self.broken = False, False
        self._at = 0
        self._key: str | None = None  # whose value is due
        self._value: JsonValue | None = None  # under way,
        self._from = 0  # which begins here
        self._arguments: list[str] = []  # of what may be given away once the name is known
        self._any_arguments = False

    name: str | None

    def push(self, text: str) -> None:
        """What comes next; what is behind the object remains in `rest`."""
        self.text += text
        while not self.complete and not self.broken and self._goes_on():
            pass

    @property
    def rest(self) -> str:
        """Behind a complete object."""
        return self.text[self._at :]

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

    def _goes_on(self) -> bool:
        """One part further; False: more has to come, or this is no call."""
        if self._value is not None:
            return self._more_of_value(self._value)
        self._at = self._behind_blank(self._at)
        if self._at == len(self.text):
            return False
        first = self.text[self._at]
        if self._key is not None:
            return self._colon(first)
        if self._at == self._behind_blank(0):
            self.broken = first != "{"
            self._at += 1
            return not self.broken
        return self._next_key(first)

    def _next_key(self, first: str) -> bool:
        if first == "}":
            self._at += 1
            self.complete, self.broken = True, self.name is None
            return False
        if first == ",":
            self._at += 1
            return True
        if first != '"':
            self.broken = True
            return False
        value = JsonValue()
        end = value.take(self.text, self._at)
        if not value.complete:
            return False
        key = _loaded(self.text[self._at : end])
        self.broken, self._key, self._at = not isinstance(key, str), key, end
        return not self.broken

    def _colon(self, first: str) -> bool:
        if first != ":":
            self.broken = True
            return False
        begin = self._behind_blank(self._at + 1)
        if begin == len(self.text):
            return False
        self._at = self._from = begin
        self._value = JsonValue()
        return True

    def _more_of_value(self, value: JsonValue) -> bool:
        before, self._at = self._at, value.take(self.text, self._at)
        streams = self._key in ARGUMENTS and self.text[self._from] == "{"
        if streams:
            self._arguments.append(self.text[before : self._at])
        if not value.complete:
            return False
        if not streams:
            self._whole(_loaded(self.text[self._from : self._at]))
        self._key = self._value = None
        return not self.broken

    def _whole(self, value: Any) -> None:
        """A value that counts when it is complete."""
        if self._key in NAMES and isinstance(value, str) and value and self.name is None:
            self.name = value
        elif self._key in ARGUMENTS and isinstance(value, str):  # written twice, as some models do
            self._arguments.append(value)
        elif self._key in ARGUMENTS and value is not None:
            self.broken = True

    def _behind_blank(self, at: int) -> int:
        blank = _BLANK.match(self.text, at)
        assert blank is not None
        return blank.end()


def _loaded(text: str) -> Any:
    """None for what is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
