"""Where a request's time went: what its client saw, joined with what the server that answered it says of it.

Of one request, in ms; the client's clock and the server's are never compared, only times that each measured itself:

outside     on the way there and back, and in the client: what the client waited less all that follows
preparing   read, decoded, rendered by its template, tokenised
queue       until its first step
prefill     until the step that drew its first token had ended
telling     turned into text and given to its connection: the first token, and the last one
decode      from the first token to the last, of which a client may see nothing (an end of text)
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import quote

import msgspec
import numpy as np
import numpy.typing as npt

from millrace.bench.client.client import Client, Target
from millrace.bench.client.request_record import Answer

Floats = npt.NDArray[np.float64]
TO_FIRST = ("outside", "preparing", "queue", "prefill", "telling")
TO_END = (*TO_FIRST, "decode")
MOST, MOST_BYTES = 512, 1 << 16  # requests that a server remembers; of what it says of one
TIMEOUT_S, BUDGET_S = 2.0, 10.0  # of one of these questions; of all together
FEWEST = 20  # below, nothing is slow or usual
SLOW = 0.99  # the slowest: from this quantile on,
_FEWEST_SLOW = 3  # at least so many of them
BELOW_MS = 10.0  # a server may note a token when its client has it; what is more is no time of this request


_Ms = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # what is beyond is no time: its sums would be infinite


class ClientTrace(msgspec.Struct):
    """Of `GET /v1/requests/ID/trace`, in ms since the request was queued; None: it has not come so far."""

    preparing_ms: _Ms | None
    queued_ms: _Ms | None
    first_token_ms: _Ms | None
    first_told_ms: _Ms | None
    total_ms: _Ms | None
    told_ms: _Ms | None

    @property
    def is_whole(self) -> bool:
        return None not in (self.preparing_ms, self.queued_ms, self.first_token_ms, self.first_told_ms, self.told_ms)


class _Reply(msgspec.Struct):
    data: list[ClientTrace]


@dataclass(frozen=True, slots=True)
class Waterfall:
    """n: requests that both sides tell of. to_first, to_end: (n, stages) of TO_FIRST and TO_END, in ms"""

    to_first: Floats
    to_end: Floats

    @property
    def n(self) -> int:
        return len(self.to_first)

    @property
    def contradicts(self) -> bool:
        """A request took longer in the server than its client waited: somebody else's is told of by its name."""
        return bool(self.to_first[:, 0].min() < -BELOW_MS)


@dataclass(frozen=True, slots=True)
class LatencyShares:
    """Where the slowest requests' time went. Means in ms by stage: of the slowest, and of those in the middle

    slow_ms: from where on they count as the slowest; n: how many do
    """

    slow_ms: float
    n: int
    slow: Mapping[str, float]
    usual: Mapping[str, float]

    @property
    def says(self) -> str:
        more = {stage: self.slow[stage] - self.usual[stage] for stage in self.slow}
        most = sorted((stage for stage in more if more[stage] > 0), key=lambda stage: -more[stage])[:2]
        total = sum(self.slow.values()) - sum(self.usual.values())
        where = " and ".join(f"{more[stage]:.1f} ms in {stage}" for stage in most)
        return f"the {self.n} slowest took {total:.1f} ms more than usual: {where}" if most else "none was slow"


async def traced(target: Target, answers: Sequence[Answer]) -> dict[str, ClientTrace]:
    """What the server says of these requests, the last of them, by id; {} of a server that keeps no such traces."""
    found: dict[str, ClientTrace] = {}
    until_s = time.monotonic() + BUDGET_S
    async with Client(target) as client:
        for answer in [a for a in answers if a.id][-MOST:]:
            if time.monotonic() > until_s:
                break
            path = f"/v1/requests/{quote(answer.id, safe='')}/trace?steps=0"
            page = await client.get(path, TIMEOUT_S, MOST_BYTES)
            if page.status == 404 and found:
                continue  # forgotten since
            seen = _seen(page)
            if seen is None:
                break  # another server's, or one that has gone: what was measured stands without it
            found[answer.id] = seen
    return found


def _seen(page: Answer) -> ClientTrace | None:
    if page.failure is not None:
        return None
    try:
        told = msgspec.json.decode(page.text, type=_Reply).data
    except (msgspec.MsgspecError, RecursionError):
        return None
    return told[-1] if told else None  # of several by this name the newest


def join_client_server_traces(answers: Sequence[Answer], traces: Mapping[str, ClientTrace]) -> Waterfall | None:
    """None where nobody is told of by both."""
    first, last = [], []
    for answer in answers:
        seen = traces.get(answer.id)
        if seen is None or not seen.is_whole or answer.failure is not None or not answer.chunk_s:
            continue
        stages = _stages(seen)
        ttft, latency = 1e3 * (answer.chunk_s[0] - answer.sent_s), 1e3 * (answer.end_s - answer.sent_s)
        preparing, queue, prefill, telling, decode, told = stages
        first.append((ttft - preparing - queue - prefill - telling, preparing, queue, prefill, telling))
        last.append((latency - sum(stages), preparing, queue, prefill, telling + told, decode))
    return Waterfall(np.array(first), np.array(last)) if first else None


def _stages(seen: ClientTrace) -> tuple[float, float, float, float, float, float]:
    """preparing, queue, prefill, telling the first, decode, telling the last"""
    queued, first = seen.queued_ms or 0.0, seen.first_token_ms or 0.0
    first_told, told = seen.first_told_ms or 0.0, seen.told_ms or 0.0
    end = min(told, max(first_told, seen.total_ms or told))  # of one token, all of it was told at once
    return seen.preparing_ms or 0.0, queued, first - queued, first_told - first, end - first_told, told - end


def latency_shares(times: Floats, stages: Sequence[str]) -> LatencyShares | None:
    """Of (n, stages): the slowest beside the quarter around the median. None below FEWEST requests."""
    if len(times) < FEWEST:
        return None
    total = times.sum(axis=1)
    order = np.argsort(total, kind="stable")
    n = max(_FEWEST_SLOW, round((1 - SLOW) * len(times)))
    slow, usual = order[-n:], order[3 * len(order) // 8 : -(-5 * len(order) // 8)]
    means = (dict(zip(stages, times[rows].mean(axis=0).tolist(), strict=True)) for rows in (slow, usual))
    return LatencyShares(float(total[slow].min()), n, *means)


def breakdown_text(found: Waterfall) -> dict[str, object]:
    """For reports."""
    said: dict[str, object] = {"n": found.n}
    for name, times, stages in (
        ("to_first_token", found.to_first, TO_FIRST),
        ("to_end", found.to_end, TO_END),
    ):
        slow = latency_shares(times, stages)
        said[name] = {
            "mean_ms": dict(zip(stages, times.mean(axis=0).tolist(), strict=True)),
            "slowest": None if slow is None else {
                "from_ms": slow.slow_ms, "n": slow.n, "mean_ms": dict(slow.slow), "usual_ms": dict(slow.usual),
                "says": slow.says,
            },
        }  # fmt: skip
    return said
