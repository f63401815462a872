"""Requests behind each other on one connection: few of them wait, and whoever leaves takes all of them along."""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from millrace.runtime.request.sampling_params import FinishReason
from millrace.serve.http.connection import MAX_HEAD_BYTES, MAX_PIPELINED, MAX_WAITING_BYTES
from tests.serve.support import START, Fake, Running, connect, everything, http_requests, post, serving_with, until

pytestmark = pytest.mark.usefixtures("hurry")

LIVE = b"GET /v1/health/live HTTP/1.1\r\nhost: x\r\n\r\n"
OFFER = b"GET /v1/health/live HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
CLOSES = b"connection: close\r\n"


def completion(**fields: object) -> bytes:
    body = json.dumps({"prompt": "a", "seed": 1, "ignore_eos": True, **fields}).encode()
    return START + b"content-length: %d\r\n\r\n" % len(body) + body


def chunked(rest: bytes) -> bytes:
    return START + b"transfer-encoding: chunked\r\n\r\n" + rest


@pytest.fixture
def slow() -> Iterator[Running]:
    with serving_with(Fake(before_run=lambda step: time.sleep(0.01))) as server:
        yield server


@pytest.mark.parametrize("max_s", [5, pytest.param(1, marks=pytest.mark.timing)], ids=["busy", "idle"])
@pytest.mark.parametrize("one", [LIVE, OFFER], ids=["plain", "offers"])
def test_of_thousands_in_one_packet_the_first_are_answered(
    one: bytes, max_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Each was kept, with everything that an answer needs: 60 such connections took 1.2 GB."""
    with serving_with() as server, ExitStack() as stack:
        for _ in range(10):
            raw = stack.enter_context(connect(server))
            raw.setblocking(False)
            raw.send(one * (250_000 // len(one)))
        start_s = time.monotonic()
        assert post(server.url, "/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
        assert time.monotonic() - start_s < max_s
        until(lambda: http_requests(server, "/v1/health/live", 200) >= 10 * (MAX_PIPELINED + 1))
        time.sleep(0.1)
        assert http_requests(server, "/v1/health/live", 200) == 10 * (MAX_PIPELINED + 1)
    assert "too many requests came at once" in caplog.text


def test_the_last_answer_says_that_the_connection_ends(server: Running) -> None:
    for n in (MAX_PIPELINED + 1, MAX_PIPELINED + 2):
        with connect(server) as raw:
            raw.sendall(LIVE * n)
            said = b""
            while said.count(b'"live"') < 2 * (MAX_PIPELINED + 1):
                part = raw.recv(65536)
                assert part
                said += part
            assert said.count(b"HTTP/1.1 200") == MAX_PIPELINED + 1
            if n <= MAX_PIPELINED + 1:  # as many as may wait: it stays open
                assert CLOSES not in said
                raw.sendall(LIVE)
                assert raw.recv(65536).startswith(b"HTTP/1.1 200")
            else:
                assert said.count(CLOSES) == 1 and CLOSES in said.rpartition(b"HTTP/1.1 200")[2]
                assert not everything(raw)


@pytest.mark.nightly
def test_what_waits_behind_a_long_answer_is_bounded_too(slow: Running) -> None:
    """In packets of their own; a large body is not kept at all."""
    large = START + b"content-length: 10000000\r\n\r\n"
    long = b"GET /v1/health/live HTTP/1.1\r\nhost: x\r\na: " + b"b" * (MAX_WAITING_BYTES // 3) + b"\r\n\r\n"
    cases = (LIVE, 1 + MAX_PIPELINED), (large + b" " * MAX_WAITING_BYTES, 1), (LIVE + large, 2), (long, 3)
    for rest, n_answers in cases:
        with connect(slow) as raw:
            raw.sendall(completion(max_tokens=30))
            time.sleep(0.05)
            for _ in range(2 * MAX_PIPELINED):
                raw.sendall(rest)
                rest = b" " * MAX_WAITING_BYTES if large in rest else rest
                time.sleep(0.002)
            said = everything(raw)
            assert said.count(b"HTTP/1.1 ") == said.count(b"HTTP/1.1 200") == n_answers
            assert b'"completion_tokens":30' in said and said.count(CLOSES) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("later", [False, True])
def test_who_leaves_is_noticed_whatever_came_behind(
    slow: Running, stream: bool, later: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the last request was told: the first one was computed to its end, for nobody."""
    caplog.set_level(logging.ERROR)
    first, second = completion(max_tokens=400, stream=stream), completion(max_tokens=400) + LIVE
    with connect(slow) as raw:
        raw.sendall(first if later else first + second)
        until(lambda: slow.stats().running)
        if later:
            raw.sendall(second)
            time.sleep(0.05)
    left_s = time.monotonic()
    assert slow.wait_until_idle(2).finished_total[FinishReason.ABORT] == 1
    until(lambda: http_requests(slow, "/v1/completions", 499) == 1, 2)
    assert httpx.get(slow.url + "/load").json() == {"server_load": 0}
    assert time.monotonic() - left_s < 1
    assert http_requests(slow, "/v1/health/live", 200) == 0, "nobody was left to be answered"
    assert not caplog.records


@pytest.mark.parametrize(
    "rest",
    [b"1;" + b"x" * 2 * MAX_HEAD_BYTES, b"2\r\n{}\r\n0\r\na: " + b"b" * 2 * MAX_HEAD_BYTES],
    ids=["extension", "trailer"],
)
def test_too_much_around_a_body_is_told(server: Running, rest: bytes) -> None:
    """It was a bare reset."""
    with connect(server) as raw:
        raw.sendall(chunked(rest))
        said = everything(raw)
    assert said.startswith(b"HTTP/1.1 431 ") and b'"headers_too_large"' in said and said.count(b"HTTP/1.1") == 1
    until(lambda: httpx.get(server.url + "/load").json() == {"server_load": 0})


@pytest.mark.parametrize("bad", [b"GET / HTTP/1.1\r\na: " + b"b" * MAX_HEAD_BYTES, b"\x16\x03\x01\r\n", chunked(b"x")])
def test_what_is_refused_costs_no_answer_before_it(slow: Running, bad: bytes) -> None:
    """Nor does its refusal come in the place of one."""
    with connect(slow) as raw:
        raw.sendall(completion(max_tokens=20) + LIVE)
        time.sleep(0.05)
        raw.sendall(bad)
        said = everything(raw)
    assert said.count(b"HTTP/1.1 ") == said.count(b"HTTP/1.1 200") == 2 and b'"completion_tokens":20' in said


def test_a_tunnel_is_refused(server: Running) -> None:
    with connect(server) as raw:
        raw.sendall(b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\n" + LIVE)
        said = everything(raw)
    assert said.startswith(b"HTTP/1.1 405 ") and b"\r\nallow: GET, POST\r\n" in said and b"is no proxy" in said
    assert said.count(b"HTTP/1.1") == 1
