"""Errors of inference requests: Triton's status codes, with Triton's messages.

Clients and their tests search for these messages, so they are not wrapped in other text.
"""

from enum import Enum, auto

from millrace.errors import sanitize


class Code(Enum):
    UNKNOWN = auto()
    INTERNAL = auto()
    NOT_FOUND = auto()
    INVALID_ARG = auto()
    UNAVAILABLE = auto()
    UNSUPPORTED = auto()
    ALREADY_EXISTS = auto()
    CANCELLED = auto()


class StatusError(Exception):
    """An error with a status code. message: may quote client input; it is reduced to one bounded line"""

    def __init__(self, code: Code, message: str) -> None:
        self.code, self.message = code, sanitize(message)
        super().__init__(code, self.message)

    def __str__(self) -> str:
        return self.message


def invalid(message: str) -> StatusError:
    return StatusError(Code.INVALID_ARG, message)
