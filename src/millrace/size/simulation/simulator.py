"""Simulation of a server on a virtual clock: the real scheduler, page pool and token budget, with modelled step times.

No model is run: the clock advances by the step time of the planned machine, and every answer has its requested length.
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
_VOCAB = 1 << 15  # ids that distinguish prompts; equal blocks have equal tokens


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Outcome of a simulation. requests: in order of arrival; for sequential calls the last ones, which are the answers

    in_system_s: integral of the requests in the system over time (tests check Little's law with it)
    """

    requests: tuple[RequestOutcome, ...]
    seconds: float
    steps: int
    preemptions: int
    prefix_hits: int
    in_system_s: float

    def values(self, measure: str, after_s: float = 0.0) -> Floats:
        """Return "ttft_s", "itl_s" or "e2e_s" of the requests that arrived after `after_s`."""
        values: Floats = np.array(
            [getattr(request, measure) for request in self.requests if request.arrival.came_s >= after_s]
        )
        finite: Floats = values[~np.isnan(values)]
        return finite


def _nothing() -> None:
    """Report no progress."""


@dataclass(slots=True)
class Simulation:
    """One replica. budget: the server's limit of prompt tokens per step

    front_s: host time per request before it is scheduled, serially
    between: host time after a step with n sequences, before the next may start
    tick: called repeatedly; an exception ends the simulation
    quick: use the event-driven loop, which gives the same times; otherwise EngineLoop, step by step
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

    def run(self, arrivals: Iterable[Arrival], closed: int | None = None) -> SimulationResult:
        """Run until all requests are answered. arrivals: in time order

        closed: number of requests kept in flight; arrival times are ignored then
        raises ConfigError if a request does not fit the context
        """
        server = SimulatedServer(self)
        if closed is None:
            for arrival in self.check(arrivals):
                server.advance(arrival.at_s)
                server.admit(arrival)
            server.advance(math.inf)
            return server.result()
        coming = deque(self.check(arrivals))
        while coming or server.in_flight:
            while coming and server.in_flight < closed:
                server.admit(replace(coming.popleft(), at_s=server.stepped_s))
            server.turn(math.inf)
        return server.result()

    def loop(self) -> FastForwardLoop | SteppedLoop:
        loop_class = FastForwardLoop if self.quick else SteppedLoop
        return loop_class(self.limits, self.clock, self.seconds, self.between, self.budget, self.prefix_cache)

    def check(self, arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
        """Yield the arrivals. raises ConfigError if one does not fit the context, or times are out of order"""
        most, before_s = self.limits.context_tokens, 0.0
        for i, arrival in enumerate(arrivals):
            for n_input, n_output in ((arrival.n_input, arrival.n_output), *arrival.then):
                if n_input < 1 or n_output < 1 or n_input + n_output > most:
                    raise ConfigError(
                        f"request {i} has {n_input} tokens in and {n_output} out", f"1 each, {most} together",
                        "leave it out, or plan for a longer context",
                    )  # fmt: skip
            if not before_s <= arrival.at_s < float("inf"):
                raise ConfigError(
                    f"request {i} comes at {arrival.at_s:g} s, after one at {before_s:g}", "times in order", "sort"
                )
            before_s = arrival.at_s
            yield arrival


class SimulatedServer:
    """One replica that is advanced between arrivals. outcomes: of all requests and sequential calls"""

    def __init__(self, simulation: Simulation) -> None:
        self.clock, self._front_s, self._loop = simulation.clock, simulation.front_s, simulation.loop()
        self._tick = simulation.tick
        self._behind = deque[tuple[float, RequestOutcome]]()  # requests that the host is preparing
        self._free_s, self._in_system_s, self._n_submitted = 0.0, 0.0, 0
        self.outcomes: list[RequestOutcome] = []
        self._in_a_row: list[RequestOutcome] = []  # calls that another call follows
        self._looked_at = 0  # ended requests that `_go_on` has processed

    @property
    def in_flight(self) -> int:
        return len(self.outcomes) - self._loop.ended

    @property
    def stepped_s(self) -> float:
        """Return when the last step ended, before the host time after it."""
        return self.clock.now_s - self._loop.after_s

    def admit(self, arrival: Arrival) -> None:
        self._in_system_s += self.clock.now_s - arrival.at_s  # it arrived during a step
        self._free_s = max(self._free_s, arrival.at_s) + self._front_s
        self.outcomes.append(RequestOutcome(arrival))
        self._behind.append((self._free_s, self.outcomes[-1]))
        if arrival.then:
            self._in_a_row.append(self.outcomes[-1])

    def advance(self, until_s: float) -> None:
        """Advance to a time, or to the end of the step in which it falls; inf: until all requests are answered."""
        while self.clock.now_s < until_s and self.turn(until_s):
            pass

    def turn(self, until_s: float) -> bool:
        """Run one step or several identical ones, or wait; False if there is nothing left to do."""
        self._tick()
        now_s, n = self.clock.now_s, self.in_flight
        while self._behind and self._behind[0][0] <= now_s:
            call = self._behind.popleft()[1]
            self._n_submitted += 1
            self._loop.submit(_prompt(call.arrival, self._n_submitted), call)
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
        """Submit the next calls of requests whose previous call has ended."""
        self._looked_at = self._loop.ended
        ended = [outcome for outcome in self._in_a_row if not math.isnan(outcome.last_s)]
        self._in_a_row = [outcome for outcome in self._in_a_row if math.isnan(outcome.last_s)]
        for outcome in ended:
            self.admit(outcome.arrival.following(outcome.last_s))

    def result(self) -> SimulationResult:
        loop = self._loop
        answers = sorted(
            (outcome for outcome in self.outcomes if not outcome.arrival.then),
            key=lambda outcome: outcome.arrival.came_s,
        )
        return SimulationResult(
            tuple(answers), self.clock.now_s, loop.steps, loop.preemptions, loop.prefix_hits, self._in_system_s
        )


def _prompt(arrival: Arrival, number: int) -> IntArray:
    """Create a prompt: equal blocks have equal tokens; without blocks it starts like no other prompt."""
    ids = np.full(arrival.n_input, TOKEN, np.int32)
    for i, block in enumerate(arrival.blocks[: -(-arrival.n_input // BLOCK)]):
        part = ids[i * BLOCK : (i + 1) * BLOCK]
        _write(part, block)
    if not arrival.blocks:
        _write(ids, number)
    return ids


def _write(part: IntArray, number: int) -> None:
    """Encode a number in the first tokens."""
    for i in range(min(len(part), 5)):
        part[i] = number % _VOCAB
        number //= _VOCAB
