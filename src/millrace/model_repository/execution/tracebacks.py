"""Exceptions without the frames that they came through, which hold whatever those frames worked on.

A body of 60 MB is decoded into ten times as much. An exception that carries the frames of the decoder holds all of it;
where one of these frames also holds the exception (through a future, say), it is a cycle, which only the garbage
collector frees, if it ever looks at objects that old.
"""

import traceback
from typing import TypeVar

from millrace.errors import MillraceError
from millrace.model_repository.request.status_code import StatusError

E = TypeVar("E", bound=BaseException)
_MOST_LINES = 40  # of the traceback of a bug, the innermost
_EXPECTED = (MillraceError, StatusError)  # refusals: their message says everything


def without_frames(error: E) -> E:
    """Drop the tracebacks of an exception and of all exceptions that led to it. Returns the exception."""
    left: list[BaseException] = [error]
    seen = set[int]()
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = None
        left += [cause for cause in (one.__cause__, one.__context__) if cause is not None]
        if isinstance(one, BaseExceptionGroup):
            left += one.exceptions
    return error


def portable(error: E) -> E:
    """The same for an exception that leaves its thread: the traceback of a bug becomes a note, for the log."""
    if not isinstance(error, _EXPECTED):
        lines = "".join(traceback.format_exception(error)).splitlines()
        error.add_note("\n".join(lines[-_MOST_LINES:]))
    return without_frames(error)
