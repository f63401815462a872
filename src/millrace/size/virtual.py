"""Time that passes by what happens: requests that come, and what became of each."""

from dataclasses import dataclass

TOKEN = 7  # every answer is made of


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
