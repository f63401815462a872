"""The loop that serves, on a virtual clock: the real scheduler, pages and budget, with steps that cost what they would.

Nothing is computed: the clock moves by what a step takes on the machine that is planned for, and every answer is as
long as its request says.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from millrace.engine.executor import ExecutorLimits, IntArray
from millrace.errors import ConfigError
from millrace.runtime.scheduling.step_cost_model import StepTime
from millrace.runtime.scheduling.token_budget import TokenBudget
from millrace.size.simulation.fast_forward_loop import FastForwardLoop
from millrace.size.simulation.stepwise_loop import SteppedLoop
from millrace.size.simulation.virtual_clock import TOKEN, Arrival, RequestOutcome, VirtualClock, at_once
from millrace.tune.trace_formats import BLOCK

Floats = NDArray[np.float64]
_VOCAB = 1 << 15  # ids that prompts are told apart by; equal blocks are equal text


@dataclass(frozen=True, slots=True)
class Simulated:
    """What happened. requests: in the order in which they came; of calls in a row the last ones, which are answers

    in_system_s: the integral of requests in the system over time (Little's law is held to it)
    """

    requests: tuple[RequestOutcome, ...]
    seconds: float
    steps: int
    preemptions: int
    prefix_hits: int
    in_system_s: float

    def of(self, measure: str, after_s: float = 0.0) -> Floats:
        """ "ttft_s", "itl_s" or "e2e_s" of all that came after the transient."""
        values: Floats = np.array([getattr(one, measure) for one in self.requests if one.arrival.came_s >= after_s])
        known: Floats = values[~np.isnan(values)]
        return known


def _nothing() -> None:
    """Nobody looks at how far it is."""


@dataclass(slots=True)
class Simulation:
    """One replica. budget: how much of prompts a step may have, as the server's

    front_s: of the host for a request before it is scheduled, one after another
    between: what the host takes after a step with so many sequences, before the next may begin
    tick: called again and again while it goes on; what it raises ends it
    quick: steps in which nothing happens at once, with equal times; else EngineLoop, step by step
    """

    limits: ExecutorLimits
    seconds: StepTime
    budget: TokenBudget | None = None
    prefix_cache: bool = True
    quick: bool = True
    front_s: float = 0.0
    between: Callable[[int], float] = at_once
    tick: Callable[[], None] = _nothing
    clock: VirtualClock = field(default_factory=VirtualClock)

    def run(self, arrivals: Iterable[Arrival], closed: int | None = None) -> Simulated:
        """Until all is answered. arrivals: in the order of their times

        closed: so many requests are always in flight, and their times are not looked at

        raises ConfigError where a request fits no context
        """
        server = Server(self)
        if closed is None:
            for arrival in self.checked(arrivals):
                server.advance(arrival.at_s)
                server.take(arrival)
            server.advance(math.inf)
            return server.result()
        coming = deque(self.checked(arrivals))
        while coming or server.in_flight:
            while coming and server.in_flight < closed:
                server.take(replace(coming.popleft(), at_s=server.stepped_s))
            server.turn(math.inf)
        return server.result()

    def loop(self) -> FastForwardLoop | SteppedLoop:
        made = FastForwardLoop if self.quick else SteppedLoop
        return made(self.limits, self.clock, self.seconds, self.between, self.budget, self.prefix_cache)

    def checked(self, arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
        """raises ConfigError where one fits no context, or comes before the last"""
        most, before_s = self.limits.context_tokens, 0.0
        for i, one in enumerate(arrivals):
            for n_input, n_output in ((one.n_input, one.n_output), *one.then):
                if n_input < 1 or n_output < 1 or n_input + n_output > most:
                    raise ConfigError(
                        f"request {i} has {n_input} tokens in and {n_output} out", f"1 each, {most} together",
                        "leave it out, or plan for a longer context",
                    )  # fmt: skip
            if not before_s <= one.at_s < float("inf"):
                raise ConfigError(
                    f"request {i} comes at {one.at_s:g} s, after one at {before_s:g}", "times in order", "sort"
                )
            before_s = one.at_s
            yield one


class Server:
    """One replica between arrivals. seen: all requests that it was given; of calls in a row each"""

    def __init__(self, simulation: Simulation) -> None:
        self.clock, self._front_s, self._loop = simulation.clock, simulation.front_s, simulation.loop()
        self._tick = simulation.tick
        self._behind = deque[tuple[float, RequestOutcome]]()  # those that the host prepares
        self._free_s, self._in_system_s, self._n_submitted = 0.0, 0.0, 0
        self.seen: list[RequestOutcome] = []
        self._in_a_row: list[RequestOutcome] = []  # those behind which another call comes
        self._looked_at = 0  # of those that have ended

    @property
    def in_flight(self) -> int:
        return len(self.seen) - self._loop.ended

    @property
    def stepped_s(self) -> float:
        """When the last step ended and its answers were out, before what the host takes after it."""
        return self.clock.now_s - self._loop.after_s

    def take(self, arrival: Arrival) -> None:
        self._in_system_s += self.clock.now_s - arrival.at_s  # it came within a step, which did not know of it
        self._free_s = max(self._free_s, arrival.at_s) + self._front_s
        self.seen.append(RequestOutcome(arrival))
        self._behind.append((self._free_s, self.seen[-1]))
        if arrival.then:
            self._in_a_row.append(self.seen[-1])

    def advance(self, until_s: float) -> None:
        """To that time, or to the end of the step in which it falls; inf: until all is answered."""
        while self.clock.now_s < until_s and self.turn(until_s):
            pass

    def turn(self, until_s: float) -> bool:
        """A step, or several that are alike, or a wait; False where there is nothing to wait for."""
        self._tick()
        now_s, n = self.clock.now_s, self.in_flight
        while self._behind and self._behind[0][0] <= now_s:
            one = self._behind.popleft()[1]
            self._n_submitted += 1
            self._loop.submit(_prompt(one.arrival, self._n_submitted), one)
        next_s = min(until_s, self._behind[0][0] if self._behind else math.inf)
        if not self._loop.step(next_s):
            if next_s == math.inf:
                assert not self.in_flight, "what was submitted is computed, or has ended"
                return False
            self.clock.now_s = next_s
        self._in_system_s += n * (self.clock.now_s - now_s) - (n - self.in_flight) * self._loop.after_s
        if self._in_a_row and self._loop.ended != self._looked_at:
            self._go_on()
        return True

    def _go_on(self) -> None:
        """The next calls of those whose answer is there, from its end on."""
        self._looked_at = self._loop.ended
        ended = [one for one in self._in_a_row if not math.isnan(one.last_s)]
        self._in_a_row = [one for one in self._in_a_row if math.isnan(one.last_s)]
        for one in ended:
            self.take(one.arrival.following(one.last_s))

    def result(self) -> Simulated:
        loop = self._loop
        answers = sorted((one for one in self.seen if not one.arrival.then), key=lambda one: one.arrival.came_s)
        return Simulated(
            tuple(answers), self.clock.now_s, loop.steps, loop.preemptions, loop.prefix_hits, self._in_system_s
        )


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
