"""The client's own certificate: what it says of a client that is quick, and of one that is busy with other things."""

import asyncio
import time
from pathlib import Path

import pytest
import uvloop

from millrace.bench.client import core_share
from millrace.bench.client.certify import Certificate, certificate_text, certify, doubts, kept_up
from millrace.bench.client.client_load import ClientHealth
from millrace.bench.client.request_record import BenchRecord, BenchRequest
from millrace.bench.load.arrivals import Arrivals
from millrace.bench.load.inputs import Session, Turn
from millrace.bench.null_server.ledger import NullTiming
from millrace.bench.null_server.process import NullProcess
from millrace.bench.run.plan import make_plan
from millrace.bench.run.run import Run, RunLoad
from millrace.bench.settings import InputSettings, LoadSettings, SessionSettings, TargetSettings
from millrace.errors import MachineError


def certified(
    what: InputSettings | None = None, busy_s: float = 0.0, seconds: float = 0.8, **load: float
) -> Certificate:
    """busy_s: of each tenth of a second, in which the client's loop can do nothing else"""
    settings = LoadSettings(**load)  # type: ignore[arg-type]
    what = what or InputSettings(isl=30, osl=200)
    plan = make_plan("http://nobody:1", TargetSettings(), settings, what, SessionSettings())

    async def hinder() -> None:
        while True:
            until_s = time.perf_counter() + busy_s
            while time.perf_counter() < until_s:
                pass
            await asyncio.sleep(0.1 - busy_s)

    async def certifying() -> Certificate:
        hindering = asyncio.ensure_future(hinder()) if busy_s else None
        found = await certify(plan, seconds)
        if hindering is not None:
            hindering.cancel()
        return found

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(certifying())


def test_a_client_that_keeps_up() -> None:
    """8 streams begin within 0.2 s, wait 0.1 s and then have 50 tokens/s for the rest of 0.8 s: 240 tokens."""
    found = certified(concurrency=8)
    assert found.streams == 8 and found.chunks_per_s == pytest.approx(240 / 0.8, rel=0.15)
    assert (
        found.cpu_share is not None
        and found.cpu_share < 0.3
        and found.delay_p50_ms < 2
        and "8 streams" in found.description
    )


def test_a_client_that_is_busy_is_found_out() -> None:
    """60 of each 100 ms it does other things: a chunk that comes then waits 30 ms in the mean."""
    found = certified(busy_s=0.06, request_rate=20)
    assert not found.holds and found.description.startswith("NOT CERTIFIED")
    assert found.delay_p99_ms > 30


def test_a_low_rate_is_tried_at_once() -> None:
    """Of one request in 20 s the first would come long after."""
    found = certified(request_rate=0.05, seconds=0.4)
    assert found.streams == 1 and found.n_chunks == pytest.approx((400 - 100) / 20, abs=4) and found.holds is not None


def test_of_a_trace_the_busiest_time_is_tried(tmp_path: Path) -> None:
    """At four times its speed, 32 that come within 1 s are within 0.25 s; before and after, one comes at a time."""
    at_ms = [0, 20_000, *(40_000 + i * 1000 // 32 for i in range(32)), 60_000]
    trace = tmp_path / "trace.jsonl"
    line = '{"timestamp": %d, "input_length": 10, "output_length": 20}\n'
    trace.write_text("".join(line % ms for ms in at_ms))
    found = certified(InputSettings(input_file=str(trace), replay_speed=4.0), seconds=0.4)
    assert 28 <= found.streams <= 32, "500 ms each"


@pytest.mark.parametrize("streams, itl_ms", [(64, 20.0), (200, 50.0), (4000, 1000.0)])
@pytest.mark.parametrize("by", ["concurrency", "rate", "capped rate", "trace"])
def test_the_null_server_is_asked_for_no_more_than_it_bears(
    by: str, streams: int, itl_ms: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """4,000 chunks/s: so many streams with so many ms between two tokens of each."""
    asked = list[NullTiming]()

    def null(timing: NullTiming) -> NullProcess:
        asked.append(timing)
        raise MachineError("it", "is", "enough")

    monkeypatch.setattr("millrace.bench.client.certify.NullProcess", null)
    what = InputSettings(isl=30, osl=200)
    if by == "trace":
        (tmp_path / "t.jsonl").write_text('{"timestamp": 0, "input_length": 1, "output_length": 2}\n' * streams)
        what = InputSettings(input_file=str(tmp_path / "t.jsonl"))
    loads: dict[str, dict[str, float]] = {
        "concurrency": {"concurrency": streams}, "rate": {"request_rate": streams / 0.8}, "trace": {},
        "capped rate": {"request_rate": 1e6, "concurrency": streams},
    }  # fmt: skip
    with pytest.raises(MachineError):
        certified(what, **loads[by])
    assert float(asked[0].itl_ms) == pytest.approx(itl_ms)


@pytest.mark.parametrize(
    "cpu, p99, late, n, holds",
    [
        (0.79, 4.9, 4.9, 10, True), (0.8, 1, 0, 10, False), (0.1, 5.0, 0, 10, False), (0.1, 1, 5.0, 10, False),
        (0.1, 1, 0, 9, None), (None, 1, 0, 10, None),
    ],
)  # fmt: skip
def test_what_holds(cpu: float | None, p99: float, late: float, n: int, holds: bool | None) -> None:
    certificate = Certificate(1, 1.0, cpu, 0.1, p99, late, n)
    assert certificate.holds is holds
    assert certificate.description.startswith("NOT CERTIFIED") is (holds is False)
    assert ("too few" in certificate.description) is (holds is None)


HOLDS, FAILS = Certificate(4, 100.0, 0.1, 0.1, 1.0), Certificate(4, 100.0, 0.1, 0.1, 9.0)
TOO_FEW = Certificate(1, 1.0, 0.1, 0.0, 0.0, 0.0, 1)


@pytest.mark.parametrize(
    "certificate, effort, valid",
    [
        (None, ClientHealth(0.79), None), (None, ClientHealth(0.8), False), (TOO_FEW, ClientHealth(0.79), None),
        (TOO_FEW, ClientHealth(0.8), False), (FAILS, ClientHealth(0.1), False), (HOLDS, ClientHealth(None), True),
        (HOLDS, ClientHealth(0.79, 5, 125), True), (HOLDS, ClientHealth(0.8, 5, 125), False),
        (HOLDS, ClientHealth(0.39, 64, 1e4), True), (HOLDS, ClientHealth(0.4, 6, 100), None),
        (HOLDS, ClientHealth(0.4, 5, 126), None),
        (HOLDS, ClientHealth(0.1, late_ms=4.9), True), (HOLDS, ClientHealth(0.1, late_ms=5.0), False),
        (HOLDS, ClientHealth(0.1, late_ms=9.9, waited_ms=500), True),
        (None, ClientHealth(0.1, late_ms=10, waited_ms=500), False),
    ],
)  # fmt: skip
def test_a_client_is_judged_by_its_runs_too(
    certificate: Certificate | None, effort: ClientHealth, valid: bool | None
) -> None:
    """Of several, the worst says it; every report asks the same function."""
    efforts = [ClientHealth(0.01, 1, 1.0), effort, ClientHealth(0.01, 1, 1.0)]
    told = certificate_text(certificate, efforts)
    assert told["valid"] is kept_up(certificate, efforts) is valid
    assert told["client_cpu_share"] == (effort.peak_share or 0.01)
    said = doubts(certificate, efforts, "in a round")
    assert [one.split(" ")[0] for one in said] == {
        False: ["INVALID:"], True: [], None: ["Not"] if certificate is HOLDS else []
    }[valid]  # fmt: skip
    assert all("in a round" in one for one in said)


class Slow:
    """Keeps the loop busy for so long when it is asked, or waits, then answers."""

    def __init__(self, busy_s: float, waits_s: float) -> None:
        self._busy_s, self._waits_s = busy_s, waits_s

    async def ask(self, question: BenchRequest, answer: BenchRecord | None = None) -> BenchRecord:
        answer = answer or BenchRecord()
        answer.sent_s = time.perf_counter()
        while time.perf_counter() - answer.sent_s < self._busy_s:
            pass
        await asyncio.sleep(self._waits_s)
        answer.end_s = time.perf_counter()
        answer.chunk_s = [answer.end_s]
        return answer


def driven(busy_s: float, at_s: list[float], places: int | None = None, waits_s: float = 0.0) -> Run:
    arrivals = None if places is None else Arrivals(1e5, "constant")
    run = Run(Slow(busy_s, waits_s), RunLoad(places, arrivals))
    sessions = [Session((Turn("a", 1),), at) for at in at_s]
    asyncio.run(run.drive(iter(sessions)))
    return run


@pytest.mark.timing
def test_a_burst_is_seen_in_the_worst_second_and_in_what_was_sent_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the last of four fifths of a second 20 requests of 10 ms come at once: a quarter of all the time."""
    monkeypatch.setattr(core_share, "WINDOW_S", 0.25)
    monkeypatch.setattr(core_share, "EVERY_S", 0.05)
    run = driven(0.01, [0.0, *(0.6 + 1e-6 * i for i in range(20))])
    found = ClientHealth.from_run(run)
    assert run.share.mean is not None and run.share.mean < 0.4 and found.peak_share is not None
    assert found.peak_share > 1.8 * run.share.mean, "thread time, whatever else the machine does"
    assert found.late_ms > 150 and not found.keeps_up and found.chunks_per_s == pytest.approx(21 / run.wall_s)


def test_waiting_for_a_place_is_no_lateness_of_the_client() -> None:
    run = driven(0.0, [0.0] * 20, places=1, waits_s=0.005)
    assert max(r.answer.sent_s - r.answer.intended_s for r in run.records) > 0.09
    assert len(run.late_s) < 3 and ClientHealth.from_run(run).streams == 1


def test_one_hiccup_is_no_lateness() -> None:
    """The first keeps the loop for 20 ms: two of three are late, or one of two."""
    assert ClientHealth.from_run(driven(0.02, [0.0, 0.001, 0.002])).late_ms > 10
    assert ClientHealth.from_run(driven(0.02, [0.0, 0.001])).late_ms == 0


def test_a_run_of_no_time_tells_no_share() -> None:
    run = driven(0.0, [0.0])
    assert (
        run.share.mean is None and ClientHealth.from_run(run).peak_share is None and ClientHealth.from_run(run).keeps_up
    )
