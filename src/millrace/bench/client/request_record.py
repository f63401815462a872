"""What was asked of a server, and what came back: stamps in seconds of this machine's monotonic clock."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count


class Failure(StrEnum):
    """Why a request has no whole answer. A failure is a result: it is counted, and its kind told."""

    UNREACHABLE = "unreachable"  # no connection
    STATUS = "status"  # an HTTP status that is not 200
    SERVER_ERROR = "server error"  # an event that says so, in the middle of a stream
    MALFORMED = "malformed"  # not HTTP, not JSON, not what the endpoint answers
    BROKEN_OFF = "broken off"  # the connection, or the stream, ended before the answer did
    EMPTY = "empty"  # a whole answer without a token
    TOO_LARGE = "too large"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"  # by us, as the load wanted it
    INTERRUPTED = "interrupted"  # by us, because the run was ended


def request_ids() -> Iterator[str]:
    """Without end. No two clients share one: a server keeps requests by their names, and tells of each."""
    run = secrets.token_hex(4)
    return (f"millrace-bench-{run}-{number}" for number in count(1))


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Question:
    """One request. extra: further fields of its body, as they are; n_input: tokens that a first turn was to have"""

    messages: Sequence[Message]
    max_tokens: int | None = None
    extra: Mapping[str, object] = field(default_factory=dict)
    n_input: int | None = None

    @property
    def text(self) -> str:
        """For endpoints that take a text."""
        return "\n".join(message.content for message in self.messages)


@dataclass(slots=True)
class Answer:
    """One request as its client saw it. A chunk is an event that holds tokens; several chunks may come in one read."""

    id: str = ""
    intended_s: float = 0.0  # when the load wanted it sent
    sent_s: float = 0.0  # when its bytes were handed to the connection
    chunk_s: list[float] = field(default_factory=list)  # when the bytes of each chunk had arrived
    chunk_tokens: list[int] = field(default_factory=list)  # output tokens up to each chunk, where the server tells them
    end_s: float = 0.0  # the end of the answer or of the attempt
    n_prompt: int | None = None  # as the server tells
    n_told: int | None = None  # output tokens, as the server tells
    text: str = ""
    finish_reason: str | None = None
    status: int = 0  # of HTTP; 0 where there was none
    failure: Failure | None = None
    detail: str = ""
    n_json: int | None = None  # bytes of a body's JSON, where tensors follow it in binary

    @property
    def n_output(self) -> int:
        """Output tokens: as the server tells, else one for each chunk."""
        return len(self.chunk_s) if self.n_told is None else self.n_told

    @property
    def n_first(self) -> int:
        """Tokens of the first chunk: one, where the server does not tell."""
        return self.chunk_tokens[0] if self.chunk_tokens else 1

    def fail(self, failure: Failure, detail: str) -> None:
        """The first reason is kept."""
        if self.failure is None:
            self.failure, self.detail = failure, detail
