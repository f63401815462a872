"""Time that passes by what happens: requests that come, steps that cost, and what became of each request."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from millrace.runtime.step_cost import StepTime
from millrace.size.cost import Constants, Instance
from millrace.size.stack import ENGINE, Stack

TOKEN = 7  # every answer is made of
_KEPT = 4096  # times of steps with prompts, which are often alike


@dataclass(frozen=True, slots=True)
class Arrival:
    """blocks: an id for each 512 tokens of the prompt, where they are known; those that begin alike share pages"""

    at_s: float
    n_input: int
    n_output: int
    blocks: tuple[int, ...] = ()


def at_once(_: int) -> float:
    """No time between two steps: what the host takes is counted with the steps themselves."""
    return 0.0


# The same, as its parts: chunks of prompts; running answers without their keys and values; these.
StepParts = Callable[[Sequence[float], Sequence[float], int, float], tuple[float, float, float]]


def step_parts(instance: Instance, constants: Constants) -> StepParts:
    """Of the engine alone."""

    @lru_cache(_KEPT)
    def chunked(prompts: tuple[float, ...], starts: tuple[float, ...], beside: bool) -> float:
        return constants.chunks_s(instance, prompts, starts, beside)

    @cache
    def decoding(n: int) -> tuple[float, float]:
        return constants.decode_s(instance, n, 0.0), constants.cached_s(instance, n, 1.0)

    def parts(prompts: Sequence[float], starts: Sequence[float], n: int, context: float) -> tuple[float, float, float]:
        chunks_s = chunked(tuple(prompts), tuple(starts), n > 0) if prompts else 0.0
        if not n:
            return chunks_s, 0.0, 0.0
        rest_s, a_token_s = decoding(n)
        return chunks_s, rest_s, a_token_s * instance.model.reached(context)

    return parts


def step_time(instance: Instance, constants: Constants, stack: Stack = ENGINE) -> StepTime:
    """Of the engine's steps, and what serving adds to them."""
    parts = step_parts(instance, constants)

    def seconds(prompts: Sequence[float], starts: Sequence[float], n: int, context: float) -> float:
        chunks_s, rest_s, cached_s = parts(prompts, starts, n, context)
        return stack.prefill * chunks_s + stack.decode * rest_s + stack.cache * cached_s + stack.host_s * n

    return seconds


class VirtualClock:
    """Seconds since the beginning; moved by steps, and by waiting for an arrival."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


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
