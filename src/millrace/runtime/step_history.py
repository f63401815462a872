"""What a loop did lately: its steps, and who was in them. For traces of requests, and for timelines."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from millrace.runtime.request.request import Request, Timings

STEPS_KEPT = 4096
REQUESTS_KEPT = 512
MOST_TRACES, MOST_STEPS = 8, 512  # that are told at a time: the last ones of an id, which clients choose


# Of a step: `n` tokens of a choice from `start` on, after which the next one was drawn or not. request: the order in
# which requests came; n_prompt: of the n in the prompt; the others are output, to draw the next one or again after a
# preemption. Arrays, not objects: 4,096 steps of 64 sequences are 7 MB so, and were 45.
PART = np.dtype([("request", "i8"), ("choice", "i4"), ("start", "i4"), ("n", "i4"), ("n_prompt", "i4"), ("draws", "?")])
Parts = NDArray[np.void]  # (n,) of PART


class StepRecord(NamedTuple):
    """waiting: sequences that were in no step yet, or gave their pages back"""

    number: int
    began_s: float  # of the loop's clock
    took_s: float
    waiting: int
    parts: Parts
    request_ids: tuple[str, ...]  # of each part

    @property
    def n_tokens(self) -> int:
        return int(self.parts["n"].sum())


class RequestRecord(NamedTuple):
    """One that has ended."""

    order: int
    id: str
    n_prompt: int
    n_cached: int
    timings: Timings
    tenant: str  # whose it was


@dataclass(slots=True)
class History:
    """Written by the loop's thread; others copy it in one go."""

    steps: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))
    ended: deque[RequestRecord] = field(default_factory=lambda: deque(maxlen=REQUESTS_KEPT))
    live: Callable[[], Iterable[Request]] = tuple  # requests that have not ended

    def requests_of(self, tenant: str) -> list[int]:
        """Return the numbers, in `PART`, of a tenant's requests that run or ended lately."""
        running = [request.order for request in self.live() if request.claim.tenant == tenant]
        return [record.order for record in tuple(self.ended) if record.tenant == tenant] + running


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """What is known of one request: of its steps, those that are not forgotten."""

    record: RequestRecord
    steps: Sequence[tuple[StepRecord, Parts]]  # and its own parts of each


def traces(request_id: str, history: History, live: Iterable[Request]) -> list[RequestTrace]:
    """Of all requests of that id, running and ended: a call with several prompts has several."""
    running = [
        RequestRecord(r.order, r.id, len(r.prompt), r.n_cached, r.timings, r.claim.tenant)
        for r in live
        if r.id == request_id
    ]
    result = ([record for record in tuple(history.ended) if record.id == request_id] + running)[-MOST_TRACES:]
    own: dict[int, deque[tuple[StepRecord, Parts]]] = {r.order: deque(maxlen=MOST_STEPS) for r in result}
    for step in tuple(history.steps) if result else ():
        if request_id in step.request_ids:
            for order, steps in own.items():
                if len(parts := step.parts[step.parts["request"] == order]):
                    steps.append((step, parts))
    return [RequestTrace(r, tuple(own[r.order])) for r in result]
