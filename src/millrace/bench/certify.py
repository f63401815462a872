"""Whether this client, on this machine, can bear the load that it is to send: tried on the null server before the run.

The null server tells when it wrote each chunk; the client says when it had it. What lies between is what the client
adds, and no difference below that can be resolved.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from millrace.bench.client import Client
from millrace.bench.null_ledger import NullTiming, Sent
from millrace.bench.null_process import NullProcess
from millrace.bench.plan import Plan, prepared
from millrace.bench.run import Run
from millrace.bench.words import Words

TTFT_MS, ITL_MS = 100, 20.0  # 50 tokens/s for each stream: faster than most servers are
CHUNKS_PER_S = 4000  # in all, at most: what the null server itself can bear
SATURATED = 0.8  # of a core: from there on, stamps wait for the client itself
LATE_MS = 5.0  # at p99


@dataclass(frozen=True, slots=True)
class Certificate:
    """streams: most at a time; cpu_share: of a core; delay_ms: from the null server's write to the client's stamp"""

    streams: int
    chunks_per_s: float
    cpu_share: float
    delay_p50_ms: float
    delay_p99_ms: float

    @property
    def holds(self) -> bool:
        return self.cpu_share < SATURATED and self.delay_p99_ms < LATE_MS

    @property
    def says(self) -> str:
        said = (
            f"{self.streams} streams, {self.chunks_per_s:,.0f} chunks/s cost {self.cpu_share:.0%} of a core; "
            f"stamps are {self.delay_p50_ms:.2f} ms late, {self.delay_p99_ms:.2f} at p99"
        )
        return said if self.holds else f"NOT CERTIFIED: {said}"


def told_of(certificate: Certificate | None, cpu_share: float) -> dict[str, object]:
    """For reports of several runs. cpu_share: the most of a core that one took; valid: None where the client kept
    up, but did not prove itself"""
    holds = None if certificate is None else certificate.holds
    return {
        "valid": holds if cpu_share < SATURATED else False, "client": None if certificate is None else certificate.says,
        "client_cpu_share": cpu_share,
    }  # fmt: skip


def invalid(told: Mapping[str, Any], where: str) -> list[str]:
    """What people have to read of such a report; nothing, where it is valid. where: the runs in which it is not"""
    if told["valid"] is not False:
        return []
    share = f"{told['client_cpu_share']:.0%} of a core {where}"
    return [f"INVALID: this client does not keep up ({share}). Send less, or from a machine that does less."]


async def certify(plan: Plan, seconds: float) -> Certificate:
    """Drives the plan's own load and texts for so long. raises MachineError where the null server does not start"""
    loop = asyncio.get_running_loop()
    itl_ms = max(ITL_MS, 1e3 * (plan.load.concurrency or 1) / CHUNKS_PER_S)
    null = await loop.run_in_executor(None, NullProcess(NullTiming(str(TTFT_MS), str(itl_ms))).__enter__)
    try:
        target = replace(plan.target, url=null.url, headers={}, keep_text=False)
        load = replace(plan.load, n_sessions=None, duration_s=seconds, ramp_s=seconds / 4, cancel_share=0.0)
        sessions = prepared(plan.sessions(Words()), load)
        async with Client(target) as client:
            run = Run(client, load, plan.extra)
            ending = loop.call_later(seconds, run.stop, "certified")
            await run.drive(sessions)
            ending.cancel()
        return certificate_of(run, await loop.run_in_executor(None, lambda: null.truth))
    finally:
        null.__exit__(None, None, None)


def certificate_of(run: Run, truth: dict[str, Sent]) -> Certificate:
    delays, changes = [0.0], [(0.0, 0)]
    for record in run.records:
        answer, sent = record.answer, truth.get(record.answer.id)
        if sent is None:  # given up before it had arrived
            continue
        heard = answer.chunk_s or ([answer.end_s] if answer.failure is None else [])
        delays += [at_s - sent_s for at_s, sent_s in zip(heard, sent.sent_s, strict=False)]
        changes += [(answer.sent_s, 1), (answer.end_s, -1)]
    streams = int(np.cumsum([by for _, by in sorted(changes)]).max())
    p50, p99 = np.percentile(delays, (50, 99)) * 1e3
    return Certificate(streams, (len(delays) - 1) / run.wall_s, run.cpu_share, float(p50), float(p99))
