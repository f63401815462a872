"""The recent steps and requests of a loop, for request traces and timelines."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace.runtime.request.request import Request, Timings

STEPS_KEPT = 4096
REQUESTS_KEPT = 512
MAX_TRACES, MAX_STEPS = 8, 512  # limits on one report: the last requests with an id, which clients choose, and steps


# A step's chunk: `n` tokens of a choice from `start` on; draws: whether the next token was drawn after them. request:
# number of the request in order of arrival; n_prompt: how many of the n are prompt tokens (the others are output,
# computed to draw the next token or again after a preemption). An array, because 4,096 steps of 64 sequences take 7 MB
# in it, and 45 MB as objects.
PART = np.dtype([("request", "i8"), ("choice", "i4"), ("start", "i4"), ("n", "i4"), ("n_prompt", "i4"), ("draws", "?")])
Parts = NDArray[np.void]  # (n,) of PART


class StepRecord(NamedTuple):
    """One step. waiting: sequences that were in no step yet, or are preempted"""

    number: int
    began_s: float  # by the loop's clock
    took_s: float
    waiting: int
    parts: Parts
    request_ids: tuple[str, ...]  # of each part

    @property
    def n_tokens(self) -> int:
        return int(self.parts["n"].sum())


class RequestRecord(NamedTuple):
    """A request that has ended."""

    order: int
    id: str
    n_prompt: int
    n_cached: int
    timings: Timings
    tenant: str  # whose it was


@dataclass(slots=True)
class History:
    """The recent steps and ended requests. Written by the loop's thread; other threads copy it at once."""

    steps: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))
    ended: deque[RequestRecord] = field(default_factory=lambda: deque(maxlen=REQUESTS_KEPT))
    live: Callable[[], Iterable[Request]] = tuple  # requests that have not ended

    def requests_of(self, tenant: str) -> list[int]:
        """Return the numbers, in `PART`, of a tenant's requests that run or ended lately."""
        running = [request.order for request in self.live() if request.queue_options.tenant == tenant]
        return [record.order for record in tuple(self.ended) if record.tenant == tenant] + running


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """One request and those of its steps that are still in the history."""

    record: RequestRecord
    steps: Sequence[tuple[StepRecord, Parts]]  # with its own parts of each


def traces(request_id: str, history: History, live: Iterable[Request]) -> list[RequestTrace]:
    """Return the traces of all requests with this id, running and ended: a call with several prompts has several."""
    running = [
        RequestRecord(r.order, r.id, len(r.prompt), r.n_cached, r.timings, r.queue_options.tenant)
        for r in live
        if r.id == request_id
    ]
    result = ([record for record in tuple(history.ended) if record.id == request_id] + running)[-MAX_TRACES:]
    own: dict[int, deque[tuple[StepRecord, Parts]]] = {r.order: deque(maxlen=MAX_STEPS) for r in result}
    for step in tuple(history.steps) if result else ():
        if request_id in step.request_ids:
            for order, steps in own.items():
                if len(parts := step.parts[step.parts["request"] == order]):
                    steps.append((step, parts))
    return [RequestTrace(r, tuple(own[r.order])) for r in result]
