"""Whether this client, on this machine, can bear the load that it is to send: tried on the null server before the run.

The null server tells when it wrote each chunk; the client says when it had it. What lies between is what the client
adds, and no difference below that can be resolved.
"""

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from millrace.bench.client.client import Client
from millrace.bench.client.client_load import LATE_MS, SATURATED, Effort
from millrace.bench.load.inputs import Session
from millrace.bench.load.prompt_text import PromptWords
from millrace.bench.null_server.ledger import NullTiming, Sent
from millrace.bench.null_server.process import NullProcess
from millrace.bench.run.plan import Plan, prepared
from millrace.bench.run.run import Run

TTFT_MS, ITL_MS = 100, 20.0  # 50 tokens/s for each stream: faster than most servers are
CHUNKS_PER_S = 4000  # in all, at most: what the null server itself can bear
FEWEST_CHUNKS = 10  # below, nothing is said
MORE = 1.25  # times what was certified: from there on, a run asks more than that


@dataclass(frozen=True, slots=True)
class Certificate:
    """streams: most at a time; chunks_per_s, cpu_share: of its busiest second, the latter of a core, None where it was
    too short; delay_ms: from the null server's write to the client's stamp; late_ms: of sending, at p99"""

    streams: int
    chunks_per_s: float
    cpu_share: float | None
    delay_p50_ms: float
    delay_p99_ms: float
    late_ms: float = 0.0
    n_chunks: int = FEWEST_CHUNKS

    @property
    def holds(self) -> bool | None:
        """None where there was too little to judge by."""
        if self.cpu_share is None or self.n_chunks < FEWEST_CHUNKS:
            return None
        return self.cpu_share < SATURATED and self.delay_p99_ms < LATE_MS and self.late_ms < LATE_MS

    @property
    def says(self) -> str:
        if self.holds is None:
            return f"not certified: {self.n_chunks} chunks came in that time, too few to say; raise --certify-s"
        said = (
            f"{self.streams} streams, {self.chunks_per_s:,.0f} chunks/s cost {self.cpu_share:.0%} of a core; "
            f"stamps are {self.delay_p50_ms:.2f} ms late, {self.delay_p99_ms:.2f} at p99"
        ) + (f"; requests were sent {self.late_ms:.1f} ms late at p99" if self.late_ms >= LATE_MS else "")
        return said if self.holds else f"NOT CERTIFIED: {said}"

    def covers(self, effort: Effort) -> bool:
        """Whether it says something of a run: of one that asked no more, or left half of what saturates a core."""
        more = effort.streams > MORE * self.streams or effort.chunks_per_s > MORE * self.chunks_per_s
        return not more or (effort.peak_share or 0.0) < SATURATED / 2


def kept_up(certificate: Certificate | None, efforts: Sequence[Effort]) -> bool | None:
    """Of every report: False where this client did not keep up, in a run or where it was to prove itself; None where it
    did, as far as is known, but proved nothing that covers them."""
    holds = None if certificate is None else certificate.holds
    if holds is False or not all(effort.keeps_up for effort in efforts):
        return False
    return True if holds and certificate and all(map(certificate.covers, efforts)) else None


def hardest(efforts: Sequence[Effort]) -> Effort:
    """The one that is told: of those that did not keep up, else of all, where most of a core was taken."""
    late = [effort for effort in efforts if not effort.keeps_up]
    return max(late or efforts, key=lambda effort: effort.peak_share or 0.0, default=Effort())


def certificate_text(certificate: Certificate | None, efforts: Sequence[Effort]) -> dict[str, object]:
    """For reports of several runs."""
    return {
        "valid": kept_up(certificate, efforts), "client": None if certificate is None else certificate.says,
        "client_cpu_share": max((e.peak_share for e in efforts if e.peak_share is not None), default=None),
    }  # fmt: skip


def doubts(certificate: Certificate | None, efforts: Sequence[Effort], where: str) -> list[str]:
    """What people have to read of such a report; nothing, where it is valid. where: of the runs that are told"""
    hard = hardest(efforts)
    if kept_up(certificate, efforts) is False:
        proof = f"; {certificate.says}" if certificate is not None and certificate.holds is False else ""
        return [
            f"INVALID: this client does not keep up ({where}: {hard.says}{proof}). "
            "Send less, or from a machine that does less."
        ]  # fmt: skip
    beyond = [e for e in efforts if certificate is not None and certificate.holds and not certificate.covers(e)]
    if beyond:
        e = hardest(beyond)
        return [
            f"Not proved: {where}, {e.streams} streams and {e.chunks_per_s:,.0f} chunks/s were more than was certified "
            f"({e.says})."
        ]  # fmt: skip
    return []


async def certify(plan: Plan, seconds: float) -> Certificate:
    """Drives the plan's own load and texts for so long, of a trace those seconds in which most requests come; the first
    at once, however low the rate. raises MachineError where the null server does not start"""
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
        sessions = prepared(sessions, load)
        async with Client(target) as client:
            run = Run(client, load, plan.extra)
            ending = loop.call_later(seconds, run.stop, "certified")
            await run.drive(sessions)
            ending.cancel()
        return certificate_of(run, await loop.run_in_executor(None, lambda: null.truth))
    finally:
        null.__exit__(None, None, None)


def _busiest(plan: Plan, seconds: float) -> tuple[Iterator[Session], int]:
    """What is asked in such a time, and how many streams there may be at once."""
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
        if sent is None:  # given up before it had arrived
            continue
        heard = answer.chunk_s or ([answer.end_s] if answer.failure is None else [])
        delays += [at_s - sent_s for at_s, sent_s in zip(heard, sent.sent_s, strict=False)]
    effort, (p50, p99) = Effort.of(run), np.percentile(delays or [0.0], (50, 99)) * 1e3
    return Certificate(
        effort.streams, effort.chunks_per_s, effort.peak_share, float(p50), float(p99), effort.late_ms, len(delays)
    )  # fmt: skip
