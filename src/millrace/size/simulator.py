"""The loop that serves, on a virtual clock: the real scheduler, pages and budget, with steps that cost what they would.

Nothing is computed: the clock moves by what a step takes on the machine that is planned for, and every answer is as
long as its request says.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from millrace.engine.executor import ExecutorLimits, IntArray
from millrace.errors import ConfigError
from millrace.runtime.batch import TokenBudget
from millrace.size.quick import QuickLoop
from millrace.size.stepped import SteppedLoop
from millrace.size.virtual import TOKEN, Arrival, Seen, StepTime, VirtualClock
from millrace.tune.lines import BLOCK

Floats = NDArray[np.float64]
_VOCAB = 1 << 15  # ids that prompts are told apart by; equal blocks are equal text


@dataclass(frozen=True, slots=True)
class Simulated:
    """What happened. in_system_s: the integral of requests in the system over time (Little's law is held to it)"""

    requests: tuple[Seen, ...]
    seconds: float
    steps: int
    preemptions: int
    prefix_hits: int
    in_system_s: float

    def of(self, measure: str, after_s: float = 0.0) -> Floats:
        """ "ttft_s", "itl_s" or "e2e_s" of all that came after the transient."""
        values: Floats = np.array([getattr(one, measure) for one in self.requests if one.arrival.at_s >= after_s])
        known: Floats = values[~np.isnan(values)]
        return known


@dataclass(slots=True)
class Simulation:
    """One replica. budget: how much of prompts a step may have, as the server's

    front_s: of the host for a request before it is scheduled, one after another
    quick: steps in which nothing happens at once, with equal times; else EngineLoop, step by step
    """

    limits: ExecutorLimits
    seconds: StepTime
    budget: TokenBudget | None = None
    prefix_cache: bool = True
    quick: bool = True
    front_s: float = 0.0
    clock: VirtualClock = field(default_factory=VirtualClock)

    def run(self, arrivals: Iterable[Arrival], closed: int | None = None) -> Simulated:
        """Until all is answered. arrivals: in the order of their times

        closed: so many requests are always in flight, and their times are not looked at

        raises ConfigError where a request fits no context
        """
        loop = (QuickLoop if self.quick else SteppedLoop)(
            self.limits, self.clock, self.seconds, self.budget, self.prefix_cache
        )
        coming, behind = deque(self._checked(arrivals)), deque[tuple[float, Seen]]()  # those that the host prepares
        seen: list[Seen] = []
        in_system_s, free_s, n_submitted = 0.0, 0.0, 0
        while coming or behind or loop.ended < len(seen):
            now_s = self.clock.now_s
            while coming and self._is_due(coming[0], closed, len(seen) - loop.ended):
                arrival = coming.popleft() if closed is None else replace(coming.popleft(), at_s=now_s)
                in_system_s += now_s - arrival.at_s  # it came within a step, which did not know of it
                seen.append(Seen(arrival))
                free_s = max(free_s, arrival.at_s) + self.front_s
                behind.append((free_s, seen[-1]))
            while behind and behind[0][0] <= now_s:
                one = behind.popleft()[1]
                n_submitted += 1
                loop.submit(_prompt(one.arrival, n_submitted), one)
            next_s = min(
                coming[0].at_s if coming and closed is None else math.inf, behind[0][0] if behind else math.inf
            )
            n = len(seen) - loop.ended
            if not loop.step(next_s):
                assert next_s < math.inf, "what was submitted is computed, or has ended"
                self.clock.now_s = next_s
            in_system_s += n * (self.clock.now_s - now_s)
        return Simulated(tuple(seen), self.clock.now_s, loop.steps, loop.preemptions, loop.prefix_hits, in_system_s)

    def _is_due(self, arrival: Arrival, closed: int | None, in_flight: int) -> bool:
        return arrival.at_s <= self.clock.now_s if closed is None else in_flight < closed

    def _checked(self, arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
        most, before_s = self.limits.context_tokens, 0.0
        for i, one in enumerate(arrivals):
            if one.n_input < 1 or one.n_output < 1 or one.n_input + one.n_output > most:
                raise ConfigError(
                    f"request {i} has {one.n_input} tokens in and {one.n_output} out", f"1 each, {most} together",
                    "leave it out, or plan for a longer context",
                )  # fmt: skip
            if not before_s <= one.at_s < float("inf"):
                raise ConfigError(
                    f"request {i} comes at {one.at_s:g} s, after one at {before_s:g}", "times in order", "sort"
                )
            before_s = one.at_s
            yield one


def _prompt(arrival: Arrival, number: int) -> IntArray:
    """Tokens that are equal where blocks are, and else begin as no other request's do."""
    ids = np.full(arrival.n_input, TOKEN, np.int32)
    for i, block in enumerate(arrival.blocks[: -(-arrival.n_input // BLOCK)]):
        part = ids[i * BLOCK : (i + 1) * BLOCK]
        _write(part, block)
    if not arrival.blocks:
        _write(ids, number)
    return ids


def _write(part: IntArray, number: int) -> None:
    """The number in the first tokens, so far as there is room."""
    for i in range(min(len(part), 5)):
        part[i] = number % _VOCAB
        number //= _VOCAB
