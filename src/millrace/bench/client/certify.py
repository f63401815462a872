"""Certification: whether this client can sustain the load on this machine, tested on the null server before the run.

The null server reports when it wrote each chunk, the client when it received it. The difference is the client's own
delay, below which no latency difference can be resolved.
"""

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from millrace.bench.client.client import Client
from millrace.bench.client.client_load import LATE_MS, SATURATED, ClientHealth
from millrace.bench.load.inputs import Session
from millrace.bench.load.prompt_text import PromptWords
from millrace.bench.null_server.ledger import NullTiming, Sent
from millrace.bench.null_server.process import NullProcess
from millrace.bench.run.plan import BenchPlan, prefetch
from millrace.bench.run.run import Run

TTFT_MS, ITL_MS = 100, 20.0  # 50 tokens/s for each stream: faster than most servers are
CHUNKS_PER_S = 4000  # in total: the capacity of the null server
FEWEST_CHUNKS = 10  # for a certificate
MORE = 1.25  # ratio from which a run exceeds what was certified


@dataclass(frozen=True, slots=True)
class Certificate:
    """Certified load. streams: peak concurrency; chunks_per_s, cpu_share (of a core, None if too short): busiest second

    delay_ms: from the null server's write to the client's timestamp; late_ms: lateness of sending at p99
    """

    streams: int
    chunks_per_s: float
    cpu_share: float | None
    delay_p50_ms: float
    delay_p99_ms: float
    late_ms: float = 0.0
    n_chunks: int = FEWEST_CHUNKS

    @property
    def holds(self) -> bool | None:
        """Whether the client keeps up; None if there were too few chunks to tell."""
        if self.cpu_share is None or self.n_chunks < FEWEST_CHUNKS:
            return None
        return self.cpu_share < SATURATED and self.delay_p99_ms < LATE_MS and self.late_ms < LATE_MS

    @property
    def description(self) -> str:
        if self.holds is None:
            return f"not certified: {self.n_chunks} chunks came in that time, too few to say; raise --certify-s"
        text = (
            f"{self.streams} streams, {self.chunks_per_s:,.0f} chunks/s cost {self.cpu_share:.0%} of a core; "
            f"stamps are {self.delay_p50_ms:.2f} ms late, {self.delay_p99_ms:.2f} at p99"
        ) + (f"; requests were sent {self.late_ms:.1f} ms late at p99" if self.late_ms >= LATE_MS else "")
        return text if self.holds else f"NOT CERTIFIED: {text}"

    def covers(self, effort: ClientHealth) -> bool:
        """Whether the certificate applies to a run: one with no more load, or with less than half a saturated core."""
        more = effort.streams > MORE * self.streams or effort.chunks_per_s > MORE * self.chunks_per_s
        return not more or (effort.peak_share or 0.0) < SATURATED / 2


def kept_up(certificate: Certificate | None, efforts: Sequence[ClientHealth]) -> bool | None:
    """Return the validity of a report: False if the client did not keep up in a run or in certification, True if it is
    certified for the runs, None if it kept up but is not certified for them."""
    holds = None if certificate is None else certificate.holds
    if holds is False or not all(effort.keeps_up for effort in efforts):
        return False
    return True if holds and certificate and all(map(certificate.covers, efforts)) else None


def hardest(efforts: Sequence[ClientHealth]) -> ClientHealth:
    """Return the health to report: the highest CPU share, among those that did not keep up if there are any."""
    late = [effort for effort in efforts if not effort.keeps_up]
    return max(late or efforts, key=lambda effort: effort.peak_share or 0.0, default=ClientHealth())


def certificate_text(certificate: Certificate | None, efforts: Sequence[ClientHealth]) -> dict[str, object]:
    """Convert to JSON data for reports of several runs."""
    return {
        "valid": kept_up(certificate, efforts), "client": None if certificate is None else certificate.description,
        "client_cpu_share": max((e.peak_share for e in efforts if e.peak_share is not None), default=None),
    }  # fmt: skip


def doubts(certificate: Certificate | None, efforts: Sequence[ClientHealth], label: str) -> list[str]:
    """Return the warnings about a report's validity; [] if it is valid. label: describes the runs"""
    hard = hardest(efforts)
    if kept_up(certificate, efforts) is False:
        proof = f"; {certificate.description}" if certificate is not None and certificate.holds is False else ""
        return [
            f"INVALID: this client does not keep up ({label}: {hard.description}{proof}). "
            "Send less, or from a machine that does less."
        ]  # fmt: skip
    beyond = [e for e in efforts if certificate is not None and certificate.holds and not certificate.covers(e)]
    if beyond:
        e = hardest(beyond)
        return [
            f"Not proved: {label}, {e.streams} streams and {e.chunks_per_s:,.0f} chunks/s were more than was certified "
            f"({e.description})."
        ]  # fmt: skip
    return []


async def certify(plan: BenchPlan, seconds: float) -> Certificate:
    """Run the plan's load and texts on the null server for a while; of a trace its busiest seconds.

    The first request is sent at once, however low the rate. raises MachineError if the null server does not start
    """
    loop = asyncio.get_running_loop()
    sessions, streams = _busiest(plan, seconds)
    itl_ms = max(ITL_MS, 1e3 * streams / CHUNKS_PER_S)
    null = await loop.run_in_executor(None, NullProcess(NullTiming(str(TTFT_MS), str(itl_ms))).__enter__)
    try:
        target = replace(plan.target, url=null.url, headers={}, keep_text=False)
        arrivals = plan.load.arrivals and replace(plan.load.arrivals, ramp_s=0.0, at_once=True)
        load = replace(
            plan.load, arrivals=arrivals, n_sessions=None, duration_s=seconds, ramp_s=seconds / 4, cancel_share=0.0
        )
        sessions = prefetch(sessions, load)
        async with Client(target) as client:
            run = Run(client, load, plan.extra)
            ending = loop.call_later(seconds, run.stop, "certified")
            await run.drive(sessions)
            ending.cancel()
        return certificate_of(run, await loop.run_in_executor(None, lambda: null.truth))
    finally:
        null.__exit__(None, None, None)


def _busiest(plan: BenchPlan, seconds: float) -> tuple[Iterator[Session], int]:
    """Return the sessions of that time, and the peak number of streams."""
    if plan.busiest is not None:
        return plan.busiest(seconds)
    at_a_time, arrivals = plan.load.concurrency, plan.load.arrivals
    if arrivals is not None:
        come = math.ceil(arrivals.rate_per_s * seconds)
        return plan.sessions(PromptWords()), min(come, at_a_time or come)
    return plan.sessions(PromptWords()), at_a_time or 1


def certificate_of(run: Run, truth: dict[str, Sent]) -> Certificate:
    delays = list[float]()
    for record in run.records:
        answer, sent = record.answer, truth.get(record.answer.id)
        if sent is None:  # cancelled before it arrived
            continue
        heard = answer.chunk_s or ([answer.end_s] if answer.failure is None else [])
        delays += [at_s - sent_s for at_s, sent_s in zip(heard, sent.sent_s, strict=False)]
    effort, (p50, p99) = ClientHealth.from_run(run), np.percentile(delays or [0.0], (50, 99)) * 1e3
    return Certificate(
        effort.streams, effort.chunks_per_s, effort.peak_share, float(p50), float(p99), effort.late_ms, len(delays)
    )  # fmt: skip
