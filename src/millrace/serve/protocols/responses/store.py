"""Store of responses that clients can retrieve, cancel or continue; bounded in number and in bytes.

They are stored as JSON and decoded only to be continued: decoded, a tool or a message is many times as large.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from millrace.serve.http.errors import HttpError
from millrace.serve.llm.request_types import Message
from millrace.serve.protocols.responses.protocol import ResponseReply, Status

MAX_RESPONSES = 1000
MAX_STORED_BYTES = 64 * 2**20
OVERHEAD_BYTES = 1024  # of one response in addition to its JSON


@dataclass(slots=True)
class StoredResponse:
    """One stored response. messages_json: the conversation as a JSON list of Message, with the answer once complete

    status decides whether it is in progress; cancel: ends it then
    """

    id: str
    tenant: str  # its owner
    messages_json: bytes
    reply: bytes = b""  # JSON
    status: Status = "in_progress"
    has_answer: bool = False
    cancel: Callable[[], None] | None = None

    @property
    def n_bytes(self) -> int:
        return len(self.messages_json) + len(self.reply) + OVERHEAD_BYTES

    @property
    def fits(self) -> bool:
        """Return whether it could be stored at all, without any others."""
        return self.n_bytes <= MAX_STORED_BYTES

    @property
    def is_under_way(self) -> bool:
        return self.status == "in_progress"

    def write(self, reply: ResponseReply) -> None:
        """Update the reply and the status."""
        self.reply, self.status = msgspec.json.encode(reply), reply.status

    def end(self) -> None:
        """Cancel the response if it is in progress; its output so far stays."""
        if self.is_under_way and self.cancel is not None:
            self.cancel()

    def add(self, answer: Message) -> None:
        """Append the answer to the conversation, which is not empty."""
        self.messages_json, self.has_answer = self.messages_json[:-1] + b"," + msgspec.json.encode(answer) + b"]", True

    def messages(self) -> list[Message]:
        return msgspec.json.decode(self.messages_json, type=list[Message])


class ResponseStore:
    """The stored responses of one server, to be used in the event loop's thread.

    If there are too many, the least recently used one of the tenant with most of them is removed.
    """

    def __init__(self) -> None:
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._counted: dict[str, int] = {}  # bytes of each
        self._number, self._bytes = Counter[str](), Counter[str]()  # of each tenant's
        self.n_bytes = 0  # of all of them

    def add(self, response: StoredResponse) -> None:
        """Add a response that fits, and remove others for it."""
        self._responses[response.id] = response
        self._count(response, response.n_bytes)
        while len(self._responses) > MAX_RESPONSES or self.n_bytes > MAX_STORED_BYTES:
            totals = self._number if len(self._responses) > MAX_RESPONSES else self._bytes
            ended = (other for other in self._responses.values() if not other.is_under_way)  # the rest is in use
            evicted = max(ended, key=lambda other: totals[other.tenant], default=None)  # of equals the first
            if evicted is None:
                return
            self._forget(evicted.id)

    def update(self, response: StoredResponse) -> bool:
        """Update the size of a response, remove it if it no longer fits, and return whether it is stored."""
        if self._responses.get(response.id) is response:
            self._forget(response.id)
            if response.fits:
                self.add(response)
        return response.id in self._responses

    def get(self, response_id: str, tenant: str, param: str | None = None) -> StoredResponse:
        """Return a response. param: the field with its id. raises HttpError with 404, also for another tenant's"""
        response = self._responses.get(response_id)
        if response is None or response.tenant != tenant:
            error = HttpError(
                404, "response_not_found", f'there is no response "{response_id[:100]}"',
                f"one of the last {MAX_RESPONSES} that were stored, of at most {MAX_STORED_BYTES // 2**20} MiB "
                "together",
                "send the whole conversation as input",
            )  # fmt: skip
            raise error.about(param) if param else error
        self._responses.move_to_end(response_id)
        return response

    def previous(self, response_id: str, tenant: str) -> StoredResponse:
        """Return the response that a request continues. raises HttpError: 404 as `get`, 409 while it is in progress,

        400 if it failed or was cancelled before it had output
        """
        response, param = self.get(response_id, tenant, "previous_response_id"), "previous_response_id"
        if response.is_under_way:
            raise HttpError(
                409, "response_in_progress", f'the response "{response_id[:100]}" is still being answered',
                "one that has come to its end", "wait until its status is no longer in_progress, or cancel it",
            ).about(param)  # fmt: skip
        if not response.has_answer:
            raise HttpError(
                400, "response_without_answer",
                f'the response "{response_id[:100]}" is {response.status}, and has no answer', "one with an answer",
                "go on from the one before it, or ask again",
            ).about(param)  # fmt: skip
        return response

    def delete(self, response_id: str) -> None:
        self._responses[response_id].end()
        self._forget(response_id)

    def _forget(self, response_id: str) -> None:
        if (response := self._responses.pop(response_id, None)) is not None:
            self._count(response, None)

    def _count(self, response: StoredResponse, n_bytes: int | None) -> None:
        """Update the totals for a response. n_bytes: its size now; None: it was removed"""
        change = (n_bytes or 0) - self._counted.pop(response.id, 0)
        self.n_bytes += change
        self._bytes[response.tenant] += change
        self._number[response.tenant] += 1 if n_bytes is not None else -1
        if n_bytes is not None:
            self._counted[response.id] = n_bytes
        elif not self._number[response.tenant]:
            del self._number[response.tenant], self._bytes[response.tenant]
