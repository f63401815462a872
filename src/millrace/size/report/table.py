"""A text table with heading and notes."""

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.report.format_numbers import is_number


@dataclass(frozen=True, slots=True)
class TextTable:
    """key: id for the page; name: heading; more: text next to the heading; notes: lines below

    header: of columns; empty if rows are names and values
    """

    key: str
    name: str
    rows: Sequence[Sequence[str]] = ()
    header: Sequence[str] = ()
    more: str = ""
    notes: Sequence[str] = ()

    @property
    def numbers(self) -> list[bool]:
        """Return for each column whether it is numeric (aligned right)."""
        return [all(is_number(row[i]) for row in self.rows) for i in range(len(self.header))]


def system_count(systems: float) -> str:
    """Format a number of systems; below 0.1 with two significant digits."""
    return f"{systems:.2f}" if not 0 < systems < 0.1 else f"{systems:.2g}"
