"""Conversion of patterns in RE2's syntax, as in Triton's flags, to Python's `re`.

Flags such as (?i) or (?-i) may occur anywhere, and apply to the end of their group. Syntax that RE2 lacks, because it
takes more than linear time, is refused.
"""

import re
from dataclasses import dataclass, field

_FLAGS = re.compile(r"\(\?([imsU]*)(?:-([imsU]+))?([:)])")
_CLASSES = {
    "alnum": "0-9A-Za-z", "alpha": "A-Za-z", "ascii": r"\x00-\x7F", "blank": r"\t ", "cntrl": r"\x00-\x1F\x7F",
    "digit": "0-9", "graph": "!-~", "lower": "a-z", "print": " -~", "punct": r"!-/:-@\[-`{-~", "space": r"\t\n\v\f\r ",
    "upper": "A-Z", "word": "0-9A-Za-z_", "xdigit": "0-9A-Fa-f",
}  # fmt: skip
_CLASS_NAME = re.compile(r"\[:(\^?)([a-z]+):\]")
_ESCAPES = {"z": r"\Z", "C": "."}  # of RE2: Python's


def compile_pattern(pattern: str, ignore_case: bool) -> re.Pattern[str]:
    """Compile a pattern for whole names; letters are ASCII. raises re.error for syntax that RE2 lacks"""
    text = _PatternReader(pattern).read()
    return re.compile(text, re.ASCII | (re.IGNORECASE if ignore_case else 0))


@dataclass
class _Group:
    """An open group. scopes: those that flags opened within it, such as `(?i:`"""

    scopes: list[str] = field(default_factory=list)


class _PatternReader:
    def __init__(self, pattern: str) -> None:
        self._pattern, self._at = pattern, 0
        self._parts: list[str] = []
        self._groups = [_Group()]

    def read(self) -> str:
        while self._at < len(self._pattern):
            self._next()
        if len(self._groups) > 1:
            raise re.error("missing ), unterminated subpattern", self._pattern)
        return "".join(self._parts) + ")" * len(self._groups[0].scopes)

    def _take(self, n: int, as_text: str | None = None) -> None:
        self._parts.append(self._pattern[self._at : self._at + n] if as_text is None else as_text)
        self._at += n

    def _next(self) -> None:
        match self._pattern[self._at]:
            case "\\":
                self._escape()
            case "[":
                self._class()
            case "(":
                self._open()
            case ")":
                if len(self._groups) == 1:
                    raise re.error("unbalanced parenthesis", self._pattern, self._at)
                self._take(1, ")" * (len(self._groups.pop().scopes) + 1))
            case "|":  # a flag holds in the alternatives behind it, too
                scopes = self._groups[-1].scopes
                self._take(1, ")" * len(scopes) + "|" + "".join(scopes))
            case _:
                self._take(1)

    def _escape(self) -> None:
        following = self._pattern[self._at + 1 : self._at + 2]
        if following == "Q":
            end = self._pattern.find("\\E", self._at)
            end = len(self._pattern) if end < 0 else end
            quoted = self._pattern[self._at + 2 : end]
            self._take(min(end + 2, len(self._pattern)) - self._at, re.escape(quoted))
        elif following in "123456789" and following:
            raise re.error("RE2 has no references back", self._pattern, self._at)
        else:
            self._take(2, _ESCAPES.get(following))

    def _class(self) -> None:
        """Convert a class [...], in which a first ] is literal."""
        end = self._at + 1
        end += self._pattern.startswith("^", end)
        end += self._pattern.startswith("]", end)
        while end < len(self._pattern) and self._pattern[end] != "]":
            class_name = _CLASS_NAME.match(self._pattern, end)
            end += len(class_name[0]) if class_name else 2 if self._pattern[end] == "\\" else 1
        text = self._pattern[self._at : end + 1]
        self._take(len(text), _CLASS_NAME.sub(self._named_group, text))

    def _named_group(self, name: re.Match[str]) -> str:
        if name[2] not in _CLASSES or name[1]:
            raise re.error(f"invalid character class {name[0]}", self._pattern, self._at)
        return _CLASSES[name[2]]

    def _open(self) -> None:
        rest = self._pattern[self._at :]
        if (flags := _FLAGS.match(rest)) is not None:
            off = (flags[2] or "").replace("U", "")  # U: which of several matches is preferred, and not whether
            text = f"(?{flags[1].replace('U', '')}{'-' + off if off else ''}:"
            self._take(len(flags[0]), text)
            if flags[3] == ":":
                self._groups.append(_Group())
            else:
                self._groups[-1].scopes.append(text)
            return
        if rest.startswith("(?") and not re.match(r"\(\?P?<[A-Za-z_]", rest):
            raise re.error("RE2 has no such group", self._pattern, self._at)
        self._groups.append(_Group())
        self._take(3 if rest.startswith("(?<") else 1, "(?P<" if rest.startswith("(?<") else None)
