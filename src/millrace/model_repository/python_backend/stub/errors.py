"""Errors of the Python backend, with Triton's names."""

from .bytes_tensors import text

# Triton's codes by their numbers.
CODES = (
    "UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED",
)  # fmt: skip


class TritonModelException(Exception):  # noqa: N818  Triton's name
    """Raised by models for their own errors, and by pb_utils functions."""


class ReturnedError(Exception):
    """An invalid return value of `execute`; clients get only this message, which is Triton's."""


class TritonError:
    """The error of a response."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str | bytes, code: int = INTERNAL) -> None:
        self._message, self._code = text(message), code

    def code(self) -> int:
        return self._code

    def message(self) -> str:
        return self._message
