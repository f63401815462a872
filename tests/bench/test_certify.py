"""The client's own certificate: what it says of a client that is quick, and of one that is busy with other things."""

import asyncio
import time

import pytest
import uvloop

from millrace.bench.certify import Certificate, certify, invalid, told_of
from millrace.bench.plan import planned
from millrace.bench.settings import InputSettings, LoadSettings, SessionSettings, TargetSettings


def certified(busy_s: float = 0.0, **load: float) -> Certificate:
    """busy_s: of each tenth of a second, in which the client's loop can do nothing else"""
    settings = LoadSettings(**load)  # type: ignore[arg-type]
    plan = planned("http://nobody:1", TargetSettings(), settings, InputSettings(isl=30, osl=200), SessionSettings())

    async def hinder() -> None:
        while True:
            until_s = time.perf_counter() + busy_s
            while time.perf_counter() < until_s:
                pass
            await asyncio.sleep(0.1 - busy_s)

    async def certifying() -> Certificate:
        hindering = asyncio.ensure_future(hinder()) if busy_s else None
        found = await certify(plan, 0.8)
        if hindering is not None:
            hindering.cancel()
        return found

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(certifying())


def test_a_client_that_keeps_up() -> None:
    """8 streams begin within 0.2 s, wait 0.1 s and then have 50 tokens/s for the rest of 0.8 s: 240 tokens."""
    found = certified(concurrency=8)
    assert found.streams == 8 and found.chunks_per_s == pytest.approx(240 / 0.8, rel=0.15)
    assert found.cpu_share < 0.3 and found.delay_p50_ms < 2 and "8 streams" in found.says


def test_a_client_that_is_busy_is_found_out() -> None:
    """60 of each 100 ms it does other things: a chunk that comes then waits 30 ms in the mean."""
    found = certified(busy_s=0.06, request_rate=20)
    assert not found.holds and found.says.startswith("NOT CERTIFIED")
    assert found.delay_p99_ms > 30


@pytest.mark.parametrize("cpu, p99, holds", [(0.79, 4.9, True), (0.8, 1, False), (0.1, 5.0, False)])
def test_what_holds(cpu: float, p99: float, holds: bool) -> None:
    assert Certificate(1, 1.0, cpu, 0.1, p99).holds is holds


@pytest.mark.parametrize(
    "holds, cpu_share, valid",
    [(None, 0.79, None), (None, 0.8, False), (True, 0.79, True), (True, 0.8, False), (False, 0.1, False)],
)
def test_a_client_is_judged_by_its_runs_too(holds: bool | None, cpu_share: float, valid: bool | None) -> None:
    certificate = None if holds is None else Certificate(1, 1.0, 0.1, 0.1, 1.0 if holds else 9.0)
    told = told_of(certificate, cpu_share)
    assert told["valid"] is valid and told["client_cpu_share"] == cpu_share
    said = invalid(told, "in a round")
    assert len(said) == (valid is False) and all(f"{cpu_share:.0%} of a core in a round" in one for one in said)
