"""Frames of HTTP/2 by hand (RFC 9113), for clients that grpcio's own cannot be."""

import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_DATA, _HEADERS, _RESET, _SETTINGS, _WINDOW = 0, 1, 3, 4, 8
_END_HEADERS, _INITIAL_WINDOW, _CANCEL = 4, 4, 8
WAIT_S = 10.0


class Http2:
    """One connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def ask(self, path: str, messages: Sequence[bytes], window: int, n_calls: int = 1) -> None:
        """Begin calls of gRPC, each with these messages, of whose answers so many bytes are taken."""
        settings = _frame(_SETTINGS, struct.pack(">HI", _INITIAL_WINDOW, window), stream=0)
        self._sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
        names = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers"}
        head = b"".join(_literal(*one) for one in {**names, "content-type": "application/grpc"}.items())
        bodies = [b"\0" + struct.pack(">I", len(message)) + message for message in messages]
        for stream in range(1, 2 * n_calls, 2):
            data = b"".join(_frame(_DATA, body, stream=stream) for body in bodies)
            self._sock.sendall(_frame(_HEADERS, head, flags=_END_HEADERS, stream=stream) + data)

    def take(self, n_bytes: int, stream: int = 1) -> None:
        """So many more of that call."""
        more = struct.pack(">I", n_bytes)
        self._sock.sendall(_frame(_WINDOW, more, stream=stream) + _frame(_WINDOW, more, stream=0))

    def reset(self) -> None:
        self._sock.sendall(_frame(_RESET, struct.pack(">I", _CANCEL)))

    def read_until(self, *wanted: bytes) -> bytes:
        """One of these has come. raises TimeoutError, and AssertionError where the server ends before"""
        found = b""
        while not any(one in found for one in wanted):
            more = self._sock.recv(1 << 16)
            assert more, found
            found += more
        return found


@contextmanager
def http2(place: str) -> Iterator[Http2]:
    """place: HOST:PORT"""
    host, _, port = place.rpartition(":")
    with socket.create_connection((host, int(port)), WAIT_S) as sock:
        yield Http2(sock)


def _frame(kind: int, payload: bytes, *, stream: int = 1, flags: int = 0) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def _literal(name: str, value: str) -> bytes:
    """A header as it is, which nobody remembers (RFC 7541, 6.2.2)."""
    return b"\0" + b"".join(bytes((len(text),)) + text.encode() for text in (name, value))
