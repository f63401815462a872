"""A plain socket that sends packets of HTTP/1.1 as they are, and reads responses."""

import socket
from collections.abc import Iterator

Response = tuple[bytes, dict[bytes, bytes], bytes]


class Connection:
    def __init__(self, url: str) -> None:
        self.socket = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._read = self.socket.makefile("rb")

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self._read.close()
        self.socket.close()

    def send(self, *packets: bytes, n: int = 1) -> list[Response]:
        """Send packets; return `n` responses, or those before the end, without the headers that differ each time."""
        for packet in packets:
            self.socket.sendall(packet)
        return [response for _ in range(n) for response in self.read_response()]

    def read_response(self) -> Iterator[Response]:
        status = self._read.readline()
        while status.startswith(b"HTTP/1.1 100"):
            assert self._read.readline() == b"\r\n"
            status = self._read.readline()
        headers: dict[bytes, bytes] = {}
        while (line := self._read.readline().rstrip(b"\r\n")) != b"":
            name, _, value = line.partition(b": ")
            headers[name] = value
        body = self._read.read(int(headers.get(b"content-length", b"0")))
        assert b"date" in headers or not headers.pop(b"x-request-id", None) or status[9:12] != b"200"
        for changing in (b"date", b"x-request-id"):
            headers.pop(changing, None)
        if status:
            yield status, headers, body
