"""What a loop did lately: its steps, and who was in them. For traces of requests, and for timelines."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from millrace.runtime.request import Request, Timings

STEPS_KEPT = 4096
REQUESTS_KEPT = 512
MOST_TRACES, MOST_STEPS = 8, 512  # that are told at a time: the last ones of an id, which clients choose


class Part(NamedTuple):
    """Of a step: `n` tokens of a choice from `start` on, after which the next one was drawn or not.

    n_prompt: of them in the prompt; the others are output, to draw the next one or again after a preemption
    """

    request: int  # the order in which requests came
    request_id: str
    choice: int
    start: int
    n: int
    n_prompt: int
    draws: bool


class StepSeen(NamedTuple):
    """waiting: sequences that were in no step yet, or gave their pages back"""

    number: int
    began_s: float  # of the loop's clock
    took_s: float
    waiting: int
    parts: tuple[Part, ...]


class RequestSeen(NamedTuple):
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

    steps: deque[StepSeen] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))
    ended: deque[RequestSeen] = field(default_factory=lambda: deque(maxlen=REQUESTS_KEPT))


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """What is known of one request: of its steps, those that are not forgotten."""

    seen: RequestSeen
    steps: Sequence[tuple[StepSeen, Sequence[Part]]]


def traces(request_id: str, history: History, live: Iterable[Request]) -> list[RequestTrace]:
    """Of all requests of that id, running and ended: a call with several prompts has several."""
    running = [
        RequestSeen(r.order, r.id, len(r.prompt), r.n_cached, r.timings, r.claim.tenant)
        for r in live
        if r.id == request_id
    ]
    found = ([seen for seen in tuple(history.ended) if seen.id == request_id] + running)[-MOST_TRACES:]
    wanted: dict[int, list[tuple[StepSeen, Sequence[Part]]]] = {seen.order: [] for seen in found}
    for step in tuple(history.steps):
        of_step: dict[int, list[Part]] = {}
        for part in step.parts:
            if part.request in wanted:
                of_step.setdefault(part.request, []).append(part)
        for order, parts in of_step.items():
            wanted[order].append((step, parts))
    return [RequestTrace(seen, wanted[seen.order][-MOST_STEPS:]) for seen in found]
