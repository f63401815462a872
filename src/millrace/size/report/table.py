"""A table of words, with its heading and what stands below it."""

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.report.format_numbers import is_number


@dataclass(frozen=True, slots=True)
class Table:
    """key: what it is of, for a page; name: its heading; more: beside that

    header: of columns; nothing: rows are names and values. notes: lines below
    """

    key: str
    name: str
    rows: Sequence[Sequence[str]] = ()
    header: Sequence[str] = ()
    more: str = ""
    notes: Sequence[str] = ()

    @property
    def numbers(self) -> list[bool]:
        """Which columns are of numbers, set flush right."""
        return [all(is_number(row[i]) for row in self.rows) for i in range(len(self.header))]


def system_count(systems: float) -> str:
    """Format a number of systems; below 0.1 with two significant digits."""
    return f"{systems:.2f}" if not 0 < systems < 0.1 else f"{systems:.2g}"
