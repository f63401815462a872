"""Connections that send too much, too slowly or nothing, and readers that take nothing: the others are served."""

import json
import resource
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from millrace.serve import connections
from millrace.serve import server as server_module
from millrace.serve.connections import MAX_HEAD_BYTES, number_of_connections
from millrace.serve.settings import ServerSettings
from tests.runtime.fakes import limits
from tests.serve.support import VOCABULARY, Fake, Running, post, running, tokenizer

ROOT = Path(__file__).resolve().parents[2]
START = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "SWEEP_TICKS", 1)
    monkeypatch.setattr(connections, "LINGER_S", 0.5)


def connect(server: Running, receive_bytes: int | None = None) -> socket.socket:
    raw = socket.socket()
    if receive_bytes is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    raw.settimeout(10)
    raw.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    return raw


def everything(raw: socket.socket) -> bytes:
    """What the server says until it closes."""
    parts = []
    while part := raw.recv(65536):
        parts.append(part)
    return b"".join(parts)


def is_closed(raw: socket.socket, within_s: float) -> bool:
    """The server has closed it, or reset it; what it said before is thrown away."""
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        if select.select([raw], [], [], 0.05)[0]:
            try:
                if not raw.recv(65536):
                    return True
            except ConnectionResetError:
                return True
    return False


def until_said(caplog: pytest.LogCaptureFixture, text: str) -> None:
    until_s = time.monotonic() + 20
    while text not in caplog.text:
        assert time.monotonic() < until_s
        time.sleep(0.05)


@contextmanager
def server_with(fake: Fake | None = None, **settings: object) -> Iterator[Running]:
    with running(fake, ServerSettings(port=0, **settings)) as server:  # type: ignore[arg-type]
        yield server


@pytest.mark.parametrize("kind", ["one endless header", "many headers", "an endless line", "of a second request"])
def test_headers_are_bounded_before_the_key_is_checked(server: Running, kind: str) -> None:
    filler = {"many headers": b"a: b\r\n" * 20_000, "an endless line": b"POST /" + b"a" * 100_000}.get(
        kind, b"a: " + b"b" * 1_000_000
    )
    start = b"" if kind == "an endless line" else START
    with server_with(api_keys=("secret",)) as other, connect(other) as raw:
        if kind == "of a second request":
            raw.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert raw.recv(65536).startswith(b"HTTP/1.1 200")
        raw.sendall(start + filler)
        said = everything(raw)
        assert said.startswith(b"HTTP/1.1 431 ") and b'"headers_too_large"' in said, said
        assert httpx.get(other.url + "/health").status_code == 200


def test_headers_just_within_the_limit_are_taken(server: Running) -> None:
    large = {"x-large": "a" * (MAX_HEAD_BYTES - 1000)}
    assert httpx.get(server.url + "/health", headers=large).status_code == 200
    assert httpx.get(server.url + "/health", headers={"x-large": "a" * MAX_HEAD_BYTES}).status_code == 431


def test_what_is_not_http_is_told_so(server: Running) -> None:
    with connect(server) as raw:
        raw.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        said = everything(raw)
        assert said.startswith(b"HTTP/1.1 400 ") and b'"invalid_http"' in said


def test_silence_ends_a_connection(caplog: pytest.LogCaptureFixture) -> None:
    with server_with(header_timeout_s=0.4, keep_alive_s=0.4) as server, ExitStack() as stack:
        silent, half, idle, blank = (stack.enter_context(connect(server)) for _ in range(4))
        half.sendall(START)
        for raw in (idle, blank):
            raw.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert raw.recv(65536).startswith(b"HTTP/1.1 200")
        blank.sendall(b"\r\n")  # which begins nothing
        said = everything(half)
        assert said.startswith(b"HTTP/1.1 408 ") and b'"header_timeout"' in said
        assert all(is_closed(raw, 3) for raw in (silent, idle, blank))
    assert "a connection without a request was closed" in caplog.text and "408 header_timeout" in caplog.text


def test_headers_byte_by_byte_do_not_help(server: Running) -> None:
    with server_with(header_timeout_s=0.5) as other, connect(other) as raw:
        start_s = time.monotonic()
        try:
            for byte in START * 10:
                raw.sendall(bytes([byte]))
                if select.select([raw], [], [], 0.02)[0]:
                    break
        except ConnectionError:
            pass
        assert 0.4 < time.monotonic() - start_s < 3


def test_an_answer_that_takes_long_is_no_silence() -> None:
    slow = Fake(before_run=lambda step: time.sleep(0.05))
    with server_with(slow, header_timeout_s=0.2, keep_alive_s=0.2, write_timeout_s=0.2) as server:
        reply = post(server.url, "/v1/completions", {"prompt": "a", "max_tokens": 15, "seed": 1})
        assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 15


def test_at_the_limit_the_longest_idle_connection_goes(caplog: pytest.LogCaptureFixture) -> None:
    with server_with(max_connections=3) as server, ExitStack() as stack:
        idle = [stack.enter_context(connect(server)) for _ in range(3)]
        time.sleep(0.05)
        for oldest in idle[:2]:
            api = stack.enter_context(httpx.Client())
            assert api.get(server.url + "/health").status_code == 200
            assert is_closed(oldest, 2) and not is_closed(idle[2], 0.1)
    assert "idle ones are closed" in caplog.text


def test_at_the_limit_of_busy_connections_a_new_one_is_told_at_once(caplog: pytest.LogCaptureFixture) -> None:
    slow = Fake(before_run=lambda step: time.sleep(0.02))
    with server_with(slow, max_connections=2) as server, ExitStack() as stack:
        body = {"prompt": "a", "max_tokens": 400, "stream": True, "seed": 1}
        streams = []
        for _ in range(2):
            reply = stack.enter_context(httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=20))
            streams.append(reply.iter_lines())
            assert next(streams[-1])
        start_s = time.monotonic()
        refused = httpx.get(server.url + "/health")
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "too_many_connections"
        assert time.monotonic() - start_s < 1
        silent = stack.enter_context(connect(server))
        assert is_closed(silent, 3), "what is over the limit is not waited for"
    assert "new ones get a 503" in caplog.text


def test_the_number_of_connections_follows_the_files(caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    n_open = len(psutil.Process().open_files()) + psutil.Process().num_fds()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (n_open + 200, hard))
        assert 100 < number_of_connections(None) < n_open + 200
        assert number_of_connections(7) == 7 and not caplog.text
        assert number_of_connections(10_000) == number_of_connections(None)
        assert "max_connections is 10000" in caplog.text
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


LIMITED = """
import resource, sys
sys.path[:0] = ["src", "."]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from tests.serve.support import Fake
from millrace.serve.server import serve
from millrace.serve.settings import ServerSettings
serve(Fake().model(), ServerSettings(port=0), announce=lambda url: print(url, flush=True))
"""


def test_500_idle_connections_at_64_open_files() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LIMITED], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None and child.stderr is not None
            url = child.stdout.readline().strip()
            port = int(url.rsplit(":", 1)[1])
            with ExitStack() as stack:
                for _ in range(500):
                    stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
                body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
                for _ in range(3):
                    assert post(url, "/v1/chat/completions", body).status_code == 200
            child.terminate()
            assert child.wait(10) == 0
            assert "idle ones are closed" in child.stderr.read()
        finally:
            child.kill()


def test_unfinished_bodies_are_bounded_together() -> None:
    body = b'{"prompt": "' + b"a" * 700_000
    head = START + b"content-length: 800000\r\n\r\n"
    with server_with(max_receiving_bytes=1_500_000, max_body_bytes=1_000_000) as server, ExitStack() as stack:
        holding = [stack.enter_context(connect(server)) for _ in range(2)]
        for raw in holding:
            raw.sendall(head + body)
        time.sleep(0.3)
        large = {"prompt": "a" * 400_000}
        refused = post(server.url, "/v1/completions", large)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "too_many_bodies", refused.text
        assert int(refused.headers["retry-after"]) >= 1
        assert post(server.url, "/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
        for raw in holding:
            raw.close()
        until_s = time.monotonic() + 5
        while post(server.url, "/v1/completions", large).status_code == 503:
            assert time.monotonic() < until_s


def test_a_client_that_goes_on_after_its_refusal_is_cut_off(server: Running) -> None:
    with connect(server) as raw:
        raw.sendall(START + b"content-length: 4000000000\r\n\r\n")
        assert raw.recv(65536).startswith(b"HTTP/1.1 413 ")
        start_s = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() - start_s < 10:
                raw.sendall(b"x" * 65536)
        assert time.monotonic() - start_s < 5


@pytest.fixture
def much(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of any medium text are very many."""
    few = type(tokenizer())._encode
    monkeypatch.setattr(
        type(tokenizer()),
        "_encode",
        lambda self, text, special: [650] * 1_200_000 if len(text) > 512 else few(self, text, special),
    )


def ask_for_much(raw: socket.socket) -> None:
    """Some 8 MB of reply, of which nothing is read: more than a socket's buffers take."""
    content = json.dumps({"prompt": "a" * 600, "return_token_strs": True}).encode()
    raw.sendall(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(content) + content)


def test_a_reply_that_nobody_reads_is_given_up(much: None, caplog: pytest.LogCaptureFixture) -> None:
    with server_with(write_timeout_s=0.3) as server, connect(server, 4096) as raw:
        ask_for_much(raw)
        until_said(caplog, "a reader took nothing")
        time.sleep(0.2)
        with pytest.raises(ConnectionResetError):  # at once, whatever lies in the buffers
            for _ in range(100_000):
                assert raw.recv(4096)


def test_a_reader_that_is_slow_but_reads_gets_all(much: None) -> None:
    with server_with(write_timeout_s=0.6) as server, connect(server, 65536) as raw:
        ask_for_much(raw)
        n, more = 0, True
        while more:
            more = bool(got := raw.recv(400_000)) and not got.endswith(b"]}")
            n += len(got)
            time.sleep(0.02)
        assert n > 8_000_000


def test_replies_that_nobody_reads_are_bounded_together(much: None, caplog: pytest.LogCaptureFixture) -> None:
    with server_with(write_timeout_s=60, max_unread_bytes=8_000_000) as server, ExitStack() as stack:
        readers = [stack.enter_context(connect(server, 4096)) for _ in range(4)]
        for raw in readers:
            ask_for_much(raw)
        until_said(caplog, "hold too much memory")
        assert post(server.url, "/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
        assert is_closed(readers[0], 10)


def test_a_stream_that_nobody_reads_is_reset(caplog: pytest.LogCaptureFixture) -> None:
    wide = limits(vocab_size=VOCABULARY, max_sequences=32, max_context=1024, n_pages=8192)
    with server_with(Fake(limits=wide), write_timeout_s=0.3) as server, connect(server, 4096) as raw:
        body = {"prompt": "a", "max_tokens": 900, "n": 31, "stream": True, "logprobs": 20}
        content = json.dumps(body).encode()
        raw.sendall(START + b"content-length: %d\r\n\r\n" % len(content) + content)
        until_said(caplog, "a reader took nothing")
        server.wait_until_idle()
        with pytest.raises(ConnectionResetError):
            for _ in range(1_000_000):
                assert raw.recv(4096)


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


@pytest.mark.parametrize("kind", ["many", "one without an end", "an extension without an end"])
def test_what_comes_behind_a_body_is_bounded_too(kind: str) -> None:
    """Trailers are headers: nobody reads them, and they were kept."""
    with server_with(api_keys=("secret",)) as server, connect(server) as raw:
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
    with server_with() as server, connect(server) as raw:
        body = b'{"prompt": "abc", "max_tokens": 1, "user": "' + b"u" * 3 * MAX_HEAD_BYTES + b'"}'
        raw.sendall(
            START + b"content-type: application/json\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
        )
        for at in range(0, len(body), 1000):
            part = body[at : at + 1000]
            raw.sendall(b"%x;note=1\r\n" % len(part) + part + b"\r\n")
        raw.sendall(b"0\r\na-trailer: yes\r\n\r\n")
        assert everything(raw).startswith(b"HTTP/1.1 200")
