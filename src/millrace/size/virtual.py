"""Time that passes by what happens: requests that come, steps that cost, and what became of each request."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millrace.size.cost import Constants, Instance

TOKEN = 7  # every answer is made of


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
