"""Removal of tracebacks from exceptions, because their frames keep large objects alive.

A 60 MB body is decoded into ten times as much memory, and an exception with the decoder's frames holds all of it. If
such a frame also holds the exception (through a future, for example), only the garbage collector can free the cycle.
"""

import traceback
from typing import TypeVar

from millrace.errors import MillraceError
from millrace.model_repository.request.status_code import StatusError

E = TypeVar("E", bound=BaseException)
_MAX_LINES = 40  # innermost lines of a bug's traceback that are kept
_EXPECTED = (MillraceError, StatusError)  # expected errors: their message suffices


def without_frames(error: E) -> E:
    """Drop the tracebacks of an exception and of all exceptions that led to it; return the exception."""
    left: list[BaseException] = [error]
    seen_ids = set[int]()
    while left:
        chained = left.pop()
        if id(chained) in seen_ids:
            continue
        seen_ids.add(id(chained))
        chained.__traceback__ = None
        left += [cause for cause in (chained.__cause__, chained.__context__) if cause is not None]
        if isinstance(chained, BaseExceptionGroup):
            left += chained.exceptions
    return error


def portable(error: E) -> E:
    """Drop tracebacks of an exception that leaves its thread; a bug's traceback is kept as a note for the log."""
    if not isinstance(error, _EXPECTED):
        lines = "".join(traceback.format_exception(error)).splitlines()
        error.add_note("\n".join(lines[-_MAX_LINES:]))
    return without_frames(error)
