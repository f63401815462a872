"""What comes in front of a body, behind it and between requests: bounded, and read as HTTP/1.1."""

import json
import select
import socket
import time

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from millrace.serve.http.connection import HEADER_BYTES, MAX_HEAD_BYTES
from tests.serve.support import START, Running, connect, everything, serving_with

pytestmark = pytest.mark.usefixtures("hurry")


@pytest.mark.parametrize("kind", ["one endless header", "many headers", "an endless line", "of a second request"])
def test_headers_are_bounded_before_the_key_is_checked(server: Running, kind: str) -> None:
    filler = {"many headers": b"a: b\r\n" * 20_000, "an endless line": b"POST /" + b"a" * 100_000}.get(
        kind, b"a: " + b"b" * 1_000_000
    )
    start = b"" if kind == "an endless line" else START
    with serving_with(api_keys=("secret",)) as other, connect(other) as raw:
        if kind == "of a second request":
            raw.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert raw.recv(65536).startswith(b"HTTP/1.1 200")
        raw.sendall(start + filler)
        said = everything(raw)
        assert said.startswith(b"HTTP/1.1 431 ") and b'"headers_too_large"' in said, said
        assert httpx.get(other.url + "/health").status_code == 200


def test_tiny_headers_count_more_than_their_bytes(server: Running) -> None:
    """16,000 of them are objects of two megabytes."""
    many = {f"x{i}": "" for i in range(1700)}
    assert httpx.get(server.url + "/health", headers=many).status_code == 200
    with connect(server) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\n" + b"a:\r\n" * (MAX_HEAD_BYTES // HEADER_BYTES))  # not yet complete
        assert everything(raw).startswith(b"HTTP/1.1 431 ")


def test_headers_just_within_the_limit_are_taken(server: Running) -> None:
    large = {"x-large": "a" * (MAX_HEAD_BYTES - 1000)}
    assert httpx.get(server.url + "/health", headers=large).status_code == 200
    assert httpx.get(server.url + "/health", headers={"x-large": "a" * MAX_HEAD_BYTES}).status_code == 431


def test_what_is_not_http_is_told_so(server: Running) -> None:
    with connect(server) as raw:
        raw.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        said = everything(raw)
        assert said.startswith(b"HTTP/1.1 400 ") and b'"invalid_http"' in said


@pytest.mark.nightly
def test_headers_byte_by_byte_do_not_help(server: Running) -> None:
    with serving_with(header_timeout_s=0.5) as other, connect(other) as raw:
        start_s = time.monotonic()
        try:
            for byte in START * 10:
                raw.sendall(bytes([byte]))
                if select.select([raw], [], [], 0.02)[0]:
                    break
        except ConnectionError:
            pass
        assert 0.4 < time.monotonic() - start_s < 3


def test_a_head_behind_a_long_body_is_counted_alone(server: Running) -> None:
    """The packet that ends a body of 60 kB begins the next head, which comes in several."""
    content = json.dumps({"prompt": "a", "max_tokens": 1, "user": "x" * 60_000}).encode()
    first = START + b"content-length: %d\r\n\r\n" % len(content) + content
    with connect(server) as raw:
        raw.sendall(first + b"GET /v1/health/live HTTP/1.1\r\nhost: x\r\n")
        for i in range(5):
            time.sleep(0.02)
            raw.sendall(b"x-%d: " % i + b"a" * 8000 + b"\r\n")
        raw.sendall(b"connection: close\r\n\r\n")
        assert everything(raw).count(b"HTTP/1.1 200") == 2


def test_requests_behind_each_other_in_one_packet(server: Running) -> None:
    one = b"GET /v1/health/live HTTP/1.1\r\nhost: x\r\n\r\n"
    with connect(server) as raw:
        raw.sendall(one * 3 + b"GET /v1/health/live HTTP/1.1\r\nconnection: close\r\nhost: x\r\n\r\n")
        assert everything(raw).count(b"HTTP/1.1 200") == 4
    with connect(server) as raw:  # the second is refused, and what follows it is not read
        raw.sendall(one)
        assert raw.recv(65536).startswith(b"HTTP/1.1 200")
        raw.sendall(b"GET / HTTP/1.1\r\na: " + b"b" * MAX_HEAD_BYTES + b"\r\n\r\n" + one * 2)
        said = everything(raw)
        assert said.count(b"HTTP/1.1") == 1 and said.startswith(b"HTTP/1.1 431")


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["many", "one without an end", "an extension without an end"])
def test_what_comes_behind_a_body_is_bounded_too(kind: str) -> None:
    """Trailers are headers: nobody reads them, and they were kept."""
    with serving_with(api_keys=("secret",)) as server, connect(server) as raw:
        raw.sendall(START + b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n")
        raw.sendall({"many": b"0\r\n", "one without an end": b"0\r\na: ", "an extension without an end": b"1;"}[kind])
        piece = b"a: b\r\n" * 512 if kind == "many" else b"x" * 4096
        before, until_s = psutil.Process().memory_info().rss, time.monotonic() + 20
        with pytest.raises((BrokenPipeError, ConnectionResetError)):  # after a moment in which it is thrown away
            while time.monotonic() < until_s:
                raw.send(piece)
        assert psutil.Process().memory_info().rss - before < 64 * 2**20
        assert httpx.get(server.url + "/health", timeout=5).status_code == 200


def test_a_long_body_in_small_chunks_is_none_of_that() -> None:
    with serving_with() as server, connect(server) as raw:
        body = b'{"prompt": "abc", "max_tokens": 1, "user": "' + b"u" * 3 * MAX_HEAD_BYTES + b'"}'
        raw.sendall(
            START + b"content-type: application/json\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
        )
        for at in range(0, len(body), 1000):
            part = body[at : at + 1000]
            raw.sendall(b"%x;note=1\r\n" % len(part) + part + b"\r\n")
        raw.sendall(b"0\r\na-trailer: yes\r\n\r\n")
        assert everything(raw).startswith(b"HTTP/1.1 200")


OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
LIVE = b"GET /v1/health/live HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize("size", [1, 30, 10**6])
@pytest.mark.parametrize("framing", ["length", "chunks"])
def test_an_offer_of_http_2_is_answered_in_http_1(server: Running, framing: str, size: int) -> None:
    """As `curl --http2` makes it: the body was lost. The next requests are none of its affair."""
    body = json.dumps({"prompt": "a", "max_tokens": 1, "seed": 1}).encode()
    if framing == "length":
        first = START + OFFER + b"content-length: %d\r\n\r\n" % len(body) + body
    else:
        first = START + OFFER + b"transfer-encoding: chunked\r\n\r\n%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
    data = first + LIVE + OFFER + b"\r\n" + LIVE + b"connection: upgrade, close\r\nupgrade: websocket\r\n\r\n"
    with connect(server) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(data), size):
            raw.sendall(data[at : at + size])
        said = everything(raw)
    assert said.count(b"HTTP/1.1 200") == 3 and b'"text_completion"' in said, said


def test_a_head_with_an_offer_is_bounded_and_a_tunnel_is_none(server: Running) -> None:
    with connect(server) as raw:
        raw.sendall(START + OFFER + b"a: " + b"b" * MAX_HEAD_BYTES + b"\r\ncontent-length: 2\r\n\r\n{}")
        assert everything(raw).startswith(b"HTTP/1.1 431")
    with connect(server) as raw:
        raw.sendall(b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert everything(raw).startswith((b"HTTP/1.1 404", b"HTTP/1.1 405", b"HTTP/1.1 400"))


@pytest.mark.parametrize(
    "lines, status, code",
    [
        (b"host: x\r\ntransfer-encoding: gzip, chunked\r\n", 501, b"unknown_transfer_coding"),
        (b"host: x\r\ntransfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n", 501, b"unknown_transfer_coding"),
        (b"", 400, b"invalid_host"),
        (b"host: x\r\nhost: y\r\n", 400, b"invalid_host"),
    ],
)
def test_heads_that_http_does_not_know(server: Running, lines: bytes, status: int, code: bytes) -> None:
    with connect(server) as raw:
        raw.sendall(b"POST /tokenize HTTP/1.1\r\n" + lines + b"\r\n" + b"0\r\n\r\n")
        said = everything(raw)
    assert said.startswith(b"HTTP/1.1 %d " % status) and b'"%b"' % code in said and said.count(b"HTTP/1.1") == 1


def test_heads_that_http_knows(server: Running) -> None:
    """Chunks by any spelling; and in HTTP/1.0 nobody has to name a host."""
    body = b'd\r\n{"prompt":"a"\r\n1\r\n}\r\n0\r\n\r\n'
    for coding in (b"chunked", b" Chunked "):
        with connect(server) as raw:
            head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: %b\r\n\r\n" % coding
            raw.sendall(head + body)
            assert everything(raw).startswith(b"HTTP/1.1 200 "), coding
    with connect(server) as raw:
        raw.sendall(b"GET /v1/health/live HTTP/1.0\r\n\r\n")
        assert everything(raw).startswith(b"HTTP/1.1 200 ")
