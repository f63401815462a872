"""Problems found in a repository: location, description, expectation and fix."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from millrace.errors import sanitize


class Level(Enum):
    ERROR = "error"  # prevents the model from being served
    WARNING = "warning"  # the model is served, but probably not as intended
    IGNORED = "ignored"  # the setting has no effect here


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """A position in a file. Both count from 1; a tab is one column."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """A problem. place: None if it concerns the whole file or folder"""

    level: Level
    file: Path
    place: SourcePosition | None
    what: str
    expected: str
    fix: str

    def __post_init__(self) -> None:
        for name in ("what", "expected", "fix"):  # they quote files
            object.__setattr__(self, name, sanitize(getattr(self, name)))

    @property
    def location(self) -> str:
        """Location such as `folder/config.pbtxt:3:5`, as editors and CI recognise it."""
        at = f":{self.place.line}:{self.place.column}" if self.place else ""
        return sanitize(str(self.file)) + at
