"""What a connection needs of whatever answers some of its requests without ASGI."""

from collections.abc import Sequence
from typing import Protocol


class Answering(Protocol):
    """A request that is answered without ASGI, in place of uvicorn's RequestResponseCycle."""

    keep_alive: bool
    disconnected: bool
    response_started: bool
    response_complete: bool


class Sending(Protocol):
    """The connection, as it writes such a response."""

    def send(self, answered: Answering, response: bytes) -> None:
        """A whole response, its head included."""

    async def send_in_pieces(self, answered: Answering, head: bytes, body: bytes) -> None:
        """A long one, as fast as the client takes it."""


class Shortcut(Protocol):
    """Answers requests without ASGI: those that are, but for their body, as one that came before."""

    def came(self, method: str, path: bytes, headers: Sequence[tuple[bytes, bytes]], packet: bytes) -> None:
        """One request of HTTP/1.1, that is all of `packet`; it is on its way to be answered."""

    def knows(self, head: bytes) -> bool:
        """Whether these are the bytes of a head that came before, and a body must follow."""

    def begin(
        self, packet: bytes, dates: Sequence[tuple[bytes, bytes]], connection: Sending
    ) -> Answering | bytes | None:
        """The whole response to `packet`, or what `connection` is told to send later; None: neither.

        dates: headers that every response has
        """
