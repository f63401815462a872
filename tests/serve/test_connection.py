"""Connections that send too much, too slowly or nothing, and readers that take nothing: the others are served."""

import http.client
import json
import resource
import select
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from millrace.serve.http.connection_limits import number_of_connections
from tests.runtime.fakes import limits
from tests.serve.support import (
    START,
    VOCABULARY,
    Fake,
    Running,
    connect,
    everything,
    post,
    serving_with,
    tokenizer,
    until,
)
from tests.support.repository import ADD_SUB, in_process, write_models

ROOT = Path(__file__).resolve().parents[2]


pytestmark = pytest.mark.usefixtures("hurry")


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


@pytest.mark.parametrize("n_idle", [0, 3])
def test_a_server_ends_as_soon_as_nothing_is_left_to_close(tmp_path: Path, n_idle: int) -> None:
    """Also with connections that wait for a request: they are closed, and that takes no time."""
    root, took_s = write_models(tmp_path, {"m": ADD_SUB}), list[float]()
    for _ in range(5):  # the machine may be busy
        with ExitStack() as idle:
            with in_process(root) as served:
                where = served.url.removeprefix("http://").split(":")
                clients = [
                    idle.enter_context(socket.create_connection((where[0], int(where[1])))) for _ in range(n_idle)
                ]
                for client in clients:
                    client.sendall(b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n")
                    assert client.recv(4096).startswith(b"HTTP/1.1 200 OK")
                began_s = time.monotonic()
            took_s.append(time.monotonic() - began_s)
            assert all(is_closed(client, 2) for client in clients)
    assert min(took_s) < 0.5, took_s


def until_said(caplog: pytest.LogCaptureFixture, text: str) -> None:
    until(lambda: text in caplog.text)


def test_silence_ends_a_connection(caplog: pytest.LogCaptureFixture) -> None:
    with serving_with(header_timeout_s=0.2, keep_alive_s=0.2) as server, ExitStack() as stack:
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


def test_an_answer_that_takes_long_is_no_silence() -> None:
    slow = Fake(before_run=lambda step: time.sleep(0.03))
    with serving_with(slow, header_timeout_s=0.12, keep_alive_s=0.12, write_timeout_s=0.12) as server:
        reply = post(server.url, "/v1/completions", {"prompt": "a", "max_tokens": 15, "seed": 1})
        assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 15


def test_at_the_limit_the_longest_idle_connection_goes(caplog: pytest.LogCaptureFixture) -> None:
    with serving_with(max_connections=3) as server, ExitStack() as stack:
        idle = [stack.enter_context(connect(server)) for _ in range(3)]
        for oldest in idle[:2]:
            api = stack.enter_context(httpx.Client())
            assert api.get(server.url + "/health").status_code == 200
            assert is_closed(oldest, 2) and not is_closed(idle[2], 0.1)
    assert "idle ones are closed" in caplog.text


def test_at_the_limit_of_busy_connections_a_new_one_is_told_at_once(caplog: pytest.LogCaptureFixture) -> None:
    slow = Fake(before_run=lambda step: time.sleep(0.02))
    with serving_with(slow, max_connections=2) as server, ExitStack() as stack:
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
serve([Fake().model()], ServerSettings(port=0), announce=lambda url: print(url, flush=True))
"""


@pytest.mark.nightly
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


def test_a_client_that_goes_on_after_its_refusal_is_cut_off(server: Running) -> None:
    with connect(server) as raw:
        raw.sendall(START + b"content-length: 4000000000\r\n\r\n")
        assert raw.recv(65536).startswith(b"HTTP/1.1 413 ")
        start_s = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() - start_s < 10:
                raw.sendall(b"x" * 65536)
        assert time.monotonic() - start_s < 5


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
@pytest.mark.parametrize(("path", "n_bytes", "key", "status"), [
    ("/v1/completions", 14 << 20, True, 413), ("/v1/completions", 3 << 20, False, 401),
    ("/nowhere", 8 << 20, True, 404),
])  # fmt: skip
def test_a_client_that_sends_its_whole_body_first_gets_its_refusal(
    connection: str, path: str, n_bytes: int, key: bool, status: int
) -> None:
    """As urllib and http.client do, which read nothing before all is sent."""
    with serving_with(api_keys=("secret",)) as server:
        for _ in range(3):
            client = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)
            headers = {"connection": connection} | ({"authorization": "Bearer secret"} if key else {})
            client.request("POST", path, b"x" * n_bytes, headers)
            response = client.getresponse()
            assert response.status == status and json.loads(response.read())["error"]["message"]
            client.close()


@pytest.fixture
def much(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of any medium text are very many."""
    few = type(tokenizer())._encode
    monkeypatch.setattr(
        type(tokenizer()),
        "_encode",
        lambda self, text, special: [650] * 2_500_000 if len(text) > 512 else few(self, text, special),
    )


def ask_for_much(raw: socket.socket) -> None:
    """Some 8 MB of reply, of which nothing is read: more than a socket's buffers take."""
    content = json.dumps({"prompt": "a" * 600}).encode()
    raw.sendall(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(content) + content)


def test_a_reply_that_nobody_reads_is_given_up(much: None, caplog: pytest.LogCaptureFixture) -> None:
    with serving_with(write_timeout_s=0.3) as server, connect(server, 4096) as raw:
        ask_for_much(raw)
        until_said(caplog, "a reader took nothing")
        with pytest.raises(ConnectionResetError):  # at once, whatever lies in the buffers
            for _ in range(100_000):
                assert raw.recv(4096)


@pytest.mark.nightly
def test_a_reader_that_is_slow_but_reads_gets_all(much: None) -> None:
    with serving_with(write_timeout_s=0.3) as server, connect(server, 65536) as raw:
        ask_for_much(raw)
        n, more = 0, True
        while more:
            more = bool(got := raw.recv(400_000)) and not got.endswith(b"null}")
            n += len(got)
            time.sleep(0.005)
        assert n > 8_000_000


def test_replies_that_nobody_reads_are_bounded_together(much: None, caplog: pytest.LogCaptureFixture) -> None:
    with serving_with(write_timeout_s=60, max_unread_bytes=8_000_000) as server, ExitStack() as stack:
        readers = [stack.enter_context(connect(server, 4096)) for _ in range(4)]
        for raw in readers:
            ask_for_much(raw)
        until_said(caplog, "hold too much memory")
        assert post(server.url, "/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
        assert is_closed(readers[0], 10)


def test_a_stream_that_nobody_reads_is_reset(caplog: pytest.LogCaptureFixture) -> None:
    wide = limits(vocab_size=VOCABULARY, max_sequences=32, max_context=1024, n_pages=8192, max_step_tokens=64)
    with serving_with(Fake(limits=wide), write_timeout_s=0.3) as server, connect(server, 4096) as raw:
        body = {"prompt": "a", "max_tokens": 900, "n": 31, "stream": True, "logprobs": 20}
        content = json.dumps(body).encode()
        raw.sendall(START + b"content-length: %d\r\n\r\n" % len(content) + content)
        until_said(caplog, "a reader took nothing")
        server.wait_until_idle()
        with pytest.raises(ConnectionResetError):
            for _ in range(1_000_000):
                assert raw.recv(4096)
