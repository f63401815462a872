"""What is found in a repository: where, what, what was expected, how to mend it."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from millrace.errors import sanitize


class Level(Enum):
    ERROR = "error"  # the model is not served
    WARNING = "warning"  # it is served, though not as it was probably meant
    IGNORED = "ignored"  # what is written changes nothing here


@dataclass(frozen=True, slots=True)
class Place:
    """Both from 1; a column counts characters, a tab is one."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Problem:
    """place: None where it is a file's or a folder's as a whole"""

    level: Level
    file: Path
    place: Place | None
    what: str
    expected: str
    mend: str

    def __post_init__(self) -> None:
        for name in ("what", "expected", "mend"):  # they quote files
            object.__setattr__(self, name, sanitize(getattr(self, name)))

    @property
    def where(self) -> str:
        """`folder/config.pbtxt:3:5`, as editors and CI open it."""
        at = f":{self.place.line}:{self.place.column}" if self.place else ""
        return sanitize(str(self.file)) + at
