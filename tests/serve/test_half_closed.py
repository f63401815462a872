"""Clients that close their side behind a request (`nc -N`) are answered; who has gone is noticed all the same."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from millrace.engine.executor import StepInputs
from millrace.runtime.request.sampling_params import FinishReason
from millrace.serve.http import uvicorn_server as web_module
from millrace.serve.http.connection import Connection
from tests.serve.support import Fake, Running, connect, everything, http_requests, serving_with, until
from tests.serve.test_pipelines import LIVE, completion

pytestmark = pytest.mark.usefixtures("hurry")


@pytest.fixture
def slow() -> Iterator[Running]:
    with serving_with(Fake(before_run=lambda step: time.sleep(0.02))) as server:
        yield server


def ask(server: Running, *requests: bytes) -> bytes:
    with connect(server) as raw:
        raw.sendall(b"".join(requests))
        raw.shutdown(socket.SHUT_WR)
        return everything(raw)


def test_an_answer_before_the_next_sweep_is_all_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_module, "SWEEP_TICKS", 1_000_000)  # none comes, however busy the machine is
    goes_on, as_ever = threading.Event(), Connection.eof_received

    def noted(self: Connection) -> bool:
        goes_on.set()
        return as_ever(self)

    def wait(step: StepInputs) -> None:
        goes_on.wait(10)

    monkeypatch.setattr(Connection, "eof_received", noted)
    goes_on.set()  # for the warm-up
    with serving_with(Fake(before_run=wait)) as server:
        goes_on.clear()  # no answer before the client's end has been seen
        said = ask(server, completion(max_tokens=1))
    assert said.startswith(b"HTTP/1.1 200 ") and said.count(b"HTTP/1.1 ") == 1
    assert b"connection: close\r\n" in said and b'"completion_tokens":1' in said


@pytest.mark.parametrize("stream", [False, True])
def test_a_long_answer_comes_too(slow: Running, stream: bool) -> None:
    said = ask(slow, completion(max_tokens=30, stream=stream))
    told, _, rest = said.rpartition(b"HTTP/1.1 200 ")
    assert told in (b"", b"HTTP/1.1 100 Continue\r\n\r\n")
    assert (b"data: [DONE]" if stream else b'"completion_tokens":30') in rest
    until(lambda: http_requests(slow, "/v1/completions", 200) == 1, 2)


def test_all_that_was_asked_is_answered_in_order(slow: Running) -> None:
    said = ask(slow, completion(max_tokens=5), LIVE, completion(max_tokens=6))
    assert said.count(b"HTTP/1.1 200 ") == 3
    assert said.index(b'"completion_tokens":5') < said.index(b'"completion_tokens":6')
    assert said.count(b"connection: close\r\n") == 1


@pytest.mark.parametrize("half", [b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n", completion(max_tokens=2)[:-2], b""])
def test_half_a_request_is_none(slow: Running, half: bytes) -> None:
    assert b"HTTP/1.1 200" not in ask(slow, half)
    assert b'"completion_tokens":5' in (said := ask(slow, completion(max_tokens=5), half))
    assert said.count(b"HTTP/1.1 200 ") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_who_goes_after_that_is_noticed(slow: Running, stream: bool) -> None:
    with connect(slow) as raw:
        raw.sendall(completion(max_tokens=400, stream=stream))
        until(lambda: slow.stats().running)
    assert slow.wait_until_idle(2).finished_total[FinishReason.ABORT] == 1
    until(lambda: http_requests(slow, "/v1/completions", 499) == 1, 2)
