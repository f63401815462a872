"""Where the time of slow requests went, from client and server together."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

from millrace.bench.analysis.latency_breakdown import (
    TO_END,
    TO_FIRST,
    ClientTrace,
    breakdown_text,
    fetch_traces,
    join_client_server_traces,
    latency_shares,
)
from millrace.bench.client.client import BenchTarget, Client
from millrace.bench.client.endpoints import ENDPOINTS
from millrace.bench.client.request_record import BenchMessage, BenchRecord, BenchRequest, Failure
from millrace.bench.load.inputs import Turn
from millrace.bench.report.results import RunResult, report
from millrace.bench.run.plan import make_plan
from millrace.bench.run.run import Run, TurnRecord
from millrace.bench.settings import InputSettings, LoadSettings, SessionSettings, TargetSettings
from tests.serve.support import MODEL, Fake, running

STAGES = {"outside": 2.0, "preparing": 3.0, "queue": 5.0, "prefill": 70.0, "telling": 1.5, "decode": 400.0}


def request(i: int, last_ms: float = 0.5, **stages: float) -> tuple[BenchRecord, ClientTrace]:
    """Of so many ms in each stage; last_ms: to tell the last token, a part of `telling`."""
    s = {**STAGES, **stages}
    to_first = sum(s[stage] for stage in TO_FIRST) - last_ms
    latency = to_first + s["decode"] + last_ms
    queued, first = s["queue"], s["queue"] + s["prefill"]
    first_told = first + s["telling"] - last_ms
    end = first_told + s["decode"]
    answer = BenchRecord(
        id=f"r-{i}", sent_s=100.0, end_s=100 + latency / 1e3, chunk_s=[100 + to_first / 1e3, 100 + latency / 1e3]
    )
    return answer, ClientTrace(s["preparing"], queued, first, first_told, end, end + last_ms)


def test_the_stages_of_one_request_are_its_whole_time() -> None:
    answer, seen = request(0)
    found = join_client_server_traces([answer], {"r-0": seen})
    assert found is not None
    assert found.to_end[0] == pytest.approx([STAGES[stage] for stage in TO_END])
    assert found.to_first[0] == pytest.approx([2.0, 3.0, 5.0, 70.0, 1.0])


def test_only_whole_answers_that_both_tell_of_count() -> None:
    answer, seen = request(0)
    unknown, failed, half = replace(answer, id="r-1"), replace(answer, id="r-2"), replace(answer, id="r-3")
    failed.fail(Failure.BROKEN_OFF, "")
    traces = {"r-0": seen, "r-2": seen, "r-3": ClientTrace(1.0, 0.0, None, None, None, None), "r-9": seen}
    found = join_client_server_traces([unknown, failed, half, answer], traces)
    assert found is not None and found.n == 1
    assert join_client_server_traces([unknown], {"r-9": seen}) is None


def test_what_the_slowest_waited_for_is_named() -> None:
    rng = np.random.default_rng(3)
    pairs = [request(i, queue=float(rng.uniform(4, 6))) for i in range(297)]
    pairs += [request(297 + i, queue=205.0, prefill=110.0 + i) for i in range(3)]
    found = join_client_server_traces([a for a, _ in pairs], {a.id: seen for a, seen in pairs})
    assert found is not None
    slow = latency_shares(found.to_first, TO_FIRST)
    assert slow is not None and slow.n == 3 and slow.slow_ms == pytest.approx(2 + 3 + 205 + 110 + 1)
    assert slow.slow["queue"] == pytest.approx(205) and slow.usual["queue"] == pytest.approx(5, abs=0.3)
    assert slow.slow["prefill"] - slow.usual["prefill"] == pytest.approx(41)
    assert slow.description.endswith("ms in queue and 41.0 ms in prefill") and slow.description.startswith(
        "the 3 slowest took 24"
    )


def test_few_requests_have_no_slowest() -> None:
    pairs = [request(i) for i in range(19)]
    found = join_client_server_traces([a for a, _ in pairs], {a.id: seen for a, seen in pairs})
    assert found is not None and latency_shares(found.to_first, TO_FIRST) is None
    told = breakdown_text(found)
    assert told["n"] == 19 and told["to_end"] == {"mean_ms": pytest.approx(STAGES), "slowest": None}


def test_of_equal_requests_none_is_slow() -> None:
    pairs = [request(i) for i in range(40)]
    found = join_client_server_traces([a for a, _ in pairs], {a.id: seen for a, seen in pairs})
    assert found is not None
    slow = latency_shares(found.to_end, TO_END)
    assert slow is not None and slow.description == "none was slow"


@pytest.mark.parametrize("outside_ms, contradicts", [(-9.9, False), (-10.1, True)])
def test_what_took_longer_than_its_client_waited_is_not_told(outside_ms: float, contradicts: bool) -> None:
    pairs = [request(0), request(1, outside=outside_ms), request(2)]
    found = join_client_server_traces([a for a, _ in pairs], {a.id: seen for a, seen in pairs})
    assert found is not None and found.contradicts is contradicts
    plan = make_plan("http://x:1", TargetSettings(), LoadSettings(), InputSettings(), SessionSettings())
    run = Run(EngineLess(), plan.load)
    run.records += [TurnRecord(Turn("a"), a, 0, 0) for a, _ in pairs]
    told = report(RunResult.from_run(plan, run, [], None, found))
    assert (told["waterfall"] is None) is any("took longer than we waited" in n for n in told["notes"]) is contradicts


class EngineLess:
    async def ask(self, question: BenchRequest, answer: BenchRecord | None = None) -> BenchRecord:
        raise AssertionError("nobody is asked")


def test_no_two_clients_give_a_request_the_same_name() -> None:
    """A server that keeps both tells of the newest."""

    async def asked(target: BenchTarget) -> list[str]:
        async with Client(target) as client:
            return [(await client.ask(BenchRequest([BenchMessage("user", "a")], 2))).id for _ in range(3)]

    with running(Fake()) as server:
        target = BenchTarget(server.url, ENDPOINTS["completions"], MODEL)
        ids = [id_ for _ in range(4) for id_ in asyncio.run(asked(target))]
    assert len(set(ids)) == 12


# ------------------------------------------------------------------ of a server


def test_our_server_tells_of_each_request_within_what_its_client_saw() -> None:
    async def asked(target: BenchTarget) -> list[BenchRecord]:
        async with Client(target) as client:
            question = BenchRequest([BenchMessage("user", "a")], 6, {"ignore_eos": True})
            return list(await asyncio.gather(*(client.ask(question) for _ in range(12))))

    with running(Fake()) as server:
        target = BenchTarget(server.url, ENDPOINTS["completions"], MODEL)
        answers = asyncio.run(asked(target))
        traces = asyncio.run(fetch_traces(target, answers))
        assert len(traces) == 12 and all(seen.is_whole for seen in traces.values())
        below = replace(target, url=f"{server.url}/v2")
        assert asyncio.run(fetch_traces(below, [*answers, BenchRecord(id="never asked")])) == traces, (
            "one that is forgotten costs no other"
        )
    found = join_client_server_traces(answers, traces)
    assert found is not None and found.n == 12
    assert (found.to_first >= 0).all() and (found.to_end >= 0).all(), "each began after the one before"
    assert asyncio.run(fetch_traces(target, answers)) == {}, "the server has gone"


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    class Other(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Nobody reads it."""

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def trace(first_token_ms: str) -> bytes:
    return (
        b'{"data": [{"preparing_ms": 1, "queued_ms": 1, "first_token_ms": %b, "first_sent_ms": 1, "total_ms": null, '
        b'"last_sent_ms": 1000000000}]}'
    ) % first_token_ms.encode()


OTHERS = [
    *((200, trace(ms)) for ms in ("1e308", "1e999", "1000000001", "-1", "NaN", "Infinity")),
    (404, b'{"detail": "Not Found"}'), (200, b"<html>"), (200, b'{"data": []}'), (200, b'{"data": [{"id": "a"}]}'),
    (200, b'{"data": ' + b"[" * 70_000), (200, b'{"data": [{"preparing_ms": "\xff"}]}'), (500, b""),
]  # fmt: skip


@pytest.mark.parametrize("status, body", OTHERS)
def test_another_server_has_no_waterfall(status: int, body: bytes) -> None:
    """Nor one that tells of times that are none."""
    with answering(status, body) as url:
        assert (
            asyncio.run(fetch_traces(BenchTarget(url, ENDPOINTS["chat"]), [BenchRecord(id="a"), BenchRecord(id="b")]))
            == {}
        )


def test_the_longest_time_that_is_one() -> None:
    with answering(200, trace("1e9")) as url:
        (seen,) = asyncio.run(fetch_traces(BenchTarget(url, ENDPOINTS["chat"]), [BenchRecord(id="a")])).values()
    assert seen.first_token_ms == seen.last_sent_ms == 1e9 and seen.total_ms is None
