"""The loop that serves, on a virtual clock: the real scheduler, pages and budget, with steps that cost what they would.

Nothing is computed: the executor moves the clock by what the step takes on the machine that is planned for, and every
answer is as long as its request says.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.tokenizer import Specials, Tokenizer
from millrace.engine.executor import Executor, ExecutorLimits, IntArray, StepInputs, StepOutputs
from millrace.errors import ConfigError
from millrace.runtime.batch import TokenBudget
from millrace.runtime.loop import EngineLoop
from millrace.runtime.params import Delta, SamplingParams
from millrace.size.cost import Constants, Instance

Floats = NDArray[np.float64]
BLOCK = 512  # tokens of an id of a trace's prefixes
_VOCAB = 1 << 15  # prompts are made of these; equal blocks are equal text
_TOKEN = 7  # every answer is made of


@dataclass(frozen=True, slots=True)
class Arrival:
    """blocks: an id for each 512 tokens of the prompt, where they are known; those that begin alike share pages"""

    at_s: float
    n_input: int
    n_output: int
    blocks: tuple[int, ...] = ()


# How long a step takes: tokens and starts of the prompts' chunks in it, running answers, and their contexts' mean.
StepTime = Callable[[Sequence[float], Sequence[float], int, float], float]


def step_time(instance: Instance, constants: Constants, host_s: float = 0.0) -> StepTime:
    """host_s: of serving, a running answer and step"""

    def seconds(prompts: Sequence[float], starts: Sequence[float], n: int, context: float) -> float:
        if not prompts:
            return constants.decode_s(instance, n, context) + host_s * n
        return constants.mixed_s(instance, prompts, starts, n, context) + host_s * n

    return seconds


class VirtualClock:
    """Seconds since the beginning; moved by steps, and by waiting for an arrival."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class CostExecutor(Executor):
    """Moves the clock by what each step costs."""

    def __init__(self, limits: ExecutorLimits, clock: VirtualClock, seconds: StepTime) -> None:
        self.limits, self._clock, self._seconds = limits, clock, seconds
        self._step: StepInputs | None = None

    def launch(self, step: StepInputs) -> None:
        self._step = step

    def wait(self) -> StepOutputs:
        step, self._step = self._step, None
        assert step is not None, "nothing was launched"
        n = np.diff(step.starts)
        ends = step.positions[step.starts[1:] - 1] + 1
        prompts = n > 1
        decoding = ends[~prompts]
        mean = float(decoding.mean()) if len(decoding) else 0.0
        self._clock.now_s += self._seconds(n[prompts].tolist(), (ends - n)[prompts].tolist(), len(decoding), mean)
        R = len(step.sampling)
        zeros = np.zeros(R, np.float32)
        none = np.empty((R, 0))
        return StepOutputs(
            np.full(R, _TOKEN, np.int32), zeros, np.ones(R, np.int32), none.astype(np.int32), none.astype(np.float32)
        )

    def close(self) -> None:
        """Nothing is held."""


class _Letters(Tokenizer):
    """Every token is one letter: texts of answers are not looked at."""

    def __init__(self) -> None:
        specials = Specials(named={}, bos_token_id=None, eos_token_id=None, ids=frozenset())
        super().__init__(_VOCAB, specials)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [_TOKEN] * len(text)

    def _token_bytes(self, token_id: int) -> bytes:
        return b"a"

    _first_bytes = _token_bytes


@dataclass(slots=True)
class Seen:
    """One request, in seconds of the virtual clock; nan: it has not come so far."""

    arrival: Arrival
    first_s: float = float("nan")
    last_s: float = float("nan")

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrival.at_s

    @property
    def e2e_s(self) -> float:
        return self.last_s - self.arrival.at_s

    @property
    def itl_s(self) -> float:
        """nan: of an answer of one token"""
        n = self.arrival.n_output - 1
        return (self.last_s - self.first_s) / n if n else float("nan")


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
    """One replica. budget: how much of prompts a step may have, as the server's; closed: requests always in flight"""

    limits: ExecutorLimits
    seconds: StepTime
    budget: TokenBudget | None = None
    prefix_cache: bool = True
    clock: VirtualClock = field(default_factory=VirtualClock)

    def run(self, arrivals: Iterable[Arrival], closed: int | None = None) -> Simulated:
        """Until all is answered. arrivals: in the order of their times; where it is closed, times are not looked at.

        raises ConfigError where a request fits no context
        """
        executor = CostExecutor(self.limits, self.clock, self.seconds)
        loop = EngineLoop(executor, _Letters(), None, self.clock, self.budget, self.prefix_cache)
        coming = deque(self._checked(arrivals))
        seen: list[Seen] = []
        in_system_s, numbers, ended = 0.0, itertools.count(), [0]  # ended: how many, counted by their readers

        def submit(arrival: Arrival) -> None:
            one = Seen(arrival)
            seen.append(one)

            def deliver(deltas: list[Delta]) -> None:
                now_s = self.clock.now_s
                if one.first_s != one.first_s:
                    one.first_s = now_s
                if deltas[-1].finish_reason is not None:
                    one.last_s = now_s
                    ended[0] += 1

            params = SamplingParams(max_tokens=arrival.n_output, temperature=0, ignore_eos=True)
            loop.submit(_prompt(arrival, next(numbers)), params, deliver)

        while coming or ended[0] < len(seen):
            while coming and self._is_due(coming[0], closed, len(seen) - ended[0]):
                arrival = coming.popleft()
                if closed is not None:
                    arrival = replace(arrival, at_s=self.clock.now_s)
                in_system_s += self.clock.now_s - arrival.at_s  # it came within a step, which did not know of it
                submit(arrival)
            before_s, n = self.clock.now_s, len(seen) - ended[0]
            if not loop.step():
                assert coming, "what was submitted is computed, or has ended"
                self.clock.now_s = coming[0].at_s
            in_system_s += n * (self.clock.now_s - before_s)
        stats = loop.stats()
        return Simulated(
            tuple(seen), self.clock.now_s, stats.steps_total, stats.preemptions_total, stats.prefix_hits_total,
            in_system_s,
        )  # fmt: skip

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
    ids = np.full(arrival.n_input, _TOKEN, np.int32)
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
