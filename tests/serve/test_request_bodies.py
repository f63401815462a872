"""BodyLimiter on their way are bounded together, and who is slow with them does not keep others out."""

import asyncio
import threading
import time
from collections.abc import Coroutine
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from millrace.serve.http import connection
from millrace.serve.http import request_bodies as bodies_module
from millrace.serve.http.connection_limits import MAX_REFUSED
from millrace.serve.http.errors import HttpError
from millrace.serve.http.request_bodies import UNCOUNTED_BODY_BYTES, BodyLimiter, read_body
from tests.serve.support import START, Fake, connect, everything, post, serving_with

pytestmark = pytest.mark.usefixtures("hurry")
HALF = START + b"content-length: 900000\r\n\r\n" + b'{"prompt": "'


def test_half_sent_bodies_give_way_to_quick_ones() -> None:
    """Nine of them kept everybody out."""
    with serving_with(max_receiving_bytes=1_500_000, max_body_bytes=1_000_000) as server, ExitStack() as stack:
        holding = [stack.enter_context(connect(server)) for _ in range(9)]
        for raw in holding:
            raw.sendall(HALF + b"a" * 700_000)
        for _ in range(3):
            reply = post(server.url, "/v1/completions", {"prompt": "a" * 400_000})
            assert reply.json()["error"]["code"] == "context_length_exceeded"
        said = everything(holding[0])
        assert said.startswith(b"HTTP/1.1 503 ") and b"retry-after: " in said and b'"too_many_bodies"' in said


class Sender:
    """A body that comes when it is told to."""

    def __init__(self, bodies: BodyLimiter, client: str) -> None:
        self._parts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._bodies, self._client = bodies, client
        self.task = asyncio.create_task(self._read())

    async def sends(self, n_bytes: int, last: bool = False) -> None:
        self._parts.put_nowait({"type": "http.request", "body": b"x" * n_bytes, "more_body": not last})
        for _ in range(6):
            await asyncio.sleep(0)

    async def _read(self) -> int:
        with self._bodies.receiving(self._client) as incoming:
            body = await read_body({"headers": []}, self._parts.get, self._bodies, incoming)
            await asyncio.Event().wait() if self._client == "decoding" else None
            return len(body)

    def refusal(self) -> str:
        error = self.task.exception() if self.task.done() else None
        return error.code if isinstance(error, HttpError) else ""


def test_memory_of_large_bodies_is_released_after_the_last_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for those that follow each other, and once more for what may have been freed too late for it."""
    released = threading.Semaphore(0)
    monkeypatch.setattr(bodies_module, "RELEASE_AFTER_S", 0.05)
    monkeypatch.setattr(bodies_module, "release_free_memory", released.release)

    async def work() -> None:
        bodies = BodyLimiter(8 << 20, 10, 64 << 20)

        async def send(n_bytes: int) -> None:
            sender = Sender(bodies, "a")
            await sender.sends(n_bytes, last=True)
            assert await sender.task == n_bytes

        await send(UNCOUNTED_BODY_BYTES)
        await asyncio.sleep(0.2)
        assert not released.acquire(blocking=False)  # nothing was large
        await send(2 << 20)
        assert await asyncio.to_thread(released.acquire, timeout=10)
        await asyncio.sleep(0.2)
        assert not released.acquire(blocking=False)
        await send(2 << 20)
        await send(2 << 20)
        for _ in range(2):
            assert await asyncio.to_thread(released.acquire, timeout=10)
        await asyncio.sleep(0.2)
        assert not released.acquire(blocking=False)

    run(work())


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20))


def test_the_client_that_holds_most_gives_way_with_its_first() -> None:
    async def main() -> None:
        bodies = BodyLimiter(10**6, 60.0, 1_000_000)
        slow = Sender(bodies, "honest")  # came first, and holds less than the other client
        await slow.sends(200_000 + UNCOUNTED_BODY_BYTES)
        many = [Sender(bodies, "greedy") for _ in range(4)]
        for one in many:
            await one.sends(200_000 + UNCOUNTED_BODY_BYTES)
        await Sender(bodies, "tiny").sends(UNCOUNTED_BODY_BYTES, last=True)  # costs nobody anything
        assert not any(one.task.done() for one in (slow, *many))
        await slow.sends(300_000)
        assert [one.refusal() for one in many] == ["too_many_bodies"] * 2 + [""] * 2
        await many[3].sends(250_000)  # that client holds most again: the first of its own
        assert [one.refusal() for one in many[2:]] == ["too_many_bodies", ""]
        await slow.sends(1, last=True)
        assert await slow.task == 500_001 + UNCOUNTED_BODY_BYTES
        await many[3].sends(1, last=True)
        assert await many[3].task == 450_001 + UNCOUNTED_BODY_BYTES
        assert bodies._left_bytes == 1_000_000 and not bodies._arriving

    run(main())


def test_what_is_complete_does_not_give_way() -> None:
    async def main() -> None:
        bodies = BodyLimiter(10**6, 60.0, 500_000)
        whole = Sender(bodies, "decoding")
        await whole.sends(400_000 + UNCOUNTED_BODY_BYTES, last=True)
        late = Sender(bodies, "other")
        await late.sends(200_000 + UNCOUNTED_BODY_BYTES)
        assert late.refusal() == "too_many_bodies" and not whole.task.done()
        whole.task.cancel()
        await asyncio.wait([whole.task])
        assert bodies._left_bytes == 500_000

    run(main())


def test_a_body_that_takes_too_long_is_told_so() -> None:
    async def main() -> None:
        late = Sender(BodyLimiter(10**6, 0.05, 10**6), "a")
        await late.sends(10)
        await asyncio.wait([late.task])
        assert late.refusal() == "body_timeout"

    run(main())


def test_half_sent_bodies_give_their_connections_to_others() -> None:
    with serving_with(max_connections=3) as server, ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(connect(server)).sendall(HALF)
        until_s = time.monotonic() + 5
        while httpx.get(server.url + "/load").json()["server_load"] < 2:  # one has given its place to this question
            assert time.monotonic() < until_s
        for _ in range(5):
            assert post(server.url, "/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_who_was_told_makes_place_for_who_was_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the limit, half-sent requests took all the places from which a 503 is told."""
    monkeypatch.setattr(connection, "LINGER_S", 30)
    slow = Fake(before_run=lambda step: time.sleep(0.02))
    with serving_with(slow, max_connections=1) as server, ExitStack() as stack:
        body = {"prompt": "a", "max_tokens": 400, "stream": True, "seed": 1, "ignore_eos": True}
        reply = stack.enter_context(httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=20))
        events = reply.iter_lines()  # without it, the stream would end
        assert next(events)
        for _ in range(2 * MAX_REFUSED):
            stack.enter_context(connect(server)).sendall(HALF)
        for _ in range(3):
            refused = httpx.get(server.url + "/health")
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "too_many_connections"


def test_an_answer_is_not_cut_off_for_the_half_request_behind_it() -> None:
    slow = Fake(before_run=lambda step: time.sleep(0.02))
    with serving_with(slow, max_connections=1) as server, connect(server) as raw:
        body = b'{"prompt": "a", "max_tokens": 400, "stream": true, "seed": 1, "ignore_eos": true}'
        raw.sendall(START + b"content-length: %d\r\n\r\n" % len(body) + body + HALF)
        assert raw.recv(65536).startswith(b"HTTP/1.1 200")
        assert httpx.get(server.url + "/health").status_code == 503
        assert b"data: {" in raw.recv(65536)
