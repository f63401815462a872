"""`queue_timeout_s` over HTTP: who would wait too long is told at once, and who has waited too long is told then.

The engine's clock stands still until it is moved, so nothing here depends on how fast this machine is.
"""

import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.runtime.fakes import FakeClock
from tests.serve.support import ROOMY, Fake, Running, post, running, until
from tests.serve.test_protocol_edges import BODIES, RESPONSES

WAYS: dict[str, dict[str, Any]] = {**BODIES, "/v1/completions": {"prompt": "Hi", "max_tokens": 2}}
STREAMS = [RESPONSES, "/v1/messages", "/v1/chat/completions", "/api/chat", "/v1/completions"]
LONG = {"prompt": [5, 6, 7], "max_tokens": 500, "ignore_eos": True, "stream": True}


def ask(server: Running, way: str, timeout_s: object, **more: object) -> httpx.Response:
    return post(server.url, way.split()[0], {**WAYS[way], "queue_timeout_s": timeout_s, **more})


@contextmanager
def engaged() -> Iterator[tuple[Running, FakeClock]]:
    """A server whose only place is taken by a long answer, since no time at all."""
    clock = FakeClock()
    one = replace(ROOMY, max_sequences=1)
    with running(Fake(limits=one, clock=clock, before_run=lambda step: time.sleep(0.005))) as server:
        with httpx.stream("POST", server.url + "/v1/completions", json=LONG, timeout=20) as reply:
            lines = reply.iter_lines()
            assert next(lines)
            yield server, clock
        server.wait_until_idle()


def waits_in_vain(server: Running, clock: FakeClock, way: str, **more: object) -> tuple[float, httpx.Response]:
    """It says 2 s more than the long answer has lasted, so far, and waits 3 s more. What it said, and what it got"""
    timeout_s = server.stats().running_s + 2.0
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask, server, way, timeout_s, **more)
        until(lambda: server.stats().waiting or asking.done())
        clock.now_s += timeout_s + 1.0
        return timeout_s, asking.result(20)


def told(way: str, error: dict[str, Any], kind: str, anthropics: str, code: str) -> str:
    """The message of an error, which must be of the protocol's own shape."""
    if way.startswith("/api"):
        assert set(error) == {"error"}
        return str(error["error"])
    inner = error["error"]
    if way == "/v1/messages":
        assert error["type"] == "error" and set(inner) == {"type", "message"} and inner["type"] == anthropics
    else:
        assert set(inner) == {"message", "type", "param", "code"} and (inner["type"], inner["code"]) == (kind, code)
    return str(inner["message"])


def test_p21_whoever_waits_too_long_is_told_when_to_come_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "millrace")
    with engaged() as (server, clock):
        for way in WAYS:
            timeout_s, late = waits_in_vain(server, clock, way)
            assert late.status_code == 503 and late.headers["retry-after"] == "5", way
            (line,) = (record for record in caplog.records if " failed: it waited" in record.getMessage())
            assert line.levelname == "INFO" and f" {timeout_s:g} s" in line.getMessage(), "nothing of ours is wrong"
            caplog.clear()
            said = told(way, late.json(), "service_unavailable_error", "overloaded_error", "generation_failed")
            assert said == f"The answer could not be finished: it waited longer than {timeout_s:g} s"
            wait_s = server.stats().running_s  # the long answer has had its place for so long: so would the next wait
            busy = ask(server, way, timeout_s)
            assert busy.status_code == 429, way
            assert busy.headers["retry-after"] == str(min(60, math.ceil(wait_s / 2))), "half of it, at most a minute"
            said = told(way, busy.json(), "rate_limit_error", "rate_limit_error", "queue_full")
            expected = f"expected: at most {timeout_s:g} s, as queue_timeout_s says; "
            assert said.startswith(f"it would wait some {wait_s:.1f} s, behind 1 other; {expected}")
            assert server.stats().waiting == 0 and server.stats().running == 1
        assert wait_s > 120, "so the last ones were told a minute"


def test_a_stream_says_it_as_its_last_event(caplog: pytest.LogCaptureFixture) -> None:
    """Its status has been sent while it waited."""
    with engaged() as (server, clock):
        for way in STREAMS:
            timeout_s, late = waits_in_vain(server, clock, way, stream=True)
            assert late.status_code == 200, way
            lines = [line.removeprefix("data: ") for line in late.text.splitlines() if "{" in line]
            error = json.loads(lines[-1])
            if way == RESPONSES:
                assert error["type"] == "response.failed" and error["response"]["status"] == "failed"
                assert error["response"]["error"]["code"] == "generation_failed"
                said = error["response"]["error"]["message"]
            else:
                said = told(way, error, "service_unavailable_error", "overloaded_error", "generation_failed")
            assert said == f"The answer could not be finished: it waited longer than {timeout_s:g} s"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("way", WAYS)
def test_where_nobody_waits_any_time_will_do(way: str, server: Running) -> None:
    assert ask(server, way, 60).status_code == 200


@pytest.mark.parametrize("wrong", [0, -1, 86401, "soon"])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_no_time_is_refused(way: str, wrong: object, server: Running) -> None:
    reply = ask(server, way, wrong)
    error = reply.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert reply.status_code == 400 and "retry-after" not in reply.headers
    assert message.startswith("queue_timeout_s is "), message
