"""The process: sockets, signals, the log, imports."""

import io
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from millrace.checkpoint.tokenizer.tokenizer import Tokenizer
from millrace.errors import ConfigError
from millrace.serve.http import routes
from millrace.serve.http.routes import Protocol
from millrace.serve.http.sockets import bind
from millrace.serve.llm import request_decoding
from millrace.serve.llm.language_model import TextModel
from millrace.serve.llm.request_types import Body
from millrace.serve.ops.logs import JsonFormatter, Logging, TextFormatter
from millrace.serve.server import Server
from millrace.serve.settings import ServerSettings
from tests.runtime.fakes import limits
from tests.serve.support import (
    MODEL,
    START,
    VOCABULARY,
    Fake,
    Running,
    connect,
    http_requests,
    post,
    running,
    serving_with,
    until,
)
from tests.support.vocabularies import CHATML

ROOT = Path(__file__).resolve().parents[2]
MAIN = """
import sys, time
sys.path[:0] = ["src", "."]
from tests.serve.support import Fake, tokenizer
from millrace.serve.server import serve
from millrace.serve.settings import ServerSettings
{before}
model = Fake(before_run=lambda step: time.sleep({step_s}), template={template!r}, template_timeout_s=30).model()
settings = ServerSettings(port=0, log_format="json", drain_timeout_s={drain_s})
serve([model], settings, announce=lambda url: print(url, flush=True), last=True)
assert not model.engine.loop.thread.running and sys.getswitchinterval() == 0.005
"""


@contextmanager
def process(
    before: str = "", drain_s: float = 20.0, step_s: str = "0.02", template: str = CHATML
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server of its own, and its address."""
    code = MAIN.format(before=before, drain_s=drain_s, step_s=step_s, template=template)
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None
            url = child.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:"), (url, child.stderr and child.stderr.read())
            yield child, url
        finally:
            child.kill()


def lines(child: subprocess.Popen[str]) -> list[dict[str, object]]:
    assert child.stderr is not None
    return [json.loads(line) for line in child.stderr.read().splitlines()]


def test_sigterm_drains_and_exits_with_0() -> None:
    with process() as (child, url):
        body = {"prompt": "a", "max_tokens": 60, "stream": True, "seed": 1}
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=20) as reply:
            events = reply.iter_lines()
            next(events)
            child.send_signal(signal.SIGTERM)
            until(lambda: httpx.get(url + "/v1/health/ready").status_code == 503)
            ready = httpx.get(url + "/v1/health/ready")
            assert ready.status_code == 503 and "shutting down" in ready.json()["message"]
            assert httpx.get(url + "/v1/health/live").status_code == httpx.get(url + "/health").status_code == 200
            refused = post(url, "/v1/completions", {"prompt": "a"})
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
            rest = list(events)
        assert sum(line.startswith("data: {") for line in rest) >= 40 and "data: [DONE]" in rest
        assert child.wait(10) == 0
        logged = lines(child)
        done = next(line for line in logged if line.get("path") == "/v1/completions" and line["status"] == 200)
        assert done["generated_tokens"] == 60 and done["finish_reason"] == "length" and done["model"] == MODEL


@pytest.mark.parametrize("where", ["decoded", "tokenised"])
def test_a_request_that_is_still_being_prepared_is_answered(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted is what was there whole before the signal, in whatever lane it is."""
    begun, go, encode = threading.Event(), threading.Event(), Tokenizer.encode

    def wait() -> None:
        begun.set()
        assert go.wait(10)

    def read_late(body: bytes, kind: type[Body]) -> tuple[Body, tuple[str, ...]]:
        if len(body) > 100_000:
            wait()
        return request_decoding.read_request(body, kind)

    def encode_late(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) > 512:
            wait()
        return encode(self, text, add_special_tokens)

    if where == "decoded":
        monkeypatch.setattr(routes, "read_request", read_late)
    else:
        monkeypatch.setattr(Tokenizer, "encode", encode_late)
    with running() as server, ThreadPoolExecutor(1) as pool:
        body = {"prompt": "mill " * 104, "max_tokens": 3, "user": "x" * 200_000}
        asked = pool.submit(post, server.url, "/v1/completions", body)
        assert begun.wait(10)
        server.server.stop()
        until(lambda: httpx.get(server.url + "/v1/health/ready").status_code == 503)
        assert post(server.url, "/v1/completions", {"prompt": "a"}).status_code == 503
        go.set()
        assert asked.result().status_code == 200 and asked.result().json()["usage"]["completion_tokens"] == 3


def test_signals_at_the_very_end_change_nothing() -> None:
    """A supervisor that repeats itself, or an impatient Ctrl-C, while a process unloads that answered everything."""
    with process() as (child, _):
        while child.poll() is None:
            child.send_signal(signal.SIGTERM)
            child.send_signal(signal.SIGINT)
            time.sleep(0.005)
        assert child.returncode == 0


def test_a_second_signal_is_quicker() -> None:
    with process() as (child, url):
        body = {"prompt": "a", "max_tokens": 500, "stream": True}
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=20) as reply:
            events = reply.iter_lines()
            next(events)
            child.send_signal(signal.SIGINT)
            until(lambda: httpx.get(url + "/v1/health/ready").status_code == 503)
            child.send_signal(signal.SIGTERM)
            start_s = time.monotonic()
            try:
                rest = list(events)
            except httpx.RemoteProtocolError:
                rest = []  # cut off before the error event was flushed
            assert not rest or any("could not be finished" in line for line in rest)
        assert child.wait(10) == 0 and time.monotonic() - start_s < 5


def ends_in(
    child: subprocess.Popen[str], url: str, path: str, body: dict[str, object], begun: Callable[[], object]
) -> tuple[int, float]:
    """The exit status, and the seconds from the signal to the end, while such a request is under way."""

    def ask() -> None:
        with suppress(httpx.HTTPError):
            httpx.post(url + path, json=body, timeout=30)

    asking = threading.Thread(target=ask)
    asking.start()
    until(begun)
    start_s = time.monotonic()
    child.send_signal(signal.SIGTERM)
    status = child.wait(20)
    took_s = time.monotonic() - start_s
    asking.join()
    return status, took_s


def says_so(child: subprocess.Popen[str]) -> bool:
    assert child.stdout is not None
    return child.stdout.readline() == "begun\n"


def renders(child: subprocess.Popen[str]) -> bool:
    """Its process for templates works hard: longer than it takes to start."""
    return any(p.cpu_times().user > 0.5 for p in psutil.Process(child.pid).children())


BEGUN = "print('begun', flush=True)"
SLOW_TEXT = (
    "type(tokenizer())._encode = "
    f"lambda self, text, special: (len(text) > 600 and ({BEGUN}, time.sleep(60)) and []) or [1]"
)
LOOP = (
    "{% if messages[0].content == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}{% endif %}x"
)


def test_no_thread_holds_up_the_exit() -> None:
    """One that tokenises for a minute, and a process that renders for ever."""
    with process(before=SLOW_TEXT, drain_s=0.2) as (child, url):
        status, took_s = ends_in(child, url, "/v1/completions", {"prompt": "a" * 1000}, lambda: says_so(child))
        assert status == 0 and took_s < 4
    with process(template=LOOP, drain_s=0.2) as (child, url):
        body: dict[str, object] = {"messages": [{"role": "user", "content": "loop"}]}
        status, took_s = ends_in(child, url, "/v1/chat/completions", body, lambda: renders(child))
        assert status == 0 and took_s < 4


@pytest.mark.parametrize(("kind", "max_s"), [
    ("unread streams", 5), ("incomplete and idle", 5),
    pytest.param("unread streams", 2, marks=pytest.mark.timing),
    pytest.param("incomplete and idle", 1, marks=pytest.mark.timing),
])  # fmt: skip
def test_no_connection_holds_up_the_exit(kind: str, max_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each took five seconds more than there were."""

    def narrow(host: str, port: int, *, shared: bool) -> socket.socket:
        sock = bind(host, port, shared=shared)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # its connections inherit that
        return sock

    monkeypatch.setattr("millrace.serve.http.sockets.bind", narrow)
    wide = limits(vocab_size=VOCABULARY, max_sequences=128, max_context=1024, n_pages=32768, max_step_tokens=256)
    drain_s = 1.0 if kind == "unread streams" else 30.0  # for which nobody need wait
    with serving_with(Fake(limits=wide), drain_timeout_s=drain_s) as server, ExitStack() as stack:
        body = {"prompt": "a", "max_tokens": 900, "n": 31, "stream": True, "logprobs": 20, "ignore_eos": True}
        content = json.dumps(body).encode()
        whole = START + b"content-length: %d\r\n\r\n" % len(content) + content
        idle = b"GET /v1/health/live HTTP/1.1\r\nhost: x\r\n\r\n"
        sent = [whole] * 4 if kind == "unread streams" else [whole[:-1], START, b"", idle, idle + whole[:-1]] * 3
        for data in sent:
            stack.enter_context(connect(server, 4096)).sendall(data)
        if kind == "unread streams":
            until(lambda: server.stats().generation_tokens_total > 31 * 100)
        else:
            until(lambda: http_requests(server, "/v1/health/live", 200) == 6)
            time.sleep(0.1)
        start_s = time.monotonic()
        server.server.stop()
        server.thread.join(10)
        assert time.monotonic() - start_s < max_s


def test_a_step_that_never_ends_does_not_hold_up_the_exit() -> None:
    with process(drain_s=0.2, step_s=f"0 if len(step.tokens) < 5 else {BEGUN} or 60") as (child, url):
        status, took_s = ends_in(child, url, "/v1/completions", {"prompt": list(range(1, 10))}, lambda: says_so(child))
        assert status == 1 and took_s < 2 and "did not end within" in (child.stderr.read() if child.stderr else "")


def test_a_server_goes_on_where_nobody_listens_to_its_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`millrace serve | head -1`"""

    def unheard(
        models: list[TextModel], settings: ServerSettings, announce: Callable[[str], None], protocols: list[Protocol]
    ) -> Server:
        def announced(url: str) -> None:
            announce(url)
            raise BrokenPipeError

        return Server(models, settings, announced, protocols)

    monkeypatch.setattr("tests.support.server.Server", unheard)
    with running() as server:
        until(lambda: "it serves all the same" in caplog.text)
        assert post(server.url, "/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_an_address_in_use_is_a_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}.*[Aa]ddress already in use"):
            bind("127.0.0.1", port)
    for host in ("no.such.host.invalid", "203.0.113.7", "a" * 300):
        with pytest.raises(ConfigError, match="cannot listen on"):
            bind(host, 0)


def test_settings_are_checked() -> None:
    wrong: list[dict[str, object]] = [
        {"port": 70000}, {"log_format": "xml"}, {"max_body_bytes": 0}, {"write_timeout_s": 0}, {"drain_timeout_s": -1},
        {"api_keys": ("a", "")},
    ]  # fmt: skip
    for settings in wrong:
        with pytest.raises(ConfigError):
            ServerSettings(**settings)  # type: ignore[arg-type]


def test_ipv6() -> None:
    try:
        bind("::1", 0).close()
    except ConfigError:
        pytest.skip("no IPv6 here")
    with running(Fake(), ServerSettings(host="::1", port=0)) as server:
        assert server.url.startswith("http://[::1]:") and httpx.get(server.url + "/health").status_code == 200


def logged(server: Running, formatter: logging.Formatter) -> str:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(formatter)
    logger = logging.getLogger("millrace")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        body = {"model": MODEL, "prompt": "a secret of mine", "max_tokens": 3}
        post(server.url, "/v1/completions", body, **{"x-request-id": "id-1"})
        httpx.get(server.url + "/health")  # probes are not worth a line
        httpx.get(server.url + "/a%0Ab")
        until(lambda: written.getvalue().count("\n") == 2)  # lines are written after the last byte of the answer
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return written.getvalue()


def test_one_json_line_a_request_without_its_text(server: Running) -> None:
    text = logged(server, JsonFormatter())
    done, missing = (json.loads(line) for line in text.splitlines())
    assert done["method"] == "POST" and done["path"] == "/v1/completions" and done["status"] == 200
    assert done["request_id"] == "id-1" and done["model"] == MODEL and done["finish_reason"] == "length"
    assert done["generated_tokens"] == 3 and done["prompt_tokens"] > 0
    assert 0 <= done["queue_ms"] <= done["ttft_ms"] <= done["total_ms"]
    assert missing["status"] == 404 and missing["path"] == "/a%0Ab" and "secret" not in text


def test_one_text_line_a_request(server: Running) -> None:
    done, missing = logged(server, TextFormatter()).splitlines()
    assert " INFO POST /v1/completions request_id=id-1 status=200 " in done and "finish_reason=length" in done
    assert "GET /a%0Ab" in missing


def test_the_log_says_why_a_request_was_refused(server: Running) -> None:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(TextFormatter())
    logger = logging.getLogger("millrace.serve.access")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        post(server.url, "/v1/completions", {"prompt": "a", "temperature": -1})
        post(server.url, "/v1/completions", {"prompt": "a", 'x"\n\u001b[31m': 1})
        post(server.url, "/v1/completions", {"prompt": "a", "max_tokens": 1, "num_ctx": 5, "verbosity": "low"})
        until(lambda: written.getvalue().count("\n") == 3)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    range_, odd, ignored = written.getvalue().splitlines()
    assert "status=400" in range_ and 'error="invalid_value: temperature is -1' in range_
    assert "\x1b" not in odd and "status=200" in odd and "ignored=x???[31m" in odd
    assert "status=200" in ignored and "ignored=num_ctx,verbosity" in ignored


def test_logging_is_put_back() -> None:
    logger = logging.getLogger("millrace")
    before = (list(logger.handlers), logger.level)
    with Logging("json"):
        assert len(logger.handlers) == len(before[0]) + 1
    assert (list(logger.handlers), logger.level) == before


def test_stopping_before_running_is_harmless() -> None:
    Server([Fake().model()], ServerSettings(port=0)).stop()


def test_serving_imports_no_deep_learning_framework() -> None:
    code = "import sys, millrace.serve.server; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "src", capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
