"""How an inference fails: one of Triton's status codes, in Triton's words.

Clients and their tests search for these words, so that nothing is put around them.
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
    """message: may quote what came from outside; it becomes one bounded line"""

    def __init__(self, code: Code, message: str) -> None:
        self.code, self.message = code, sanitize(message)
        super().__init__(code, self.message)

    def __str__(self) -> str:
        return self.message


def invalid(message: str) -> StatusError:
    return StatusError(Code.INVALID_ARG, message)
