"""Who gives way where there are too many connections; and that finding it out costs the same however many there are."""

import itertools
import socket
import time
from contextlib import ExitStack
from random import Random

import httpx
import pytest

from millrace.serve.http.connection_limits import MAX_REFUSED, ConnectionLimits
from millrace.serve.http.connection_table import Connections
from tests.serve.support import START, Fake, connect, post, serving_with

pytestmark = pytest.mark.usefixtures("hurry")
CLOCK = itertools.count(1)


class Guest:
    """A connection that counts how often anybody looks at one."""

    looks = 0

    def __init__(self, all_of_them: Connections, state: str = "waiting") -> None:
        self.all, self.state, self._since = all_of_them, state, next(CLOCK)
        self.n_unread, self.unread_since_s, self.ended = 0, 0.0, False

    def become(self, state: str) -> None:
        self.state, self._since = state, next(CLOCK)
        self.all.touch(self)

    def _is(self, state: str) -> bool:
        type(self).looks += 1
        return self.state == state

    @property
    def since_s(self) -> float:
        type(self).looks += 1
        return self._since

    @since_s.setter
    def since_s(self, value: float) -> None: ...

    @property
    def is_waiting(self) -> bool:
        return self._is("waiting")

    @property
    def is_incomplete(self) -> bool:
        return self._is("incomplete")

    @property
    def is_refused(self) -> bool:
        return self._is("refused")

    def check(self, now_s: float) -> None: ...

    def close_gracefully(self) -> None:
        self.ended = True

    def abort(self) -> None: ...


def connections(n: int) -> Connections:
    return Connections(
        ConnectionLimits(
            max_connections=n, header_timeout_s=9, keep_alive_s=9, write_timeout_s=9, max_unread_bytes=1 << 20
        )
    )


@pytest.mark.parametrize("max_s", [60, pytest.param(0.5, marks=pytest.mark.timing)], ids=["busy", "idle"])
@pytest.mark.parametrize("state", ["waiting", "incomplete", "busy"])
def test_a_flood_at_4000_connections_looks_at_few(state: str, max_s: float) -> None:
    everybody = connections(4000)
    for _ in range(4000):
        guest = Guest(everybody)
        assert everybody.admit(guest)
        guest.become(state)
    Guest.looks, begun_s = 0, time.process_time()
    for _ in range(2000):
        guest = Guest(everybody)
        if everybody.admit(guest):
            guest.become(state)
    assert Guest.looks <= 2000 * (MAX_REFUSED + 8)
    assert time.process_time() - begun_s < max_s


def test_the_one_that_gives_way_is_the_longest_waiting_then_the_longest_incomplete() -> None:
    """Against looking at all of them, while they change in whatever order."""
    rng, everybody = Random(4), connections(30)
    inside: list[Guest] = []
    for _ in range(3000):
        if inside and rng.random() < 0.6:
            rng.choice(inside).become(rng.choice(["waiting", "incomplete", "busy", "busy"]))
        elif inside and rng.random() < 0.1:
            everybody.remove(inside.pop(rng.randrange(len(inside))))
        else:
            groups = ([g for g in inside if g.state == state] for state in ("waiting", "incomplete"))
            victims = next((sorted(g, key=lambda one: one._since) for g in groups if g), [])
            guest, full = Guest(everybody), len(inside) == 30
            assert everybody.admit(guest) is (not full or bool(victims))
            if full and victims:
                assert victims[0].ended
                inside.remove(victims[0])
            if not full or victims:
                inside.append(guest)
            assert not any(g.ended for g in inside)


def test_the_oldest_unfinished_body_gives_way_and_a_stream_does_not() -> None:
    slow = Fake(before_run=lambda step: time.sleep(0.01))
    with serving_with(slow, max_connections=3) as server, ExitStack() as stack:
        body = {"prompt": "a", "max_tokens": 150, "stream": True, "seed": 1}
        reply = stack.enter_context(httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=20))
        lines = reply.iter_lines()
        assert next(lines)
        halves: list[socket.socket] = []
        for _ in range(2):
            halves.append(stack.enter_context(connect(server)))
            halves[-1].sendall(START + b"content-length: 100\r\n\r\n{")
            time.sleep(0.1)
        stack.enter_context(connect(server))
        assert halves[0].recv(1) == b"", "closed without an answer"
        assert post(server.url, "/tokenize", {"prompt": "a"}).status_code == 200, (
            "in place of the one without a request"
        )
        halves[1].settimeout(0.1)
        with pytest.raises(TimeoutError):
            halves[1].recv(1)
        assert list(lines)[-2:] == ["data: [DONE]", ""]
