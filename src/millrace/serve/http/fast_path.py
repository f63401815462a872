"""Interfaces between a connection and what answers some of its requests without ASGI."""

from collections.abc import Sequence
from typing import Protocol


class FastPathCycle(Protocol):
    """A request that is answered without ASGI; replaces uvicorn's RequestResponseCycle."""

    keep_alive: bool
    disconnected: bool
    response_started: bool
    response_complete: bool


class ResponseWriter(Protocol):
    """A connection that writes such responses."""

    def send(self, answered: FastPathCycle, response: bytes) -> None:
        """Send a whole response, its head included."""

    async def send_in_pieces(self, answered: FastPathCycle, head: bytes, body: bytes) -> None:
        """Send a long response as fast as the client reads it."""


class FastPath(Protocol):
    """Answers requests without ASGI whose heads equal an earlier one's; shared by the connections of one server."""

    def remember(self, method: str, path: bytes, headers: Sequence[tuple[bytes, bytes]], packet: bytes) -> None:
        """Remember a request of HTTP/1.1, all of `packet`, which ASGI answers."""

    def expects_body(self, head: bytes) -> bool:
        """Return whether `head` was remembered, with a body that has yet to come."""

    def begin(
        self, packet: bytes, dates: Sequence[tuple[bytes, bytes]], connection: ResponseWriter
    ) -> FastPathCycle | bytes | None:
        """Return the response to `packet`, or what `connection` sends later; None: ASGI must answer.

        dates: headers that every response has
        """
