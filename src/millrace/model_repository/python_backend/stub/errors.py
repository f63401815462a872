"""How a model says what went wrong, under Triton's names."""

from .bytes_tensors import text

# Triton's codes by their numbers.
CODES = (
    "UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED",
)  # fmt: skip


class TritonModelException(Exception):  # noqa: N818  Triton's name
    """What a model raises to say that something of its own went wrong, and what our functions raise to it."""


class ReturnedError(Exception):
    """What `execute` returned is no answer; a client reads these words alone, which are Triton's."""


class TritonError:
    """What a response carries in place of tensors."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str | bytes, code: int = INTERNAL) -> None:
        self._message, self._code = text(message), code

    def code(self) -> int:
        return self._code

    def message(self) -> str:
        return self._message
