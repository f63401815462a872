"""The HTTP parser of a connection, which takes no notice of offers to speak another protocol."""

from collections.abc import Iterable
from typing import Any, Protocol

import httptools

_UPGRADE = frozenset((b"upgrade", b"http2-settings"))  # headers, and what the header `connection` says of them


class Parsing(Protocol):
    """The connection: its parser's callbacks, and what an offer needs."""

    parser: Any

    def head_without_upgrade(self) -> bytes | None:
        """The head that was just read, for HTTP/1.1; None where nobody will answer it."""


class Parser(httptools.HttpRequestParser):
    """Does not stop at `upgrade: h2c` (`curl --http2`): what offers another protocol is answered in this one.

    The parser takes whatever follows such a head for that protocol, so it is given the head again without the offer.
    """

    def __init__(self, connection: Parsing) -> None:
        super().__init__(connection)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._connection = connection

    def feed_data(self, data: Any) -> None:
        """data: a small piece, as what follows an offer is copied"""
        parser: httptools.HttpRequestParser = self
        while True:
            try:
                httptools.HttpRequestParser.feed_data(parser, data)
                return
            except httptools.HttpParserUpgrade as offer:
                head = self._connection.head_without_upgrade()
                if head is None:
                    raise
                data = head + data[offer.args[0] :]
                parser = self._connection.parser = Parser(self._connection)  # this one may be at its end


def without_upgrade(request_line: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The head of a request that offers nothing."""
    lines = [request_line]
    for name, value in headers:
        if name == b"connection":
            value = b",".join(token for token in value.split(b",") if token.strip().lower() not in _UPGRADE)
        if name not in _UPGRADE:
            lines.append(name + b": " + value)
    return b"\r\n".join(lines) + b"\r\n\r\n"
