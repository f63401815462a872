"""Requests of the load generator and their records; times in seconds of this machine's monotonic clock."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count


class Failure(StrEnum):
    """Reason why a request has no complete answer. Failures are results: they are counted by kind."""

    UNREACHABLE = "unreachable"  # no connection
    STATUS = "status"  # HTTP status other than 200
    SERVER_ERROR = "server error"  # an error event in the stream
    MALFORMED = "malformed"  # invalid HTTP or JSON, or not the endpoint's format
    BROKEN_OFF = "broken off"  # connection or stream ended before the answer did
    EMPTY = "empty"  # a complete answer without a token
    TOO_LARGE = "too large"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"  # by the client, as the load requires
    INTERRUPTED = "interrupted"  # by the client, because the run ended


def request_ids() -> Iterator[str]:
    """Yield unique request ids without end; servers keep traces of requests by these ids."""
    run = secrets.token_hex(4)
    return (f"millrace-bench-{run}-{number}" for number in count(1))


@dataclass(frozen=True, slots=True)
class BenchMessage:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request. extra: additional fields of its body; n_input: requested prompt tokens of a first turn"""

    messages: Sequence[BenchMessage]
    max_tokens: int | None = None
    extra: Mapping[str, object] = field(default_factory=dict)
    n_input: int | None = None

    @property
    def text(self) -> str:
        """Return the messages as one text, for endpoints without messages."""
        return "\n".join(message.content for message in self.messages)


@dataclass(slots=True)
class BenchRecord:
    """One request as its client saw it. A chunk is an event with tokens; one read may return several chunks."""

    id: str = ""
    intended_s: float = 0.0  # scheduled send time
    sent_s: float = 0.0  # actual send time
    chunk_s: list[float] = field(default_factory=list)  # arrival of each chunk
    chunk_tokens: list[int] = field(default_factory=list)  # cumulative output tokens at each chunk, if reported
    end_s: float = 0.0  # end of the answer or of the attempt
    n_prompt: int | None = None  # reported by the server
    n_reported: int | None = None  # output tokens reported by the server
    text: str = ""
    finish_reason: str | None = None
    status: int = 0  # HTTP status; 0 if there was no response
    failure: Failure | None = None
    detail: str = ""
    n_json: int | None = None  # length of the JSON if binary tensors follow it

    @property
    def n_output(self) -> int:
        """Return the output tokens: reported by the server, otherwise one per chunk."""
        return len(self.chunk_s) if self.n_reported is None else self.n_reported

    @property
    def n_first(self) -> int:
        """Return the tokens of the first chunk; 1 if not reported."""
        return self.chunk_tokens[0] if self.chunk_tokens else 1

    def fail(self, failure: Failure, detail: str) -> None:
        """Mark the request as failed; the first reason is kept."""
        if self.failure is None:
            self.failure, self.detail = failure, detail
