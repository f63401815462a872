"""Latency breakdown of requests: client-side times joined with the server's traces.

Stages of a request in ms. Only durations are combined, never clocks of client and server:

outside     network and client: the client's latency minus all stages below
preparing   reading, decoding, chat template, tokenisation
queue       until its first step
prefill     until the end of the step that sampled its first token
telling     detokenisation and delivery to the connection, of the first and the last token
decode      from the first token to the last, which may be invisible to the client (end of text)
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import quote

import msgspec
import numpy as np
import numpy.typing as npt

from millrace.bench.client.client import BenchTarget, Client
from millrace.bench.client.request_record import BenchRecord

Floats = npt.NDArray[np.float64]
TO_FIRST = ("outside", "preparing", "queue", "prefill", "telling")
TO_END = (*TO_FIRST, "decode")
MAX_REQUESTS, MAX_BYTES = 512, 1 << 16  # requests whose traces a server keeps; largest trace
TIMEOUT_S, BUDGET_S = 2.0, 10.0  # of fetching one trace, and all of them
FEWEST = 20  # requests for a breakdown
SLOW = 0.99  # quantile from which requests count as slow
_FEWEST_SLOW = 3  # minimum number of slow requests
BELOW_MS = 10.0  # tolerated negative "outside": a server may note a token after its client received it


_Ms = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # bounded, so that sums stay finite


class ClientTrace(msgspec.Struct):
    """Reply of `GET /v1/requests/ID/trace`: ms since the request was queued; None: not reached."""

    preparing_ms: _Ms | None
    queued_ms: _Ms | None
    first_token_ms: _Ms | None
    first_sent_ms: _Ms | None
    total_ms: _Ms | None
    last_sent_ms: _Ms | None

    @property
    def is_whole(self) -> bool:
        return None not in (
            self.preparing_ms,
            self.queued_ms,
            self.first_token_ms,
            self.first_sent_ms,
            self.last_sent_ms,
        )


class _Reply(msgspec.Struct):
    data: list[ClientTrace]


@dataclass(frozen=True, slots=True)
class Waterfall:
    """Stage times of n requests. to_first, to_end: (n, stages) of TO_FIRST and TO_END, in ms"""

    to_first: Floats
    to_end: Floats

    @property
    def n(self) -> int:
        return len(self.to_first)

    @property
    def contradicts(self) -> bool:
        """Whether a request took longer in the server than for its client: the trace is of another request."""
        return bool(self.to_first[:, 0].min() < -BELOW_MS)


@dataclass(frozen=True, slots=True)
class LatencyShares:
    """Mean ms by stage of the slowest requests and of typical ones. slow_ms: least total time of the n slowest"""

    slow_ms: float
    n: int
    slow: Mapping[str, float]
    usual: Mapping[str, float]

    @property
    def description(self) -> str:
        more = {stage: self.slow[stage] - self.usual[stage] for stage in self.slow}
        most = sorted((stage for stage in more if more[stage] > 0), key=lambda stage: -more[stage])[:2]
        total = sum(self.slow.values()) - sum(self.usual.values())
        where = " and ".join(f"{more[stage]:.1f} ms in {stage}" for stage in most)
        return f"the {self.n} slowest took {total:.1f} ms more than usual: {where}" if most else "none was slow"


async def fetch_traces(target: BenchTarget, answers: Sequence[BenchRecord]) -> dict[str, ClientTrace]:
    """Fetch the server's traces of the last requests, by id; {} if the server keeps no traces."""
    traces: dict[str, ClientTrace] = {}
    until_s = time.monotonic() + BUDGET_S
    async with Client(target) as client:
        for answer in [a for a in answers if a.id][-MAX_REQUESTS:]:
            if time.monotonic() > until_s:
                break
            path = f"/v1/requests/{quote(answer.id, safe='')}/trace?steps=0"
            page = await client.get(path, TIMEOUT_S, MAX_BYTES)
            if page.status == 404 and traces:
                continue  # forgotten since
            trace = _parse_trace(page)
            if trace is None:
                break  # another kind of server, or it is gone: results do not depend on traces
            traces[answer.id] = trace
    return traces


def _parse_trace(page: BenchRecord) -> ClientTrace | None:
    if page.failure is not None:
        return None
    try:
        traces = msgspec.json.decode(page.text, type=_Reply).data
    except (msgspec.MsgspecError, RecursionError):
        return None
    return traces[-1] if traces else None  # the newest of this id


def join_client_server_traces(answers: Sequence[BenchRecord], traces: Mapping[str, ClientTrace]) -> Waterfall | None:
    """Join client and server times; None if no request has both."""
    first, last = [], []
    for answer in answers:
        trace = traces.get(answer.id)
        if trace is None or not trace.is_whole or answer.failure is not None or not answer.chunk_s:
            continue
        stages = _stages(trace)
        ttft, latency = 1e3 * (answer.chunk_s[0] - answer.sent_s), 1e3 * (answer.end_s - answer.sent_s)
        preparing, queue, prefill, telling, decode, delivering_last = stages
        first.append((ttft - preparing - queue - prefill - telling, preparing, queue, prefill, telling))
        last.append((latency - sum(stages), preparing, queue, prefill, telling + delivering_last, decode))
    return Waterfall(np.array(first), np.array(last)) if first else None


def _stages(trace: ClientTrace) -> tuple[float, float, float, float, float, float]:
    """Return preparing, queue, prefill, delivery of the first token, decode, delivery of the last token."""
    queued, first = trace.queued_ms or 0.0, trace.first_token_ms or 0.0
    first_delivered, delivered = trace.first_sent_ms or 0.0, trace.last_sent_ms or 0.0
    end = min(delivered, max(first_delivered, trace.total_ms or delivered))  # of one token, all of it was told at once
    return (
        trace.preparing_ms or 0.0,
        queued,
        first - queued,
        first_delivered - first,
        end - first_delivered,
        delivered - end,
    )


def latency_shares(times: Floats, stages: Sequence[str]) -> LatencyShares | None:
    """Compare the slowest rows of (n, stages) with the quarter around the median. None below FEWEST requests."""
    if len(times) < FEWEST:
        return None
    total = times.sum(axis=1)
    order = np.argsort(total, kind="stable")
    n = max(_FEWEST_SLOW, round((1 - SLOW) * len(times)))
    slow, usual = order[-n:], order[3 * len(order) // 8 : -(-5 * len(order) // 8)]
    means = (dict(zip(stages, times[rows].mean(axis=0).tolist(), strict=True)) for rows in (slow, usual))
    return LatencyShares(float(total[slow].min()), n, *means)


def breakdown_text(waterfall: Waterfall) -> dict[str, object]:
    """Convert a breakdown to JSON data."""
    report: dict[str, object] = {"n": waterfall.n}
    for name, times, stages in (
        ("to_first_token", waterfall.to_first, TO_FIRST),
        ("to_end", waterfall.to_end, TO_END),
    ):
        slow = latency_shares(times, stages)
        report[name] = {
            "mean_ms": dict(zip(stages, times.mean(axis=0).tolist(), strict=True)),
            "slowest": None if slow is None else {
                "from_ms": slow.slow_ms, "n": slow.n, "mean_ms": dict(slow.slow), "usual_ms": dict(slow.usual),
                "says": slow.description,
            },
        }  # fmt: skip
    return report
