"""Responses that are kept for a while: to be asked for, cancelled, or gone on from. Bounded in number and in bytes."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millrace.serve.errors import HttpError
from millrace.serve.protocol import Message
from millrace.serve.responses.protocol import ResponseReply

MAX_KEPT = 1000
MAX_KEPT_BYTES = 64 * 2**20  # of the bodies that began them, and of their answers' texts


@dataclass(slots=True)
class Kept:
    """messages: the conversation up to and with the answer, None where there is none; cancel: while it is answered"""

    reply: ResponseReply
    messages: Sequence[Message] | None
    n_bytes: int
    tenant: str  # whose it is
    cancel: Callable[[], None] | None = None


class Responses:
    """Of one server, in the event loop's thread. The one that was not asked for the longest goes first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._n_bytes = 0

    def keep(self, kept: Kept) -> None:
        self._kept[kept.reply.id] = kept
        self._n_bytes += kept.n_bytes
        for other in list(self._kept.values()):
            if len(self._kept) <= MAX_KEPT and self._n_bytes <= MAX_KEPT_BYTES:
                return
            if other.cancel is None:  # what is still being answered is somebody's
                self._forget(other.reply.id)

    def changed(self, kept: Kept, n_bytes: int) -> None:
        """It has so many bytes now. Nothing where it was deleted."""
        if self._kept.get(kept.reply.id) is kept:
            self._forget(kept.reply.id)
            kept.n_bytes = n_bytes
            self.keep(kept)

    def get(self, response_id: str, tenant: str, param: str | None = None) -> Kept:
        """raises HttpError with 404, also for one of another tenant; param: the field that named it"""
        kept = self._kept.get(response_id)
        if kept is None or kept.tenant != tenant:
            error = HttpError(
                404, "response_not_found", f'there is no response "{response_id[:100]}"',
                f"one of the last {MAX_KEPT} that were stored", "send the whole conversation as input",
            )  # fmt: skip
            raise error.about(param) if param else error
        self._kept.move_to_end(response_id)
        return kept

    def before(self, response_id: str, tenant: str) -> Kept:
        """The one that another goes on from. raises HttpError: 404 as `get`, 409 while it is being answered

        400 where it failed or was cancelled before it said anything.
        """
        kept, param = self.get(response_id, tenant, "previous_response_id"), "previous_response_id"
        if kept.cancel is not None:
            raise HttpError(
                409, "response_in_progress", f'the response "{response_id[:100]}" is still being answered',
                "one that has come to its end", "wait until its status is no longer in_progress, or cancel it",
            ).about(param)  # fmt: skip
        if kept.messages is None:
            raise HttpError(
                400, "response_without_answer",
                f'the response "{response_id[:100]}" is {kept.reply.status}, and has no answer', "one with an answer",
                "go on from the one before it, or ask again",
            ).about(param)  # fmt: skip
        return kept

    def delete(self, response_id: str) -> None:
        kept = self._kept[response_id]
        if kept.cancel is not None:
            kept.cancel()
        self._forget(response_id)

    def _forget(self, response_id: str) -> None:
        kept = self._kept.pop(response_id, None)
        self._n_bytes -= kept.n_bytes if kept else 0
